"""Times the products that are not attention: experts' rows with their weights, and products with quantized weights.

    python -m bench.report.products --json FILE [--tiny]

Shapes are those of a layer of Qwen3-30B-A3B (gate and up of 128 experts) and of Qwen3-8B (gate and up). Whether they
are right is the ladder's question. Writes a row after each: bytes are those of the weights that are read once, of
experts that some token chose, and of rows and results.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.inputs import layers_beyond_cache
from bench.kernels.measure import first_line
from bench.kernels.runners import JaxRunner, Prepared, time_all
from bench.output import write_json
from pallas_kernels import (
    KernelChoice,
    ScaledMatrix,
    float8_product,
    float8_rows,
    group_by_expert,
    grouped_product,
    packed,
)
from pallas_kernels.target import target_device

DTYPES = ("bfloat16", "int8", "float8_e4m3fn")
FORMATS = {
    "bfloat16": ("bfloat16", 0),
    "int8": ("int8", 0),
    "FP8": ("float8_e4m3fn", 0),
    "FP8 in blocks": ("float8_e4m3fn", 128),
    "int4 in groups": ("int4", 128),
}
# Next to those that round rows from some number on: what they gain by it, and from which number on.
AS_THEY_ARE = ", activations as they are"
ROUNDED_ROWS = (64, 96, 128, 256)
EXPERT_LAYERS = 2  # that have weights of their own; further ones choose others of these experts
# A product of rows `[T, in]` of one layer: the function of its own arrays, these, bytes and FLOPs.
Made = tuple[Callable[..., jax.Array], Sequence[tuple[jax.Array, ...]], float, float]


def main() -> None:
    """Measures product by product."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, make in cases(options.tiny):
        print(f"{name} ...", flush=True)
        write_json(options.json, {"rows": rows, "running": name})
        rows.append({"name": name, **_measured(make)})
        print(rows[-1], flush=True)
        write_json(options.json, {"rows": rows})


def cases(tiny: bool) -> Iterator[tuple[str, Callable[[], Made]]]:
    """Names, and functions that make arrays."""
    for tokens in (4,) if tiny else (1, 32, 256, 4096):
        for dtype in DTYPES:
            sizes = (4, 2, 64, 32) if tiny else (128, 8, 2048, 1536)
            yield f"experts, {tokens} tokens, {dtype}", functools.partial(_experts, tokens, dtype, *sizes)
    for rows in (4,) if tiny else (1, 32, 256, 4096):
        for name, (dtype, group) in FORMATS.items():
            shape = (256, 64) if tiny else (4096, 24_576)
            yield f"product, {rows} rows, {name}", functools.partial(_product, rows, dtype, group, *shape)
    for rows in () if tiny else ROUNDED_ROWS:
        dtype, group = FORMATS["FP8 in blocks"]
        for name, backend in (("", "triton"), (AS_THEY_ARE, "xla")):
            make = functools.partial(_product, rows, dtype, group, *shape, float8=backend)
            yield f"product, {rows} rows, FP8 in blocks{name or ', rounded'}", make


def _measured(make: Callable[[], Made]) -> dict[str, Any]:
    try:
        call, own, num_bytes, flops = make()
        runner = JaxRunner(Prepared(lambda _, *arrays: (None, call(*arrays)), [None] * len(own), own))
        (timing,) = time_all({"": runner}, target_device().platform, repeats=5).values()
    except Exception as error:  # a product that fails is a finding; the rest still counts
        return {"seconds": None, "note": first_line(error)}
    s = timing.seconds
    return {"seconds": s, "bytes_per_s": num_bytes / s, "flops_per_s": flops / s, "compile_s": runner.compile_s}


def _numbers(key: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.bfloat16) * (50 if dtype == "int8" else 1)).astype(dtype)


def _experts(tokens: int, dtype: str, num: int, top: int, inputs: int, outputs: int) -> Made:
    keys = jax.random.split(jax.random.key(0), 2 + EXPERT_LAYERS)
    x = jax.random.normal(keys[0], (tokens, inputs), jnp.bfloat16)
    weights = [_numbers(key, (num, outputs, inputs), dtype) for key in keys[2:]]

    def chosen_by(layer: int) -> jax.Array:
        return jax.lax.top_k(jax.random.normal(jax.random.fold_in(keys[1], layer), (tokens, num)), top)[1]

    of_expert = outputs * inputs * jnp.dtype(dtype).itemsize
    num_layers = layers_beyond_cache(len(np.unique(np.asarray(chosen_by(0)))) * of_expert)
    choices = [chosen_by(layer) for layer in range(num_layers)]
    own = [(x, chosen, weights[layer % EXPERT_LAYERS]) for layer, chosen in enumerate(choices)]

    def call(x: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
        return grouped_product(x, group_by_expert(chosen, num), weights, of_tokens=True)

    read = float(np.mean([len(np.unique(np.asarray(chosen))) for chosen in choices])) * of_expert
    places = tokens * top
    return call, own, read + 2 * places * (inputs + outputs), 2 * places * inputs * outputs


def _product(rows: int, dtype: str, group: int, inputs: int, outputs: int, float8: str = "auto") -> Made:
    from jaxsgl.models.matrix import Matrix, quantized_product  # needs flax, and grouped products don't

    num_bytes = inputs * outputs * jax.dtypes.itemsize_bits(dtype) // 8
    keys = jax.random.split(jax.random.key(0), 1 + layers_beyond_cache(num_bytes))
    x = jax.random.normal(keys[0], (rows, inputs), jnp.bfloat16)
    matrices = [_numbers(key, (outputs, inputs), dtype) for key in keys[1:]]
    packing = packed.FRAGMENTS if dtype == "int4" else ""
    flops = 2 * rows * inputs * outputs
    moved = num_bytes + 2 * rows * (inputs + outputs)
    if dtype == "bfloat16":
        return functools.partial(jnp.einsum, "td,nd->tn"), [(x, each) for each in matrices], moved, flops
    scale, blocks = jnp.ones((outputs, inputs // (group or inputs)), jnp.float32), group or 1
    if packing:
        matrices = [packed.pack_numbers(packing, each) for each in matrices]
        scale = packed.pack_groups(packing, scale)

    def call(x: jax.Array, numbers: jax.Array, scale: jax.Array) -> jax.Array:
        if float8 == "triton":  # however few the rows are
            return float8_product(float8_rows(x), ScaledMatrix(numbers, scale, None, group), backend="triton")
        chosen = KernelChoice(float8_product=float8)
        weights = Matrix(numbers, scale, None, None, group or inputs, packing, kernels=chosen, block_outputs=blocks)
        return quantized_product(x, weights, jnp.bfloat16)

    return call, [(x, each, scale) for each in matrices], moved + 4 * scale.size, flops


if __name__ == "__main__":
    main()
