"""Number formats of weights, activations and KV cache, and products of activations and weights in those formats.

Accelerators use one format for all, and XLA and its libraries choose how to multiply. A CPU multiplies 16 bit weights
with float32 accumulation (see `product`), but does everything else in float32: XLA has no vector code for 16 bit
arithmetic there, and so widens and narrows around each operation. The KV cache has 16 bits on a CPU too, since it is
read as much as the weights. bfloat16 is kept there as uint16, and float8 as uint8 (`pallas_kernels.paged_kv`), since
XLA would widen the whole cache in order to write a row of it.

The engine calls `resolve_precision` at start-up; the layers call `product`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxsgl.errors import ConfigError
from jaxsgl.models.arch import ModelArch
from jaxsgl.models.matrix import Matrix, Rows, Weights, gated_rows, native_gated_product, quantized_product
from jaxsgl.models.quantization import FP8_E4M3
from pallas_kernels import ordered_product
from pallas_kernels.dots import dot_precision
from pallas_kernels.native import library as native_library
from pallas_kernels.native import product as native_product
from pallas_kernels.order import is_order_fixed
from pallas_kernels.paged_kv import BITS, FLOAT8, FLOAT8_BITS, numbers_dtype
from pallas_kernels.target import CPUINFO, processor_flags, target_device

BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}  # in Linux' list of a processor's features
# On a GPU: the tile of a product's result that one multiprocessor makes, and the fewest numbers worth a part of a sum.
TILE_ROWS, TILE_COLUMNS, MIN_PART = 64, 128, 256
MAX_PARTS, POWERS = 8, (1, 2, 4, 8)
PART_STEP, LEAST_PART = 64, 192  # numbers that a product of XLA takes at a time, and those of which it cuts no sums
MANY_INPUTS = 2048  # of which XLA cuts sums for more rows than a tile has
FEW_ROWS = 128  # up to as many rows, packing the weights costs more than the multiplications save
FEW_OUTPUTS = 1024  # weights that cost little to pad, and those of float32 that C++ multiplies: XLA is faster with many

logger = logging.getLogger(__name__)


class Precision(NamedTuple):
    """The formats of one engine."""

    weights: jnp.dtype
    activations: jnp.dtype
    kv: jnp.dtype


def resolve_precision(
    flag: str, kv_flag: str, arch: ModelArch, platform: str, *, cpu_multiplies_bfloat16: Callable[[], bool]
) -> Precision:
    """The formats for the flags `--dtype` and `--kv-cache-dtype` on a platform ("cpu", "gpu", "tpu").

    auto: the checkpoint's; on a CPU float32, unless the checkpoint is bfloat16 and the CPU multiplies that fast. The KV
    cache follows the weights, unless the checkpoint was calibrated for a float8 one and the cache holds no latents.
    `cpu_multiplies_bfloat16` is called only if its answer matters, since it may compile kernels.

    Raises `ConfigError` for a KV cache that the kernels of an accelerator can't multiply with the activations.
    """
    if flag == "auto":
        keeps = platform != "cpu" or (arch.dtype == "bfloat16" and cpu_multiplies_bfloat16())
        flag = arch.dtype if keeps else "float32"
    weights = jnp.dtype(flag)
    kv = _kv_numbers(kv_flag, arch, weights)
    if kv == FLOAT8 and (held := _held_instead_of_heads(arch)):
        raise ConfigError(
            f"--kv-cache-dtype {FP8_E4M3} does not go with {arch.name}, whose cache holds {held}: leave it out"
        )
    if platform != "cpu":
        if kv not in (weights, FLOAT8):
            raise ConfigError(
                f"--kv-cache-dtype {kv.name} does not go with weights in {weights.name} on a {platform}, whose kernels "
                f"multiply one format: give --dtype {kv.name}, or leave --kv-cache-dtype out"
            )
        return Precision(weights, weights, kv)
    bits = {jnp.dtype(jnp.bfloat16): BITS, jnp.dtype(FLOAT8): FLOAT8_BITS}
    return Precision(weights, jnp.dtype(jnp.float32), bits.get(kv, kv))


def _kv_numbers(flag: str, arch: ModelArch, weights: jnp.dtype) -> jnp.dtype:
    """What the numbers of the KV cache are, however they are kept."""
    if flag == "auto":
        told = arch.kv_cache_dtype
        if told is not None and (held := _held_instead_of_heads(arch)):
            logger.info("%s is calibrated for a KV cache of %s; its %s stay %s", arch.name, told, held, weights.name)
            told = None
        flag = told or weights.name
    return jnp.dtype(FLOAT8 if flag == FP8_E4M3 else flag)


def _held_instead_of_heads(arch: ModelArch) -> str:
    """What the cache holds that has no scales; "" if that is keys and values of heads."""
    if arch.grouped is not None:
        return "entries of groups of tokens"
    return "" if arch.latent is None else "latents"


def kv_cache_flag(kv: jnp.dtype) -> str:
    """The format of a KV cache as `--kv-cache-dtype` calls it; those that only "auto" yields by their own names."""
    numbers = numbers_dtype(kv)
    return FP8_E4M3 if numbers == FLOAT8 else numbers.name


def cpu_multiplies_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether bfloat16 weights are fast: Linux lists products of them for the processor, or our kernels run on it."""
    return not BFLOAT16_FLAGS.isdisjoint(processor_flags(cpuinfo)) or native_library.load() is None


