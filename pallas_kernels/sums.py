"""Sums over the last axis whose bits don't depend on how many rows are summed, and what is made of such sums.

XLA's CPU back end adds in another order for few rows than for many, so that a request's numbers would depend on its
company; nor is exp(x - maximum) the same where it fuses both, nor the logarithm of a number among five and among 40.
The C++ kernels have one order, and so has Triton's on a GPU in programs in fixed order (`order`). Else these are JAX's
own functions and their programs those that they would be without this file. Called by norms, by the choice of experts,
and by samplers.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from pallas_kernels.lazily import imported
from pallas_kernels.native import sums as native
from pallas_kernels.order import is_order_fixed
from pallas_kernels.target import target_device

What: TypeAlias = Literal["sum", "squares"]

_sums_of_rows = imported("triton.row_sums", "sums_of_rows")


class _Adder(NamedTuple):
    """Reduces the last axis of `[.., n]` float32 in one order.

    Attributes:
      sums: `[..]`, of the numbers or of their squares.
      logs: `[..]`, the logarithms of the sums of the numbers.
      tops: `[..]`, the largest numbers.
      is_one_call: whether a call takes about as long for many rows as for few.
    """

    sums: Callable[[jax.Array, What], jax.Array]
    logs: Callable[[jax.Array], jax.Array]
    tops: Callable[[jax.Array], jax.Array]
    is_one_call: bool


_NATIVE = _Adder(
    native.of_rows,
    lambda x: native.of_rows(x, "log"),
    lambda x: native.of_rows(x, "top"),
    is_one_call=True,
)


def _by_triton(x: jax.Array, what: What) -> jax.Array:
    return _sums_of_rows(x, what, interpret=target_device().platform != "gpu")


_TRITON = _Adder(
    _by_triton,
    lambda x: jnp.log(_by_triton(x, "sum")),  # a thread a number: however many there are
    lambda x: jnp.max(x, axis=-1),  # the same in any order
    is_one_call=False,
)


def _adder(x: jax.Array) -> _Adder | None:
    """What adds up rows of x in one order; None: XLA may as it likes."""
    if native.refuse(x) is None:
        return _NATIVE
    return _TRITON if is_order_fixed() and x.dtype == jnp.float32 else None


def row_sums(x: jax.Array, *, keepdims: bool = False) -> jax.Array:
    """`x [.., n]` summed over its last axis: `[..]`, or `[.., 1]` with `keepdims`."""
    adder = _adder(x)
    if adder is None:
        return jnp.sum(x, axis=-1, keepdims=keepdims)
    sums = adder.sums(x, "sum")
    return sums[..., None] if keepdims else sums


def means(x: jax.Array) -> jax.Array:
    """The means of `x [.., n]` float32 over its last axis, `[.., 1]`."""
    return row_sums(x, keepdims=True) / x.shape[-1]


def mean_squares(x: jax.Array) -> jax.Array:
    """The means of the squares of `x [.., n]` float32 over its last axis, `[.., 1]`."""
    adder = _adder(x)
    if adder is None:
        return jnp.mean(x * x, axis=-1, keepdims=True)
    return adder.sums(x, "squares")[..., None] / x.shape[-1]


def mean_squares_of_all(x: jax.Array) -> jax.Array | None:
    """`mean_squares` of rows of which only some are wanted, where one call for all is faster; elsewhere None."""
    adder = _adder(x)
    return mean_squares(x) if adder is not None and adder.is_one_call else None


def log_sum_exp(x: jax.Array, *, keepdims: bool = False) -> jax.Array:
    """log(sum(exp(x))) over the last axis of `x [.., n]`, in which at least one number is finite."""
    adder = _adder(x)
    if adder is None:
        return jax.nn.logsumexp(x, axis=-1, keepdims=keepdims)
    top = adder.tops(x)[..., None]
    total = adder.logs(jnp.exp(x - top))[..., None] + top
    return total if keepdims else total[..., 0]


def logs(x: jax.Array) -> jax.Array:
    """The logarithms of `x [..]`."""
    return native.of_rows(x[..., None], "log") if _adder(x) is _NATIVE else jnp.log(x)


def softmax(x: jax.Array) -> jax.Array:
    """The softmax over the last axis of `x [.., n]`."""
    adder = _adder(x)
    if adder is None:
        return jax.nn.softmax(x, axis=-1)
    shares = jnp.exp(x - adder.tops(x)[..., None])
    return shares / row_sums(shares, keepdims=True)
