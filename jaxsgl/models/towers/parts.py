"""Norms, matrices and activations that towers are made of: declared in a module by name, and what goes through them.

Every device has all of them. Knows no tower; `merger.py` and `tower.py` call it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsgl.models.matrix import Matrices
from jaxsgl.models.precision import product
from jaxsgl.models.towers.arch import NormKind

OfName: TypeAlias = Callable[[str], jax.Array]  # the numbers of a parameter, by its name in the module


def normalized(module: Matrices, name: str, x: jax.Array, of: OfName, eps: float) -> jax.Array:
    """`x` behind a norm of the module: with a bias, it is a LayerNorm."""
    bias = f"{name}_bias"
    return layer_norm(x, of(name), of(bias), eps) if hasattr(module, bias) else root_norm(x, of(name), eps)


def through(module: Matrices, name: str, x: jax.Array, of: OfName) -> jax.Array:
    """`x` behind a matrix of the module and its bias, if it has one."""
    bias = f"{name}_bias"
    out = product(x, of(name))
    return out + of(bias) if hasattr(module, bias) else out


def declare_norm(module: Matrices, name: str, shape: tuple[int, ...], dtype: jnp.dtype, kind: NormKind) -> None:
    """Declares a norm's scales, and its biases unless it is a root norm."""
    declare_numbers(module, name, shape, dtype, mean=1.0)
    if kind == "deviation":
        declare_numbers(module, f"{name}_bias", shape, dtype, mean=0.0)


def declare_numbers(module: Matrices, name: str, shape: tuple[int, ...], dtype: jnp.dtype, mean: float) -> None:
    """Declares numbers that every device has."""
    setattr(module, name, nnx.Param(jnp.zeros(shape, dtype), axes=(None,) * len(shape), mean=mean, std=0.0))


def declare_matrix(
    module: Matrices, name: str, shape: tuple[int, ...], dtype: jnp.dtype, has_bias: bool = True
) -> None:
    """Declares a matrix `[..., out, in]`, on every device as it is, and its bias `[..., out]`."""
    module.declare(name, shape, (None,) * len(shape), dtype, None, fan_in=shape[-1])
    if has_bias:
        declare_numbers(module, f"{name}_bias", shape[:-1], dtype, mean=0.0)


def numbers_of(module: Matrices, name: str) -> jax.Array:
    """The numbers of a parameter of the module."""
    array: jax.Array = getattr(module, name)[...]
    return array


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """LayerNorm (arXiv 1607.06450) of the last axis, in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (centred * inverse * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def root_norm(x: jax.Array, scale: jax.Array | None, eps: float) -> jax.Array:
    """RMSNorm (arXiv 1910.07467) of the last axis, in float32; without a scale, if that is None."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normed if scale is None else normed * scale.astype(jnp.float32)).astype(x.dtype)


def quick_gelu(x: jax.Array) -> jax.Array:
    """x * sigmoid(1.702 x), an approximation of GELU (arXiv 1606.08415)."""
    return x * jax.nn.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "quick_gelu": quick_gelu,
    "silu": jax.nn.silu,
}