def product(x_TD: Rows, weights: Weights, dtype: DTypeLike | None = None) -> jax.Array:
    """`x [T, D]` times `weights [..., D]`, as checkpoints store them: `[T, ...]` in `dtype` (default: x's).

    Multiplies in the weights' format and adds up in `dtype`; quantized weights as `quantized_product` says. Rows in
    float32 are multiplied as such on any device.
    """
    dtype = dtype or x_TD.dtype
    if isinstance(weights, Matrix):
        return quantized_product(x_TD, weights, dtype)
    assert isinstance(x_TD, jax.Array), "rows are rounded for quantized weights"
    matrix = weights.reshape(-1, weights.shape[-1])
    if is_order_fixed():
        return ordered_product(x_TD, matrix, dtype).reshape(len(x_TD), *weights.shape[:-1])
    rows = x_TD.astype(weights.dtype)
    native = _native_product(x_TD, matrix) if dtype == jnp.float32 and target_device().platform == "cpu" else None
    if native is not None:
        out = native
    elif target_device().platform == "cpu" and len(rows) <= FEW_ROWS:
        out = weights_first(rows, matrix, dtype)
    else:
        out = jnp.einsum("td,nd->tn", rows, matrix, precision=dot_precision(x_TD), preferred_element_type=dtype)
    return out.reshape(len(rows), *weights.shape[:-1])


def product_of_few(x_TD: jax.Array, weights_ND: jax.Array) -> jax.Array:
    """`product` with a matrix `[N, D]` of a few outputs, to be read by what XLA computes.

    On a GPU these are sums, which XLA joins with what makes the rows and with what reads the outputs. A product is a
    kernel of its own, and one more where XLA cuts its sums.
    """
    if target_device().platform != "gpu" or is_order_fixed():
        return product(x_TD, weights_ND)
    rows, matrix = (each.astype(jnp.float32) for each in (x_TD, weights_ND))
    return jnp.sum(rows[:, None] * matrix, axis=-1).astype(x_TD.dtype)


def gated_product(x_TD: Rows, gate_up: Weights, activation: str, down: Weights) -> Rows:
    """activation(gate(x)) * up(x) of weights `[2, F, D]`, or activation(up(x)) of `[1, F, D]`: rows `[T, F]` for a
    product with `down`.

    On a CPU one kernel does both, so that twice as many numbers needn't go to memory and back.
    """
    gated = None if is_order_fixed() else native_gated_product(x_TD, gate_up, activation)
    return gated_rows(product(x_TD, gate_up), activation, down) if gated is None else gated


def _native_product(x_TD: jax.Array, weights_ND: jax.Array) -> jax.Array | None:
    """`[T, N]` float32 by C++ on a CPU, where a row's bits don't depend on other rows; None where XLA must do it.

    Few outputs, as those of routers, may be any number.
    """
    num_outputs = len(weights_ND)
    padding = -num_outputs % native_product.OUT_STEP if num_outputs <= FEW_OUTPUTS else 0
    padded = jax.ShapeDtypeStruct((num_outputs + padding, weights_ND.shape[1]), weights_ND.dtype)
    multiply: Callable[[jax.Array, jax.Array], jax.Array]
    if native_product.refuse(x_TD, padded) is None:
        multiply = native_product.rows_product
    elif num_outputs <= FEW_OUTPUTS and native_product.refuse_float(x_TD, padded) is None:
        multiply = native_product.float_product
    else:
        return None
    if padding == 0:
        return multiply(x_TD, weights_ND)
    return multiply(x_TD, jnp.pad(weights_ND, ((0, padding), (0, 0))))[:, :num_outputs]


