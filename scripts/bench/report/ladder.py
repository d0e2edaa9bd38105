"""The canaries of a GPU report, from the simplest kernel to a whole step: what each one runs, as data.

Each rung runs in a process of its own (`bench.report.rung`), so that a kernel that hangs or crashes is found by its
rung and leaves the rest alone; what the rung before ran and it does not is where to look. Lengths are chosen by the
tiles and rings of the kernels: 64 tokens a tile, three tiles in a ring. Imports no JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

TILE, RING = 64, 3 * 64
DRY_PATIENCE = 4  # times the limits, where an interpreter shares the processors with whatever else runs there
DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
ORDERED = {"enable_deterministic_inference": True}
HANGS, CRASHES = "hangs on purpose", "crashes on purpose"


@dataclasses.dataclass(frozen=True)
class Rung:
    """One canary.

    Attributes:
      name: unique.
      kind: which function of `bench.report.rung` runs it.
      spec: what that function takes, as JSON.
      limit_s: until it counts as hung, start of the process and compiling included.
      needs: what `preflight` must have found, as for `Section`.
    """

    name: str
    kind: str
    spec: Mapping[str, Any]
    limit_s: float = 60
    needs: tuple[str, ...] = ()


def ladder(attention: tuple[str, ...], *, dry: bool) -> list[Rung]:
    """The rungs, those of attention for each of these backends; tiny ones for `dry`, and two that fail on purpose."""
    rungs = [
        Rung("product of XLA", "product", {"rows": 64 if dry else 8192}),
        Rung("store", "attention", _call("store_kv", "triton", [0, 0], [70, 3], dry)),
        Rung("layer: rotate and store, add and norm", "layer", {"spec": "bfloat16" if dry else "h128_g2_p64_bf16"}),
    ]
    if dry:
        rungs += [Rung(HANGS, "hang", {}, limit_s=20), Rung(CRASHES, "crash", {})]
    for backend in attention:
        rungs += _decodes(backend, dry) + _extends(backend, dry)
    with_index = [] if dry else [_start_with_index(), _start_with_groups()]
    rungs += [_start(dry), *with_index, *_products(dry), *_steps(dry)]
    patience = DRY_PATIENCE if dry else 1
    return [
        rung if rung.kind == "hang" else dataclasses.replace(rung, limit_s=patience * rung.limit_s) for rung in rungs
    ]


def _call(op: str, backend: str, cached: list[int], new: list[int], dry: bool, **fields: Any) -> dict[str, Any]:
    """A call for `KernelCase`. Dry ones have few heads."""
    heads = {"num_kv_heads": 1, "head_dim": 64} if dry else {"num_kv_heads": 8, "head_dim": 128}
    fields = {"page_size": 16 if dry else 64, "num_groups": 2, **heads, **fields}
    return {"op": op, "backend": backend, "cached": cached, "new": new, **fields}


def _latent(num_groups: int, index_size: int = 0) -> dict[str, int]:
    """Fields of a call over latents of DeepSeek's size, whose entries may go on with the key of an index."""
    sizes = {"head_dim": 576, "value_dim": 512, "index_size": index_size}
    return {"num_kv_heads": 1, "num_groups": num_groups, **sizes}


def _decodes(backend: str, dry: bool) -> list[Rung]:
    def rung(name: str, lengths: list[int], **fields: Any) -> Rung:
        call = _call("paged_decode_attention", backend, [n - 1 for n in lengths], [1] * len(lengths), dry, **fields)
        return Rung(f"decode, {name}, {backend}", "attention", call)

    one_tile = rung("one tile", [40, TILE])
    if dry:
        return [one_tile, rung("split", [4 * TILE])] if backend == "triton" else [one_tile]
    latents = [rung(f"latents of {heads} heads", [4096, 1000, 100], **_latent(heads)) for heads in (16, 20, 128)]
    latents.append(rung("latents with an index", [4096, 1000, 100], **_latent(128, 128)))
    return [
        one_tile,
        rung("a ring of tiles", [RING] * 4),
        rung("a ring and a token", [RING + 1] * 4),
        rung("8 heads to one", [RING + 1] * 4, num_groups=8, num_kv_heads=4),
        rung("split", [4096]),
        rung("chained rows", [1000 + i for i in range(256)]),
        rung("window", [4096, 100], sliding_window=1024),
        rung("pages of 16", [RING + 1] * 4, page_size=16),
        rung("float8", [RING + 1, 1000], float8_cache=True),
        *(latents if backend == "triton" else []),
    ]


