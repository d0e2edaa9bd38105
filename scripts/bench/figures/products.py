"""Products of activations and weights on this machine's CPU, in every form that jaxsgl.models.precision chooses from.

    python scripts/bench products
    python scripts/bench products --rows 1 2 8 32 --weights 12288x4096 4096x12288 --json products.json
    python scripts/bench products --rows 1 8 16 32 64 128 256 512 2048   # AMX ("tiles") against AVX-512

`x [rows, in]` times weights `[out, in]`, as checkpoints store them. "weights first" passes the weights to XLA's library
as the left operand; "into" is the format of the result, by default float32; "native" is the C++ of pallas_kernels, in
each way that the processor supports; the engine takes the fastest one (docs/kernels/native.md). Rows of 16 bits are
those of --weight-only, those of 8 bits meet packed weights. Each program multiplies by several weights, together far
larger than caches, as a model's layers do. Programs take turns, other memory is written between them, and the fastest
repeat counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench.kernels.runners import JaxRunner, Prepared, time_in_turns
from bench.output import figure_parser, write_figures
from jaxsgl.models.precision import weights_first
from pallas_kernels import packed
from pallas_kernels.native import packed_product
from pallas_kernels.native import product as native
from pallas_kernels.native.library import has_pairs, multiplies_bytes, refuse_tiles
from pallas_kernels.packed import PackedMatrix

_WEIGHT_BYTES = 1 << 28
_MOST_LAYERS = 16
HEAD = f"{'rows':>5}{'weights':>14}  {'form':<30}{'ms':>9}{'GFLOP/s':>9}{'GB/s':>7}"


def main(arguments: list[str]) -> None:
    """Measures and prints line by line."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8, 32, 128, 256], help="rows of x")
    parser.add_argument(
        "--weights", type=size, nargs="+", metavar="OUTxIN", default=[(6144, 1024), (1024, 3072), (32000, 1024)],
        help="shapes of weights (default: those of the mid model)",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=10, help="of each, the fastest counts (default 10)")
    options = parser.parse_args(arguments)
    rows = []
    print(HEAD)
    for num_out, num_in in options.weights:
        for num_rows in options.rows:
            for found in measure(num_rows, num_out, num_in, options.repeats):
                rows.append(found)
                print(line(found), flush=True)
    write_figures(options.json, jax=jax.__version__, rows=rows)


def size(text: str) -> tuple[int, int]:
    """Reads OUTxIN."""
    num_out, num_in = map(int, text.split("x"))
    return num_out, num_in


def forms(x: jax.Array, weights: jax.Array) -> dict[str, Callable[[jax.Array, jax.Array], jax.Array]]:
    """The ways to multiply `x` and `weights`, by name; float32 activations are first rounded to the weights' format."""
    name = weights.dtype.name
    if weights.dtype == jnp.int8:
        return _forms_of_int8(x, weights)
    if weights.dtype == jnp.uint8:
        return _forms_of_packed(x, weights)

    def as_is(x: jax.Array, weights: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.einsum("td,nd->tn", x.astype(weights.dtype), weights, preferred_element_type=dtype)

    def turned(x: jax.Array, weights: jax.Array) -> jax.Array:
        return weights_first(x.astype(weights.dtype), weights, jnp.float32)

    ways: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {name: as_is, f"{name}, weights first": turned}
    if weights.dtype == jnp.bfloat16:
        ways[f"{name}, into {name}"] = functools.partial(as_is, dtype=jnp.bfloat16)
        if native.refuse(x, weights) is None:
            native_ways = ["widened", *["paired"] * has_pairs(), *["tiles"] * (refuse_tiles() is None)]
            ways |= {f"{name}, native, {way}": functools.partial(native.rows_product, way=way) for way in native_ways}
    return ways


def _forms_of_int8(x: jax.Array, numbers: jax.Array) -> dict[str, Callable[[jax.Array, jax.Array], jax.Array]]:
    scale, num_in = jnp.ones((len(numbers), 1)), numbers.shape[1]
    if native.refuse_int8(x, numbers, scale, num_in) is not None:
        return {}

    def multiply(x: jax.Array, numbers: jax.Array) -> jax.Array:
        return native.int8_product(x, numbers, scale, num_in)

    return {"int8, native, rows of 16 bits": multiply}


def _forms_of_packed(x: jax.Array, weights: jax.Array) -> dict[str, Callable[[jax.Array, jax.Array], jax.Array]]:
    """Of int8 weights, 32 outputs side by side."""
    num_in = x.shape[1]

    def matrix(weights: jax.Array) -> PackedMatrix:
        return PackedMatrix(weights, jnp.ones((len(weights), packed.SIDE)), None, num_in, packed.INT8)

    def multiply(x: jax.Array, weights: jax.Array) -> jax.Array:
        return packed_product.product(x, matrix(weights), row_bits=8)

    if not multiplies_bytes() or packed_product.refuse(x, matrix(weights)) is not None:
        return {}
    return {"int8, native, rows of 8 bits": multiply}


def measure(num_rows: int, num_out: int, num_in: int, repeats: int) -> list[dict[str, Any]]:
    """Times all forms of one product, in turns."""
    runners = {}
    is_packed = packed.refuse(packed.INT8, (num_out, num_in), num_in) is None
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int8, *[jnp.uint8] * is_packed):
        num_bytes = num_out * num_in * jnp.dtype(dtype).itemsize
        keys = jax.random.split(jax.random.key(0), min(_MOST_LAYERS, max(2, _WEIGHT_BYTES // num_bytes)))
        x = jax.random.normal(keys[0], (num_rows, num_in))
        own = [(x, _weights(key, num_out, num_in, dtype)) for key in keys]
        for name, form in forms(*own[0]).items():
            runners[name] = (JaxRunner(Prepared.of(form, own)), num_bytes)
    timings = time_in_turns({name: runner for name, (runner, _) in runners.items()}, repeats)
    return [
        {
            "rows": num_rows,
            "weights": [num_out, num_in],
            "form": name,
            "seconds": timing.seconds,
            "flops_per_s": 2 * num_rows * num_out * num_in / timing.seconds,
            "weight_bytes_per_s": runners[name][1] / timing.seconds,
        }
        for name, timing in timings.items()
    ]


def _weights(key: jax.Array, num_out: int, num_in: int, dtype: Any) -> jax.Array:
    """Random ones; of uint8 they are packed int8."""
    if dtype == jnp.uint8:
        return jax.random.bits(key, packed.part_shape(packed.INT8, "numbers", (num_out, num_in)), dtype)
    return ((40 if dtype == jnp.int8 else 1) * jax.random.normal(key, (num_out, num_in))).astype(dtype)


def line(row: dict[str, Any]) -> str:
    """A row as text, as wide as the head."""
    weights = "x".join(map(str, row["weights"]))
    return (
        f"{row['rows']:>5}{weights:>14}  {row['form']:<30}{1e3 * row['seconds']:>9.3f}"
        f"{row['flops_per_s'] / 1e9:>9.0f}{row['weight_bytes_per_s'] / 1e9:>7.1f}"
    )