def product_in_parts(x_TD: Rows, weights: Weights, dtype: DTypeLike | None = None) -> jax.Array:
    """`x [T, D]` times `weights [..., D]` for a reader that adds up parts: `[P, T, ...]` float32, or `[T, ...]`.

    What is in one part is in `dtype` (default: x's).

    On a GPU a product with few results keeps its multiprocessors busy only if several of them share each sum. XLA cuts
    such a product too, but adds the parts up in a kernel of its own, which the reader here saves. Elsewhere, and where
    the results are many, it is `product`.
    """
    device = target_device()
    if isinstance(weights, Matrix):
        return quantized_product(x_TD, weights, x_TD.dtype if dtype is None else dtype, in_parts=True)
    assert isinstance(x_TD, jax.Array), "rows are rounded for quantized weights"
    matrix = weights.reshape(-1, weights.shape[-1])
    if is_order_fixed():
        out = ordered_product(x_TD, matrix, dtype, in_parts=True)
        return out.reshape(*out.shape[:-1], *weights.shape[:-1])
    if device.platform != "gpu" or weights.dtype.itemsize > 2:
        return product(x_TD, weights, dtype)
    num_parts = num_parts_of(len(x_TD), matrix.shape[0], matrix.shape[1], device.num_cores)
    if num_parts == 1:
        return product(x_TD, weights, dtype)
    rows, matrix = (each.reshape(len(each), num_parts, -1) for each in (x_TD.astype(weights.dtype), matrix))
    out = jnp.einsum("tpd,npd->ptn", rows, matrix, preferred_element_type=jnp.float32)
    return out.reshape(*out.shape[:-1], *weights.shape[:-1])


def product_of_heads(x_TD: Rows, weights: Weights) -> jax.Array:
    """`product_in_parts` where XLA would cut the sums, too, and add up in a kernel of its own; else `product`.

    Compiled for an H200 it does so for up to 64 rows, and for more where there are many inputs. Our kernels for
    quantized weights don't.
    """
    is_whole = isinstance(weights, Matrix) or (len(x_TD) > TILE_ROWS and weights.shape[-1] < MANY_INPUTS)
    return product(x_TD, weights) if is_whole else product_in_parts(x_TD, weights)


def flat_product_in_parts(x_TD: Rows, weights: Weights) -> jax.Array:
    """`product_in_parts` with weights `[..., D]`, whose outputs lie on one axis: `[T, N]`, or parts."""
    out = product_in_parts(x_TD, weights)
    return out.reshape(*out.shape[: out.ndim - len(weights.shape) + 1], -1)


def products_side_by_side(x_TD: Rows, first: Weights, second: Weights) -> tuple[jax.Array, jax.Array]:
    """`x [T, D]` times two matrices `[..., D]`, each as `flat_product_in_parts` returns it.

    On a GPU both may be one product, with the outputs of `second` after those of `first`: then it is returned twice. So
    a reader takes the first columns of the first array, and the last ones of the second.
    """
    plain = [each for each in (first, second) if isinstance(each, jax.Array) and each.dtype.itemsize == 2]
    if len(plain) < 2 or target_device().platform != "gpu" or is_order_fixed():
        return flat_product_in_parts(x_TD, first), flat_product_in_parts(x_TD, second)
    both = product_in_parts(x_TD, jnp.concatenate([each.reshape(-1, each.shape[-1]) for each in plain]))
    return both, both


def num_parts_of(num_rows: int, num_columns: int, length: int, num_cores: int) -> int:
    """Parts of the sums over `length` numbers, for one and a half tiles a core: a power of two that divides it.

    If two don't, as of 2,880 numbers, any number of parts that are whole steps: XLA would cut such sums all the same,
    and copy rows and weights to make them longer.
    """
    tiles = -(-num_rows // TILE_ROWS) * -(-num_columns // TILE_COLUMNS)
    dividing = [parts for parts in POWERS if length % (parts * MIN_PART) == 0]
    if len(dividing) < 2:
        most = min(2 * MAX_PARTS, length // LEAST_PART)
        dividing = [parts for parts in range(1, most + 1) if length % (parts * PART_STEP) == 0]
    return next((parts for parts in dividing if parts * tiles >= 1.5 * num_cores), max(dividing, default=1))


def weights_first(x_TD: jax.Array, weights_ND: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`x [T, D]` times `weights [N, D]` in the form that is fastest in XLA's CPU library for few rows: `[T, N]`.

    The library packs its right operand before it multiplies, so the smaller operand should be on the right; the barrier
    keeps XLA from turning the product around again. It multiplies 16 bit vectors 10 times slower than matrices of two
    rows.
    """
    twice = len(x_TD) == 1 and x_TD.dtype.itemsize == 2
    rows = jnp.concatenate([x_TD, x_TD]) if twice else x_TD
    out_NT = jnp.einsum("nd,td->nt", weights_ND, rows, preferred_element_type=dtype)
    out_TN: jax.Array = jax.lax.optimization_barrier(out_NT).T
    return out_TN[:1] if twice else out_TN