def _extends(backend: str, dry: bool) -> list[Rung]:
    def rung(name: str, cached: list[int], new: list[int], **fields: Any) -> Rung:
        call = _call("paged_extend_attention", backend, cached, new, dry, **fields)
        return Rung(f"extend, {name}, {backend}", "attention", call)

    one = rung("one item", [0], [24 if dry else 32])
    if dry:
        return [one] if backend == "triton" else []  # JAX 0.10 has no interpreter for Mosaic's
    latents = [rung(f"latents of {heads} heads", [0, 1000], [200, 57], **_latent(heads)) for heads in (16, 128)]
    return [
        one,
        rung("two items", [0, 0], [32, 32]),
        rung("behind cached tokens", [1, RING, 1000], [TILE, TILE + 1, 130]),
        rung("more items than programs", [0] * 4, [2048] * 4),
        rung("window", [4096], [256], sliding_window=1024),
        rung("float8", [500], [200], float8_cache=True),
        *(latents if backend == "triton" else []),
    ]


def _start(dry: bool) -> Rung:
    """What an engine's start tests, at the shapes of Qwen3-30B-A3B and with quantized matrices as of Qwen3-8B's."""
    heads = {"num_kv_heads": 1, "num_groups": 2, "head_dim": 32} if dry else {"num_kv_heads": 4, "num_groups": 8}
    hidden, ffn, experts = (64, 48, 4) if dry else (2048, 768, 128)
    formats = {"dtype": "float32", "kv_dtype": "uint16"} if dry else {"dtype": "bfloat16", "kv_dtype": "bfloat16"}
    dtype = formats["dtype"]
    products = [
        {"num_experts": experts, "outputs": outputs, "inputs": inputs, "dtype": dtype, "num_routed": experts,
         "router": {"top_k": 2 if dry else 8, "renormalize": True}, "of_tokens": outputs != hidden,
         "float8_group": None if dry else 128}
        for outputs, inputs in ((2 * ffn, hidden), (hidden, ffn))
    ]  # fmt: skip
    # Of gpt-oss-20b, and of Qwen3-30B-A3B in AWQ.
    packings = {"mxfp4_fragments": (5760, 2880, 32), "int4_fragments": (1536, 2048, 128)}
    products += [
        products[0] | {"packing": packing, "outputs": 128 if dry else outputs, "inputs": 64 if dry else inputs,
                       "group": 32 if dry else group, "has_zeros": packing == "int4_fragments", "float8_group": None}
        for packing, (outputs, inputs, group) in packings.items()
    ]  # fmt: skip
    matrices = [
        {"outputs": 64 if dry else 6144, "inputs": hidden, "numbers": numbers, "group": 32 if dry else 128,
         "has_zeros": is_int4, "packing": "int4_fragments" if is_int4 else ""}
        for numbers, is_int4 in (("float8_e4m3fn", False), ("int4", True))
    ]  # fmt: skip
    sizes = (2, 2, 16, 16, 4) if dry else (16, 2, 128, 128, 4)  # of Qwen3.5-9B
    state = dict(zip(("key_heads", "group", "key_size", "value_size", "taps"), sizes, strict=True))
    shapes: dict[str, Any] = {
        "head_dim": 128, "page_size": 16 if dry else 64, "hidden_size": hidden, "norm_dtype": dtype,
        "has_head_norms": True, "attention": [{}], "experts": products, "matrices": matrices, "states": [state],
        **heads, **formats,
    }  # fmt: skip
    return Rung("kernels as a start tests them", "start", shapes, 300)


