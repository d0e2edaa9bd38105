"""Rows times packed matrices in C++ (`product_packed.h`, `kept_weights.h`), for x86 processors.

A plain product is a grouped one with one expert. A row's result depends neither on the other rows nor on their number.
Called by models, and by `api` for experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import packed
from pallas_kernels.experts import Groups, with_bias
from pallas_kernels.native import library
from pallas_kernels.native.product import BLOCK_OF_WORDS, TWO_WORDS, in_two_words
from pallas_kernels.packed import PackedMatrix
from pallas_kernels.target import target_device


def refuse(x: jax.Array, weights: PackedMatrix) -> str | None:
    """Why x times `weights` can't run here, because of the arrays or of this machine; or None."""
    if target_device().platform != "cpu":
        return f"it needs a cpu, this is a {target_device().platform}"
    if weights.packing in packed.ON_ACCELERATORS:
        return f"the weights are {weights.packing}, for GPUs"
    if x.dtype != jnp.float32:
        return f"it takes float32 rows, not {x.dtype}"
    shape = weights.shape
    group = shape[-1] if weights.num_groups == 1 else weights.group
    part = library.INTEGERS if weights.packing in packed.SIDE_BY_SIDE else library.GROUPED
    return packed.refuse(weights.packing, shape, group) or library.load(part)


def product(
    x: jax.Array,
    weights: PackedMatrix,
    dtype: str = "bfloat16",
    row_bits: int = 16,
    activation: str | None = None,
) -> jax.Array:
    """x `[T, in]` times weights `[out, in]`: float32 `[T, out]`; see `grouped_product`.

    `activation`, of integers alone: as in `native.product.rows_product`.
    """
    no_tokens, size = jnp.zeros(1, jnp.int32), jnp.full(1, x.shape[0], jnp.int32)
    of_one = jax.tree.map(lambda part: part[None], weights)
    return _call(x, no_tokens, size, x.shape[0], of_one, False, dtype, row_bits, activation)


def grouped_product(
    x: jax.Array,
    groups: Groups,
    weights: PackedMatrix,
    bias: jax.Array | None,
    of_tokens: bool,
    dtype: str = "bfloat16",
    row_bits: int = 16,
    interpret: bool = False,
) -> jax.Array:
    """Each row times the weights `[E, out, in]` of its expert, and its bias: float32 `[M, out]`.

    With INT4 blocks of a row (a group's inputs; if there is one group, 512 or with 8 bits 128) become integers of
    `row_bits`: 16, where `library.multiplies_bytes` says so 8, or 32 (`product.in_two_words`); with INT8 of 8. Other
    weights become `dtype`, rounded once, and results are those with weights of that dtype.
    """
    y = _call(x, groups.tokens, groups.sizes, groups.num_places, weights, of_tokens, dtype, row_bits)
    return with_bias(y, bias, groups)


def _call(
    x: jax.Array,
    tokens: jax.Array,
    sizes: jax.Array,
    num_places: int,
    weights: PackedMatrix,
    of_tokens: bool,
    dtype: str,
    row_bits: int,
    activation: str | None = None,
) -> jax.Array:
    if weights.packing in packed.SIDE_BY_SIDE and row_bits == TWO_WORDS:
        assert activation is None, "a gate would be activated twice"
        block = weights.group if weights.num_groups > 1 else BLOCK_OF_WORDS
        return in_two_words(
            x, block, lambda words: _call(words, tokens, sizes, num_places, weights, of_tokens, dtype, 16)
        )
    shape = jax.ShapeDtypeStruct((num_places, weights.shape[-2] // (2 if activation else 1)), jnp.float32)
    parts = (x, tokens, sizes, weights.numbers, weights.scale)
    group = np.int64(weights.group)
    if weights.packing in packed.SIDE_BY_SIDE:
        zero = jnp.zeros((0, 0, 0), jnp.int8) if weights.zero is None else weights.zero
        of_integers = jax.ffi.ffi_call(library.GROUPED_PACKED_PRODUCT, shape)
        out: jax.Array = of_integers(
            *parts,
            zero,
            activation=activation or "",
            of_tokens=of_tokens,
            group=group,
            row_bits=np.int64(row_bits),
            weight_bits=np.int64(packed.SIDE_BY_SIDE[weights.packing]),
        )
        return out
    assert activation is None, f"{weights.packing} has no gated product"
    call = jax.ffi.ffi_call(library.GROUPED_KEPT_PRODUCT, shape)
    way = library.product_way() if dtype == "bfloat16" else "float32"
    sums: jax.Array = call(*parts, of_tokens=of_tokens, group=group, way=way)
    if weights.packing == packed.FLOAT8 and weights.num_groups == 1:
        return sums * _of_experts(weights.scale[..., 0], sizes, num_places)
    return sums


def _of_experts(scale: jax.Array, sizes: jax.Array, num_places: int) -> jax.Array:
    """`[M, out]` of scales `[E, out]`, each place's; `[1, out]` of one expert."""
    if len(scale) == 1:
        return scale
    experts = jnp.sum(jnp.arange(num_places)[:, None] >= jnp.cumsum(sizes), axis=1)
    return scale.at[experts].get(mode="fill", fill_value=0)
