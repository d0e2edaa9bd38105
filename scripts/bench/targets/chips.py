"""Floors and forecasts of the same steps on other chips than the H200 that they were compiled for, and others' figures.

GPUs take the kernels of the H200's programs, A100s those on Triton's attention. TPUs have no kept programs: their
forecast is the floor at shares that others reach, and what stores write, without the starts of kernels and small ones;
their states are updated by kernels of XLA, of which the same shares are assumed.
Nothing is measured.
Called by `predict_gpu.py`. Imports no JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from bench.targets.prediction import (
    ASSUMED,
    Assumed,
    Batch,
    attending_layers,
    batch_of,
    expected,
    floor_parts,
    floor_us,
    kv_bytes,
    predict,
    state_bytes,
)

# Shares of the data sheet that others' copies and products reach on an H200; taken for chips without such figures.
_COPY, _PRODUCT = 4.3 / 4.8, 788 / 989
_IN_GROUPS = ("fp8", "awq")  # endings of models' names whose weights have scales of groups
# Of a store that isn't part of a decode: tiles of K and V that are read while as many are written, and a round's time,
# the latency of a copy in and one out; estimated.
_TILES_AT_ONCE, _ROUND_US = 8, 1.5
_SCALED = "times the shares of the data sheet that were reported for an H200 (0.90 of bytes, 0.80 of FLOPs)"


@dataclasses.dataclass(frozen=True)
class Chip:
    """A chip.

    Attributes:
      name: on the command line.
      assumed: the model's constants on it.
      memory_bytes: of the device; steps whose weights and KV take more than 0.85 of it are left out.
      backends: of attention, whose steps it runs; on a TPU none was kept, and the first of a step stands for its own.
      source: of its ceilings.
      attention_share: of bytes and FLOPs per second in the forecast; None: as the model of a GPU.
      converts: formats of weights in groups whose programs it runs as the H200 does; others it widens in memory.
    """

    name: str
    assumed: Assumed
    memory_bytes: float
    backends: tuple[str, ...]
    source: str
    attention_share: tuple[float, float] | None = None
    converts: tuple[str, ...] = ()


def _gpu(name: str, bytes_per_s: float, flops_per_s: float, cores: int, gb: float, source: str, *backends: str) -> Chip:
    is_hopper = "mosaic_gpu" in backends
    assumed = dataclasses.replace(
        ASSUMED, bytes_per_s=bytes_per_s, flops_per_s=flops_per_s, num_slots=2 * cores, is_hopper=is_hopper
    )
    return Chip(name, assumed, gb * 1e9, backends, source, converts=("fp8", "awq") if is_hopper else ("awq",))


def _tpu(name: str, bytes_per_s: float, flops_per_s: float, gb: float, source: str) -> Chip:
    assumed = dataclasses.replace(ASSUMED, bytes_per_s=_COPY * bytes_per_s, flops_per_s=_PRODUCT * flops_per_s)
    # Ragged Paged Attention reaches 86% and 73% on a TPU7x (arXiv 2604.15464), with KV tiles of decodes that are up to
    # 4 times ours.
    return Chip(name, assumed, gb * 2**30, ("mosaic_gpu", "triton"), f"{source}, {_SCALED}", (0.5, 0.5))


CHIPS = {
    chip.name: chip
    for chip in (
        _gpu("h200", ASSUMED.bytes_per_s, ASSUMED.flops_per_s, 132, 141, "see bytes_per_s and flops_per_s",
             "mosaic_gpu", "triton"),
        _gpu("h100", 3.0e12, 700e12, 132, 80, "SXM; what reviewers of measured engines take (data sheet: 3.35e12, "
             "989e12)", "mosaic_gpu", "triton"),
        _gpu("a100", _COPY * 2.039e12, _PRODUCT * 312e12, 108, 80, f"data sheet of the SXM with 80 GB, {_SCALED}",
             "triton"),
        _tpu("v5e", 819e9, 197e12, 16, "docs.cloud.google.com/tpu/docs/v5e"),
        _tpu("v6e", 1638e9, 918e12, 32, "docs.cloud.google.com/tpu/docs/v6e"),
        _tpu("v7x", 7.4e12, 2307e12, 192, "docs.cloud.google.com/tpu/docs/tpu7x; bytes as The Register reports them"),
    )
}  # fmt: skip
# Of other engines on these chips, beside which a forecast stands. Tokens per second are of output unless said.
PUBLIC = (
    ("h100", "Qwen3-8B, 396 requests of 128 / 1,024 at once", "vLLM 0.30: 13.3k tokens/s in bfloat16 (29.7 ms a step), "
     "15.1k in FP8", "silybench-data, capacity.csv of 2026-09-24"),
    ("h100", "Qwen3-8B, 4 requests", "SGLang 0.5.3: 7.14 ms a step in bfloat16, 5.58 in FP8; vLLM 7.40",
     "gpustack performance lab, qwen3-8b/h100-latency"),
    ("v6e", "Qwen3-8B on 4 chips, 256 requests of 1,024 / 1,024", "sglang-jax: 7,572 tokens/s", "sglang-jax cookbook"),
    ("v7x", "Qwen3-8B on 4 chips, 128 requests of 1,024 / 1,024", "sglang-jax: 8,521 tokens/s", "sglang-jax cookbook"),
    ("v6e", "Llama-3.1-8B on one chip, 1,800 / 128", "tpu-inference: at least 10.77 requests/s",
     "tpu-inference, .buildkite/models"),
)  # fmt: skip


def steps_on(chip: Chip, results: list[dict[str, Any]], context: int) -> Iterator[dict[str, Any]]:
    """Yields each step that fits the chip: step, floor_us and forecast_us; GPUs have the model's step_us and parts.

    TPUs have store_us, which is part of the forecast, and store_alone_us, what kernels that only store would take.
    """
    facts = {step: each["facts"] for each in results if _has_layers(each) for step in each["steps"]}
    on_tpu: set[str] = set()
    for each in predict(results, context, chip.assumed):
        model, backend, kind, size, sampling = each.step.split(" ")
        if backend not in chip.backends or not _runs_weights(chip, model):
            continue
        if not _fits(chip, kind, int(size), context, facts[each.step]):
            continue
        told: dict[str, Any] = {"chip": chip.name, "step": each.step, "floor_us": each.floor_us}
        if chip.attention_share is None:
            yield told | dataclasses.asdict(each) | {"step_us": each.step_us, "over_floor": each.over_floor}
            continue
        batch, of_step = batch_of(kind, int(size), context), _on_tpu(facts[each.step])
        step = f"{model} mosaic_tpu {kind} {size} {sampling}"
        if step in on_tpu:
            continue
        on_tpu.add(step)
        share = chip.attention_share
        parts = floor_parts(batch, of_step, sampling, expected(chip.assumed), attention_share=share)
        parts["store"] = _store_us(batch, of_step, chip.assumed)
        floor = floor_us(batch, of_step, sampling, chip.assumed)
        own = _store_alone_us(batch, of_step, chip.assumed)
        yield told | {
            "step": step, "floor_us": floor, "forecast_us": sum(parts.values()), "store_us": parts["store"],
            "store_alone_us": own,
        }  # fmt: skip


def _store_us(batch: Batch, facts: dict[str, int], assumed: Assumed) -> float:
    """What is written of new keys and values: of a decode, whose kernel has read them, whole tiles of the memory."""
    return attending_layers(facts) * _tile_bytes(batch, facts) / assumed.bytes_per_s * 1e6


def _store_alone_us(batch: Batch, facts: dict[str, int], assumed: Assumed) -> float:
    """The same by a kernel that only stores: in a decode it reads the tiles first, a few at a time."""
    if batch.kind != "decode":
        return _store_us(batch, facts, assumed)
    rounds_us = -(-batch.num_seqs // _TILES_AT_ONCE) * _ROUND_US
    return max(2 * _store_us(batch, facts, assumed), attending_layers(facts) * rounds_us)


def _tile_bytes(batch: Batch, facts: dict[str, int]) -> int:
    """Bytes that a layer's new tokens take, or the tiles around the one of each sequence."""
    rows = 32 if facts["kv_itemsize"] == 1 else 8
    tokens = batch.num_seqs * (rows if batch.kind == "decode" else batch.new)
    return kv_bytes(Batch(batch.kind, 1, tokens, 0), facts)


def _has_layers(result: dict[str, Any]) -> bool:
    return bool(result.get("facts")) and bool(result["launches"]["num_layers"])


def _runs_weights(chip: Chip, model: str) -> bool:
    """Whether the chip runs the programs that were kept for the model's format of weights."""
    weights = model.rpartition("-")[2]
    return weights not in _IN_GROUPS or weights in chip.converts


def _fits(chip: Chip, kind: str, size: int, context: int, facts: dict[str, int]) -> bool:
    batch = batch_of(kind, size, context)
    kept = kv_bytes(batch, facts) * attending_layers(facts) + state_bytes(batch, facts) // 2
    return kept + facts["weights_read"] * facts["weight_itemsize"] <= 0.85 * chip.memory_bytes


def _on_tpu(facts: dict[str, int]) -> dict[str, int]:
    """The facts of a GPU's program with tokens as pages of a TPU keep them, in multiples of 128 numbers."""
    if "kv_token_bytes" not in facts:
        return facts
    width = facts["head_dim"]
    return facts | {"kv_token_bytes": facts["kv_token_bytes"] // width * (-(-width // 128) * 128)}