def _start_with_index() -> Rung:
    """The same at the shapes of DeepSeek V3.2's attention on 8 devices."""
    dtypes = dict.fromkeys(("dtype", "kv_dtype", "norm_dtype"), "bfloat16")
    latent = {"num_absorbing": 128, "num_outputs": 128, "key_size": 576}
    latent |= {"num_chosen": 2048, "index_heads": 64, "index_size": 128}
    shapes: dict[str, Any] = {
        "num_kv_heads": 1, "num_groups": 16, "head_dim": 704, "page_size": 64, "hidden_size": 7168, "experts": [],
        "attention": [{"sm_scale": 0.1, "value_dim": 512}], "matrices": [], "latents": [latent], **dtypes,
    }  # fmt: skip
    return Rung("kernels of an index as a start tests them", "start", shapes, 300)


def _start_with_groups() -> Rung:
    """The same at the shapes of DeepSeek V4 Flash's attention."""
    dtypes = dict.fromkeys(("dtype", "kv_dtype", "norm_dtype"), "bfloat16")
    of_index = {"size": 4, "width": 640, "num_chosen": 512, "index_heads": 64}
    shapes: dict[str, Any] = {
        "num_kv_heads": 1, "num_groups": 64, "head_dim": 512, "page_size": 128, "hidden_size": 4096, "experts": [],
        "attention": [{"sliding_window": 128}], "matrices": [], "grouped": [of_index, {"size": 128, "width": 512}, {}],
        **dtypes,
    }  # fmt: skip
    return Rung("kernels of groups of tokens as a start tests them", "start", shapes, 300)


def _products(dry: bool) -> list[Rung]:
    sizes = (
        [(24, 4, 2, 32, 32)] if dry else [(1, 128, 8, 2048, 768), (256, 128, 8, 2048, 768), (4096, 16, 8, 2048, 768)]
    )
    experts = [
        Rung(
            f"grouped product, {tokens} tokens, {dtype}",
            "experts",
            {"tokens": tokens, "experts": num, "top": top, "inputs": inputs, "outputs": outputs, "dtype": dtype},
        )
        for tokens, num, top, inputs, outputs in sizes
        for dtype in ("bfloat16", "int8", "float8_e4m3fn")
    ]
    sizes = [(24, 4, 2, 256, 32)] if dry else [*sizes, (32, 128, 8, 768, 2048)]  # of whole groups, and down
    experts += [
        Rung(
            f"grouped product in float8, {tokens} tokens, {outputs} x {inputs}",
            "experts",
            {"tokens": tokens, "experts": num, "top": top, "inputs": inputs, "outputs": outputs,
             "dtype": "float8_e4m3fn", "group": 128},
        )
        for tokens, num, top, inputs, outputs in sizes
    ]  # fmt: skip
    if not dry:  # by Hopper's own kernels, with tiles of two blocks of rows and of one
        in_float8 = {"dtype": "float8_e4m3fn", "group": 128, "block_outputs": 128}
        experts += [
            Rung(
                f"grouped product{name} on Mosaic, {tokens} tokens, {outputs} x {inputs}",
                "experts",
                {"tokens": tokens, "experts": num, "top": 8, "inputs": inputs, "outputs": outputs,
                 "backend": "mosaic_gpu", **form},
            )
            for tokens, num, inputs, outputs in ((4096, 128, 2048, 1536), (256, 16, 768, 2048))
            for name, form in (("", {"dtype": "bfloat16"}), (" in float8", in_float8))
        ]  # fmt: skip
    shape = {"inputs": 256, "outputs": 64} if dry else {"inputs": 4096, "outputs": 6144}
    matrices = [
        Rung(
            f"product, {name}, {rows} rows",
            "matrix",
            {"rows": rows, "dtype": dtype, "group": group, **shape},
            needs=("flax",),
        )
        for rows in ((4,) if dry else (32, 256))
        for name, dtype, group in (
            ("int8", "int8", 0),
            ("FP8", "float8_e4m3fn", 0),
            ("FP8 in blocks", "float8_e4m3fn", 128),
            ("int4 in groups", "int4", 128),
        )
    ]
    blocks = {"dtype": "float8_e4m3fn", "group": 128, **shape}
    alone = {"rows": 4 if dry else 256, "kernels": {"float8_product": "xla"}, **blocks}
    matrices.append(Rung("product, FP8 in blocks, activations as they are", "matrix", alone, needs=("flax",)))
    if not dry:  # each part of a matrix's tiles, rows of no whole tile, and all of a prompt
        matrices += [
            Rung(f"product, FP8 in blocks, {rows} rows", "matrix", {"rows": rows, **blocks}, needs=("flax",))
            for rows in (100, 300, 4096)
        ]
        # The same by Hopper's own kernel: tiles of two blocks and of one, half of a tile's outputs with a scale.
        matrices += [
            Rung(
                f"product, FP8 in blocks of {outputs} outputs, {rows} rows",
                "matrix",
                {"rows": rows, "block_outputs": outputs, **blocks},
                needs=("flax",),
            )
            for rows, outputs in ((4096, 128), (384, 64))
        ]
        each = {"rows": 4096, "dtype": "float8_e4m3fn", "group": 0, **shape}
        matrices.append(Rung("product, FP8, 4096 rows", "matrix", each, needs=("flax",)))
    return experts + matrices


