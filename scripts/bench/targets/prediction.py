"""A roofline model of the engine's steps on a GPU that is not there: from what was compiled to microseconds.

Takes kernels, bytes and FLOPs from the results of `compile_targets.py --grid steps --json`, the KV that attention reads
from the lengths of the batch, and the states of gated delta-nets from its rows. Its constants are in `ASSUMED`, each
with its source. Three figures come of it: the floor (what must be read, at the ceilings), the model (all kernels, each
at the ceilings), and the forecast (all kernels at the shares of the ceilings that others measured of theirs,
`FORECAST`). Nothing here was measured on the engine; a run on a GPU is to be compared line by line. Imports no JAX.
Called by `predict_gpu.py`; other chips than the H200 are in `chips`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from bench.targets.collectives import COLLECTIVES, PER_LAYER, carried, sent


@dataclasses.dataclass(frozen=True)
class Assumed:
    """Constants of the model."""

    bytes_per_s: float = 4.3e12
    flops_per_s: float = 788e12
    kernel_us: float = 2.2
    program_us: float = 10.0
    loose_launch_us: float = 4.0
    num_slots: int = 264
    slot_bytes_per_us: float = 40e3
    slot_start_us: float = 2.0
    decode_share: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"mosaic_gpu": 1.0, "triton": 0.9})
    link_bytes_per_s: float = 370e9
    collective_us: float = 20.0
    one_shot_us: float = 11.0
    two_shot_us: float = 18.0
    extend_share: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"mosaic_gpu": 0.62, "triton": 0.4})
    product_share: float = 1.0
    quantized_share: float = 1.0
    converted_per_s: float = math.inf
    float8_share: float = 2.0
    float8_bytes_share: float = 1.0
    many_float8_share: float = 2.0
    many_experts_share: float = 1.0
    is_hopper: bool = True
    expert_bytes_share: float = 1.0
    expert_flops_share: float = 1.0
    expert_float8_share: float = 2.0
    node_update_us: float = 0.0


SOURCES = {
    "bytes_per_s": "reported of PyTorch's copy of 8.6 GB on an H200, read and written; not ours (data sheet: 4.8e12)",
    "flops_per_s": "reported of PyTorch's bfloat16 product of 8192 x 8192 x 8192 random numbers on an H200; not ours "
    "(data sheet: 989e12)",
    "kernel_us": "start, fill and drain of a kernel inside a CUDA graph; estimated, not measured",
    "program_us": "launch of one CUDA graph and the gap before it; estimated, not measured",
    "loose_launch_us": "a launch outside of command buffers, in place of kernel_us; estimated, not measured",
    "num_slots": "programs of decode attention at once: 2 on each of 132 multiprocessors, by shared memory",
    "slot_bytes_per_us": "the most that one program reads: 2 tiles of 16 KB in flight over 0.8 us of latency",
    "slot_start_us": "until a program's first tile has arrived; programs that follow each other pay it each time, and "
    "not the rows that one program takes in turn, whose first tiles are copied while the row before ends",
    "decode_share": "of the bandwidth that a kernel's loop sustains; Triton's copies take more instructions; estimated",
    "link_bytes_per_s": "what NCCL sends over NVLink 4 in large messages, said by its maintainers (line rate: 450e9 in "
    "each direction); rings are assumed, not sums that switches make; a stated assumption, not measured here",
    "collective_us": "reported of NCCL's all-reduce of up to 16 KB on 8 H100 (19 to 21 us); those of 0.5 to 4 MB were "
    "reported to take up to 20 us more than this and the links; not ours",
    "one_shot_us": "reported of kernels in Triton that read what all other GPUs have, 8 to 128 KB, next to NCCL at 22 "
    "to 24 us (yifuwang/symm-mem-recipes#3: 10.8 to 13.9 us; GPUs not named); of XLA's own no figures were found",
    "two_shot_us": "the same of kernels in two passes, of 10 KB (meta-pytorch/kraken#7: 18.2 us, next to NCCL at 30)",
    "extend_share": "of flops_per_s that attention over prompts reaches; from the instructions of a tile; estimated",
    "product_share": "of flops_per_s, in all products but experts' and those that convert weights: the model takes all",
    "quantized_share": "of flops_per_s, in products whose kernel converts their weights: the model takes all of it",
    "converted_per_s": "weights, of products whose kernel converts them: the model converts in no time",
    "float8_share": "of flops_per_s, in products of float8 with float8: the data sheet has twice the rate of bfloat16",
    "float8_bytes_share": "of bytes_per_s, in the same: the model takes all of it",
    "many_float8_share": "of flops_per_s, in those of many rows by Hopper's own kernel: twice the rate of bfloat16",
    "many_experts_share": "of what a product with one matrix reaches, in products of many rows of experts by Hopper's "
    "own kernel: the model takes all of it",
    "is_hopper": "whether products of many rows are Hopper's own kernels; else they are forecast as those of few",
    "expert_bytes_share": "of bytes_per_s that products of experts reach: the model takes all of it",
    "expert_flops_share": "of flops_per_s that products of experts reach: the model takes all of it",
    "expert_float8_share": "of flops_per_s, in products of experts of float8 with float8: twice the rate of bfloat16",
    "node_update_us": "of the host, to change the addresses of a kernel in a CUDA graph: not in the model",
}
ASSUMED = Assumed()
# What the forecast takes in the place of the model's, with sources: others' figures, and ours where a kernel has run.
FORECAST: dict[str, Any] = {
    "decode_share": {"mosaic_gpu": 0.97, "triton": 0.85},
    "product_share": 0.80,
    "quantized_share": 0.5,
    "converted_per_s": 4.6e12,
    "float8_share": 0.80,
    "float8_bytes_share": 0.68,
    "many_float8_share": 1.4,
    "many_experts_share": 0.85,
    "expert_bytes_share": 0.85,
    "expert_flops_share": 0.45,
    "expert_float8_share": 0.45,
    "node_update_us": 1.25,
}
FORECAST_SOURCES = {
    "decode_share": "ours, of a copy's bandwidth on an H200: 64 rows of 4,096 tokens (kernels.json). FlashInfer's "
    "decode reports 80 to 90%, FlashMLA 3,000 of 3,350 GB/s on an H800",
    "product_share": "ours, on an H200: prompts of Qwen3-8B in steps of 2,048 tokens at 86% of a product's rate "
    "measured next to them (offline_8b.json), 256 rows with 4,096 x 12,288 at 50 to 62% (sizes.json)",
    "quantized_share": "estimated, of int4 in fragments: 415 instructions a warp next to 512 cycles of the matrix "
    "units; the kernel before reached 0.38 (sizes.json). Triton's own: 441 TFLOP/s on an H100 with larger matrices "
    "(triton-lang/triton, pull request 11785)",
    "converted_per_s": "estimated, of int4 in fragments: 246 instructions for 64 weights, at 60% of what an "
    "H200 issues; the kernel before reached 1.8e12, as that of float8 does (sizes.json)",
    "float8_share": "ours: 24,576 x 4,096 with 4,096 rows in 1,280 us on an H200, 644 TFLOP/s (sizes.json). SGLang's "
    "kernel in Triton for FP8 blocks, which scales each group's sums as ours does: 256 and "
    "4,096 x 24576 x 7168 in 143 and 2,200 us, 631 and 656 TFLOP/s (sgl-project/sglang, pull request 5820); "
    "166 and 2,254 us in another report (5207), which is 0.69 and 0.81. DeepGEMM's, not in Triton: 87 and 1,127 us",
    "float8_bytes_share": "ours: the same matrix with 1 and 32 rows in 33 to 38 us, 2.9 TB/s (sizes.json)",
    "many_float8_share": "estimated, no GPU has run it: tiles of 256 x 128 read 4.8 GB for 24,576 x 4,096 with 4,096 "
    "rows, 640 us at the 7.5 TB/s that Triton's kernel got of the second-level cache (sizes.json), which is 1.6; "
    "DeepGEMM's 1,127 us above are 1.6 too",
    "many_experts_share": "estimated, no GPU has run it: 256 rows of an expert, give or take 16, begin anywhere in an "
    "eight, and so lie in 4.6 parts of 64 rows, which a consumer multiplies at once, where 4 would do",
    "expert_bytes_share": "ours, of Qwen3-30B-A3B: gate and up of 32 and 256 rows at 95 and 85%, down at 79 and 85%, "
    "on an H200 (sizes.json); tokamax's kept tunings for an H100: 2.4 of 3.35 TB/s for 8 rows of 8 experts",
    "expert_flops_share": "ours: 380 and 324 TFLOP/s of gate and up, and of down, with 4,096 rows (sizes.json); "
    "tokamax's kept tunings for an H100: 428 to 452 TFLOP/s at the shapes of Qwen3-30B and 235B, 0.43 to 0.46 of 989",
    "expert_float8_share": "no GPU has run them: float8_share less what experts lose in bfloat16 next to a matrix; "
    "bytes move at float8_bytes_share",
    "node_update_us": "1 to 1.5 us each, estimated; where a step's are longer than its kernels, they are its time",
}

FLOAT8_BYTES = 1 + 4 / 128  # of a weight of experts, with its share of a scale
MIN_SPLIT_TOKENS = 128  # of a decode's rows, as the kernels' tables have it

# The share of flops_per_s that each kind of product reaches; those of experts are counted otherwise.
PRODUCT_SHARES = {
    "product": "product_share", "quantized": "quantized_share", "float8": "float8_share",
    "float8 of many": "many_float8_share",
}  # fmt: skip
FLOAT8_EXPERTS = ("float8 experts", "float8 experts of many")


def expected(assumed: Assumed) -> Assumed:
    """The constants of the forecast on the same chip."""
    return dataclasses.replace(assumed, **FORECAST)


@dataclasses.dataclass(frozen=True)
class Batch:
    """A step's batch: `num_seqs` sequences, each of `new` new tokens after `cached` ones."""

    kind: str
    num_seqs: int
    new: int
    cached: int

    @property
    def kv_tokens(self) -> int:
        """KV tokens that attention reads."""
        return self.num_seqs * (self.new + self.cached)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a token that it sees."""
        return self.num_seqs * (self.new * self.cached + self.new * (self.new + 1) // 2)


@dataclasses.dataclass(frozen=True)
class Predicted:
    """One step, in microseconds.

    Attributes:
      step: such as "qwen3-0.6b mosaic_gpu decode 256 greedy".
      floor_us: the least time at the assumed ceilings: weights, KV and logits once each, products at full rate.
      forecast_us: the time to expect of a first run that finds no fault.
      attention_us, states_us, products_us, small_us, links_us, sampling_us, launch_us: the parts; states are those of
        gated delta-nets in a decode, small ones all other kernels, links what devices exchange.
      small_per_layer: kernels of a layer that are neither products nor attention; of layers that recur in groups, on
        average.
      num_kernels: of the whole step.
    """

    step: str
    floor_us: float
    forecast_us: float
    attention_us: float
    states_us: float
    products_us: float
    small_us: float
    links_us: float
    sampling_us: float
    launch_us: float
    small_per_layer: int
    num_kernels: int

    @property
    def step_us(self) -> float:
        """The step's time."""
        kernels_us = self.attention_us + self.states_us + self.products_us + self.small_us + self.sampling_us
        return kernels_us + self.links_us + self.launch_us

    @property
    def over_floor(self) -> float:
        """By which share the step exceeds the floor."""
        return self.step_us / self.floor_us - 1