def _steps(dry: bool) -> list[Rung]:
    """Steps of engines with random weights, whose tokens are compared with those on XLA's kernels.

    Each is a shape, how many of its layers (0: all), and what `bench.report.rung.step` takes besides.
    """
    few_experts = {"n_routed_experts": 32, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
    shapes: list[tuple[str, str, int, dict[str, Any]]] = [
        ("one layer", "tiny" if dry else "qwen3-0.6b", 1, {}),
        ("one layer of a mixture", "tiny-moe" if dry else "qwen3-30b-a3b", 1, {"on_xla": ["experts"]}),
        ("one layer in FP8", "tiny-fp8" if dry else "qwen3-8b-fp8", 1, {"on_xla": ["quantized"]}),
    ]
    if not dry:
        shapes += [
            ("one layer of a mixture in FP8", "qwen3-30b-a3b-fp8", 1, {"on_xla": ["quantized"]}),
            ("one layer in int4", "qwen3-8b-awq", 1, {"on_xla": ["quantized"]}),
            ("one layer of a mixture in int4", "qwen3-30b-a3b-awq", 1, {"on_xla": ["experts", "quantized"]}),
            ("two layers of gpt-oss in MXFP4", "gpt-oss-20b", 2, {"on_xla": ["experts"]}),
            ("one layer with heads of 96", "phi3-mini", 1, {}),
            ("one layer in a fixed order", "qwen3-0.6b", 1, {"flags": ORDERED, "against": "alone"}),
            ("one layer over float8", "qwen3-0.6b", 1, {"flags": {"kv_cache_dtype": "fp8_e4m3"}}),
            ("one layer with drafts", "qwen3-0.6b", 1, {"tokens": 12, "speculation": DRAFTS}),
            ("three layers with states, one without", "qwen3.5-9b", 4, {"on_xla": ["states"]}),
            ("five layers of Mamba-2, one without", "granite-4.0-h-small", 6, {"on_xla": ["experts", "states"]}),
            ("two layers over latents", "deepseek-v2-lite", 2, {"on_xla": ["experts"]}),
            ("two layers over latents, experts in groups", "deepseek-v3", 2,
             {"on_xla": ["experts"], "config": few_experts}),
        ]  # fmt: skip
    shapes.append(("one step", "tiny" if dry else "qwen3-0.6b", 0, {}))
    return [
        Rung(name, "step", {"shape": shape, "layers": layers, "prompt": 20 if dry else 300, **more}, 200, ("engine",))
        for name, shape, layers, more in shapes
    ]