def predict(results: list[dict[str, Any]], context: int, assumed: Assumed = ASSUMED) -> Iterator[Predicted]:
    """Yields each step of the results, decode steps with `context` tokens of KV per row.

    Leaves out steps with loops whose turns no compiler knows, as those over blocks of prompts in gated delta-nets, and
    with branches: what they read follows from more than the lengths.
    """
    served = [
        each for each in results if each.get("facts") and _is_counted(each)
    ]  # others are kernels and small models
    forward = {step: each for each in served if _has_layers(each) for step in each["steps"]}
    after = {step: each for each in served if not _has_layers(each) for step in each["steps"]}
    for step, program in forward.items():
        if step in after or step.endswith(" greedy"):  # else the program that samples wasn't compiled
            yield _step(step, program, after.get(step), context, assumed)


def batch_of(kind: str, size: int, context: int) -> Batch:
    """The batch of a step of the table; extends are 4 prompts without cached tokens."""
    return Batch(kind, size, 1, context - 1) if kind == "decode" else Batch(kind, 4, size // 4, 0)


def _has_layers(result: dict[str, Any]) -> bool:
    return bool(result["launches"]["num_layers"])


def _is_counted(result: dict[str, Any]) -> bool:
    launches = result["launches"]
    return all(kernel["count"] for kernel in launches["kernels"]) and not launches.get("num_branched")


def _step(
    step: str, program: dict[str, Any], sampling: dict[str, Any] | None, context: int, assumed: Assumed
) -> Predicted:
    _, _, kind, size, sampled = step.split(" ")
    batch, facts = batch_of(kind, int(size), context), program["facts"]
    parts = _parts(step, program, sampling, batch, assumed)
    sober = expected(assumed)
    num_kernels = sum(each["launches"]["num_launches"] for each in ([program, sampling] if sampling else [program]))
    update_us = num_kernels * sober.node_update_us
    kinds, recurring = program["launches"]["layer_kinds"], program["launches"].get("recurring", 1)
    return Predicted(
        step,
        floor_us=floor_us(batch, facts, sampled, assumed, multiplies_float8(program)),
        forecast_us=max(sum(_parts(step, program, sampling, batch, sober).values()), update_us),
        **{f"{name}_us": us for name, us in parts.items()},
        small_per_layer=round(sum(kinds.get(kind, 0) for kind in ("merge", "pallas", "small")) / recurring),
        num_kernels=num_kernels,
    )


def _parts(
    step: str, program: dict[str, Any], sampling: dict[str, Any] | None, batch: Batch, assumed: Assumed
) -> dict[str, float]:
    """Microseconds of each part of a step, by the names of `Predicted`."""
    backend, facts = step.split(" ")[1], program["facts"]
    times = dict.fromkeys(("attention", "states", "products", "small", "links"), 0.0)
    kernels = program["launches"]["kernels"]
    most_written = max((each["bytes_written"] for each in kernels if each["kind"] == "attention"), default=0)
    for kernel in kernels:
        if kernel["kind"] in COLLECTIVES:
            times["links"] += kernel["count"] * _exchange_us(kernel, assumed)
        elif kernel["kind"] == "merge":
            unread = unwritten_bytes(batch, facts, most_written, assumed)
            times["small"] += kernel["count"] * _kernel_us(kernel, assumed, unread)
        elif kernel["kind"] == "attention":
            per_layer = kernel["count"] / attending_layers(facts)
            times["attention"] += kernel["count"] * _attention_us(batch, backend, facts, kernel, assumed) / per_layer
        elif kernel["kind"] == "states":
            times["states"] += kernel["count"] * _states_us(batch, facts, kernel, assumed)
        elif kernel["kind"] in ("experts", "experts of many", "packed experts", *FLOAT8_EXPERTS):
            times["products"] += kernel["count"] * _experts_us(batch, facts, kernel, assumed)
        else:
            name = "products" if kernel["kind"] in PRODUCT_SHARES else "small"
            times[name] += kernel["count"] * _kernel_us(kernel, assumed, rows=batch.num_seqs * batch.new)
    programs = [program, sampling] if sampling else [program]
    sampling_us = sum(k["count"] * _any_us(k, assumed) for k in sampling["launches"]["kernels"]) if sampling else 0.0
    return {**times, "sampling": sampling_us, "launch": sum(_launch_us(each["launches"], assumed) for each in programs)}


def multiplies_float8(program: dict[str, Any]) -> bool:
    """Whether the layers' products are of float8 with float8, which the chip's ceiling is higher for."""
    return not {"float8", "float8 of many"}.isdisjoint(program["launches"]["layer_kinds"])


def floor_us(
    batch: Batch, facts: dict[str, int], sampling: str, assumed: Assumed = ASSUMED, in_float8: bool = False
) -> float:
    """The least time of a step: each layer's KV, all weights, states read and written once, and so logits."""
    return sum(floor_parts(batch, facts, sampling, assumed, in_float8=in_float8).values())


def floor_parts(
    batch: Batch,
    facts: dict[str, int],
    sampling: str,
    assumed: Assumed = ASSUMED,
    *,
    attention_share: tuple[float, float] = (1.0, 1.0),
    in_float8: bool = False,
) -> dict[str, float]:
    """The floor's microseconds by part; attention and states at these shares of the bytes and FLOPs per second.

    `in_float8` are the layers' products, not the head's.
    """
    tokens = batch.num_seqs * batch.new
    head = facts["vocab_size"] * facts["hidden_size"]
    experts = facts.get("expert_weights", 0)  # kept results of dense models don't have it
    layers = facts["weights_read"] - head - experts
    size = facts["weight_itemsize"]
    layer_bytes = facts.get("layer_bytes", layers * size)  # quantized weights have fewer
    bytes_per_s, flops_per_s = assumed.bytes_per_s, assumed.flops_per_s * assumed.product_share
    of_layers = assumed.flops_per_s * assumed.float8_share if in_float8 else flops_per_s
    products_s = max(layer_bytes / bytes_per_s, 2 * layers * tokens / of_layers)
    products_s += max(head * size / bytes_per_s, 2 * head * batch.num_seqs / flops_per_s)
    if experts:
        chosen = facts["experts_per_token"] / facts["num_experts"]
        of_bytes, of_flops = _expert_shares(in_float8 and facts.get("expert_bytes", 0) < experts * size, assumed)
        moved = facts.get("expert_bytes", experts * size) * chosen_share(tokens, facts)
        flops_s = 2 * experts * chosen * tokens / (assumed.flops_per_s * of_flops)
        products_s += max(moved / (assumed.bytes_per_s * of_bytes), flops_s)
    of_bytes, of_flops = attention_share
    kv_s = kv_bytes(batch, facts) / (assumed.bytes_per_s * of_bytes)
    attention_s = attending_layers(facts) * max(kv_s, _attention_flops(batch, facts) / (assumed.flops_per_s * of_flops))
    states_s = max(
        state_bytes(batch, facts) / (assumed.bytes_per_s * of_bytes),
        tokens * facts.get("state_flops", 0) / (assumed.flops_per_s * of_flops),
    )
    # Greedy reads the logits once. Other ways of sampling read them again: once to weigh, and filters some times more.
    passes = {"greedy": 2, "sampled": 3}.get(sampling, 10)
    logits_s = passes * 4 * batch.num_seqs * facts["vocab_size"] / assumed.bytes_per_s
    links_s = 0.0
    if (peers := facts.get("num_devices", 1)) > 1:  # each layer's sums, and the embedding's
        residual = tokens * facts["hidden_size"] * size
        sums = PER_LAYER * facts["num_layers"] + 1
        links_s = sums * sent("all-reduce", residual, peers) / assumed.link_bytes_per_s
    seconds = {
        "attention": attention_s, "states": states_s, "products": products_s, "logits": logits_s, "links": links_s,
    }  # fmt: skip
    return {name: 1e6 * each for name, each in seconds.items()}


def _attention_us(batch: Batch, backend: str, facts: dict[str, int], kernel: dict[str, Any], assumed: Assumed) -> float:
    """One layer's attention."""
    flops_us = _attention_flops(batch, facts) / (assumed.flops_per_s * assumed.extend_share[backend]) * 1e6
    if batch.kind != "decode":
        return assumed.kernel_us + flops_us
    moved = kv_bytes(batch, facts) + kernel["bytes_read"] + kernel["bytes_written"]
    moved -= unwritten_bytes(batch, facts, kernel["bytes_written"], assumed)
    programs = decode_programs(batch.num_seqs, facts["num_kv_heads"], backend, assumed)
    rate = min(assumed.bytes_per_s / 1e6, assumed.num_slots * assumed.slot_bytes_per_us) * assumed.decode_share[backend]
    waves = max(1, math.ceil(programs / assumed.num_slots))
    return assumed.kernel_us + max(moved / rate, flops_us) + waves * assumed.slot_start_us


def _states_us(batch: Batch, facts: dict[str, int], kernel: dict[str, Any], assumed: Assumed) -> float:
    """One layer's states, moved once by Triton's kernel, and what `kernel` counts besides."""
    of_states = batch.num_seqs * facts["layer_state_bytes_moved"]
    moved = of_states + kernel["bytes_read"] + kernel["bytes_written"]
    return assumed.kernel_us + moved / (assumed.bytes_per_s * assumed.decode_share["triton"]) * 1e6


def chosen_share(tokens: int, facts: dict[str, int]) -> float:
    """The share of a layer's experts that some token chooses, if tokens choose at random and alike."""
    return 1 - (1 - facts["experts_per_token"] / facts["num_experts"]) ** tokens


def _experts_us(batch: Batch, facts: dict[str, int], kernel: dict[str, Any], assumed: Assumed) -> float:
    """One product with experts, of which the compiler counted all; only those are read that are chosen, or shared."""
    tokens = batch.num_seqs * batch.new
    chosen = facts["experts_per_token"] / facts["num_experts"]
    shared = kernel.get("shared_bytes", 0)  # kept results of older runs don't have it
    of_experts = kernel["bytes_read"] - shared
    in_float8 = kernel["kind"] in FLOAT8_EXPERTS
    of_bytes, of_flops = _expert_shares(in_float8, assumed)
    if kernel["kind"].endswith("experts of many") and assumed.is_hopper:
        of_flops = assumed.many_experts_share * (assumed.many_float8_share if in_float8 else assumed.product_share)
    is_packed = kernel["kind"] == "packed experts"
    weight_bytes = facts["expert_bytes"] / facts["expert_weights"] if is_packed else facts["weight_itemsize"]
    per_weight = FLOAT8_BYTES if in_float8 else weight_bytes
    flops = 2 * tokens * (chosen * of_experts + shared) / per_weight
    if kernel["flops"]:
        # The compiler counts all rows, of which a device that has some of the experts multiplies its own.
        of_own = 2 * tokens * chosen * kernel.get("matrix_bytes", 0) / per_weight
        flops = min(kernel["flops"], of_own or kernel["flops"])
    read = chosen_share(tokens, facts)
    moved = of_experts * read + shared + kernel["bytes_written"]
    bytes_s = moved / (assumed.bytes_per_s * of_bytes)
    converted_s = of_experts / weight_bytes * read / assumed.converted_per_s if is_packed else 0.0
    return assumed.kernel_us + max(bytes_s, converted_s, flops / (assumed.flops_per_s * of_flops)) * 1e6


def _expert_shares(in_float8: bool, assumed: Assumed) -> tuple[float, float]:
    """Of bytes and FLOPs per second, in products with experts."""
    if in_float8:
        return assumed.float8_bytes_share, assumed.expert_float8_share
    return assumed.expert_bytes_share, assumed.expert_flops_share


def decode_programs(rows: int, heads: int, backend: str, assumed: Assumed = ASSUMED) -> int:
    """Programs of a decode's attention for rows of one length; fewer than the slots are split until they fill them.

    Mosaic's take several rows each where there are more than two rounds of them (`pallas_kernels.partition`): the share
    of one slot in the rows that are left, and from the last fourth of the rows on in that fourth.
    """
    at_once = max(1, assumed.num_slots // heads)
    if backend != "mosaic_gpu" or rows <= 2 * at_once:
        return rows * heads
    chains, left = 0, rows
    while left > 0:
        left -= max(1, max(left, rows // 4) // at_once)
        chains += 1
    return chains * heads


def unwritten_bytes(batch: Batch, facts: dict[str, int], most_written: int, assumed: Assumed) -> float:
    """What a decode's attention leaves of the room for splits, of which rows of one length have as many as fill slots.

    Other rows have more, so a program has room for more splits; no kernel writes or reads the planes left over.
    """
    values = facts["head_dim"]
    if "pair_flops" in facts:
        values = facts["pair_flops"] // (2 * facts["num_heads"]) - facts["head_dim"]
    room = most_written / (4 * batch.num_seqs * facts["num_heads"] * values)  # in splits, of float32
    if batch.kind != "decode" or room <= 1:  # else the output itself is written
        return 0.0
    tokens = batch.new + batch.cached
    splits = min(assumed.num_slots // (batch.num_seqs * facts["num_kv_heads"]), tokens // MIN_SPLIT_TOKENS)
    return most_written * (1 - min(1.0, max(1, splits) / room))


def attending_layers(facts: dict[str, int]) -> int:
    """How many layers attend; in kept results of older runs all did, to keys and values."""
    return facts.get("attending_layers", facts["num_layers"])


def kv_bytes(batch: Batch, facts: dict[str, int]) -> int:
    """Bytes of the KV of the batch in one layer."""
    both = 2 * facts["num_kv_heads"] * facts["head_dim"] * facts["kv_itemsize"]
    return batch.kv_tokens * facts.get("kv_token_bytes", both)


def state_bytes(batch: Batch, facts: dict[str, int]) -> int:
    """Bytes that a decode of the batch moves of its states in all layers."""
    return batch.num_seqs * facts.get("state_bytes_moved", 0)


def _attention_flops(batch: Batch, facts: dict[str, int]) -> int:
    return batch.pairs * facts.get("pair_flops", 4 * facts["num_heads"] * facts["head_dim"])


def _kernel_us(kernel: dict[str, Any], assumed: Assumed, unread: float = 0.0, rows: int = 1) -> float:
    """A kernel that reads and writes what the compiler counted, but for what is `unread`; split sums are part of it.

    Of a product of so many rows whose kernel converts weights, these take their time too.
    """
    moved = (kernel["bytes_read"] + kernel["bytes_written"] - unread) / assumed.bytes_per_s
    if kernel["kind"] in ("float8", "float8 of many"):
        moved /= assumed.float8_bytes_share
    share = PRODUCT_SHARES.get(kernel["kind"])
    flops_per_s = assumed.flops_per_s * (1.0 if share is None else getattr(assumed, share))
    converted = kernel["flops"] / (2 * rows) / assumed.converted_per_s if kernel["kind"] == "quantized" else 0.0
    return assumed.kernel_us + max(moved, converted, kernel["flops"] / flops_per_s) * 1e6


def _any_us(kernel: dict[str, Any], assumed: Assumed) -> float:
    return _exchange_us(kernel, assumed) if kernel["kind"] in COLLECTIVES else _kernel_us(kernel, assumed)


def _exchange_us(kernel: dict[str, Any], assumed: Assumed) -> float:
    """One collective."""
    whole, peers = carried(kernel["kind"], kernel["bytes_read"], kernel["bytes_written"]), kernel["peers"]
    start_us = {"one-shot": assumed.one_shot_us, "two-shot": assumed.two_shot_us}
    by = kernel.get("by", "")  # which files from before there were such kernels don't say
    moved = (peers - 1) * whole if by == "one-shot" else sent(kernel["kind"], whole, peers)
    return start_us.get(by, assumed.collective_us) + moved / assumed.link_bytes_per_s * 1e6


def _launch_us(launches: dict[str, Any], assumed: Assumed) -> float:
    """Of the program's command buffers, and what kernels outside of them take longer to start; none if it is one."""
    if launches["command_buffers"] == 1:
        return assumed.program_us
    if launches.get("loose_kernels") is None:  # kept results of older runs
        loose = launches["num_launches"]
        return assumed.program_us + loose * (assumed.loose_launch_us - assumed.kernel_us)
    loose = launches["loose_kernels"]
    return launches["command_buffers"] * assumed.program_us + loose * (assumed.loose_launch_us - assumed.kernel_us)
