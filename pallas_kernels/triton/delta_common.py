"""What kernels of states share that take a value head of a sequence each: small parameters, vectors, functions."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.delta_tokens import L2_EPS, ChannelTokens, MambaTokens, SelectiveTokens, StateTokens

_NUMBERS_OF_WARP = 1024  # of a state: 32 in each thread, 16 warps for one of 128 x 128
_MOST_NUMBERS = 1 << 14  # of a program: with twice as many `ptxas` spills 800 bytes


class Small(NamedTuple):
    """The small parameters of a layer, or refs to them; a delta-net has no bias, and Mamba-2 no scales."""

    taps: Any
    bias: Any
    rates: Any
    scales: Any


def small_of(tokens: StateTokens) -> Small:
    """Those of the layer whose tokens these are."""
    assert not isinstance(tokens, SelectiveTokens), "it is refused"
    vectors = tokens.vectors
    if isinstance(tokens, MambaTokens):
        return Small(vectors.taps, tokens.vectors.bias, vectors.rates, None)
    return Small(vectors.taps, None, vectors.rates, vectors.scales)


def kind_of(tokens: StateTokens) -> type["Head"]:
    """How what stands in these tokens' products is read."""
    return ChannelHead if isinstance(tokens, ChannelTokens) else Head


@dataclasses.dataclass(frozen=True)
class Head:
    """What stands in a token's product, besides what is convolved, for one value head.

    Attributes:
      fused: the product's numbers at columns, a vector or one, in float32.
      num_fused: columns of a key head.
      small: the small parameters; with scales, what is written is corrected.
      layer, key_head, of_group: which layer and head.
      group: r.
    """

    fused: Callable[[jax.Array], jax.Array]
    num_fused: int
    small: Small
    layer: jax.Array
    key_head: jax.Array
    of_group: jax.Array
    group: int

    @property
    def _num_gates(self) -> int:
        return 1 if self.small.scales is None else 2

    def decay_and_beta(self) -> tuple[jax.Array, jax.Array]:
        """a, one number or of `ChannelHead` `[h]`, and b."""
        columns = (self.num_fused - part * self.group + self.of_group for part in range(self._num_gates, 0, -1))
        *write, forget = map(self.fused, columns)
        time = softplus(forget + self._rate(1))
        beta = 1 / (1 + jnp.exp(-write[0])) if write else time
        if write and self.small.rates.shape[2] > 2:
            beta = beta * self._rate(2)
        return jnp.exp(-jnp.exp(self._rate(0)) * time), beta

    def gated(self, read: jax.Array, v: jax.Array, eps: float, column: jax.Array, value_size: int) -> jax.Array:
        """What `read`, the numbers at `column` of `[v]`, gives, as `backend.DeltaStep` returns it."""
        first = self.num_fused - self.group * (value_size + self._num_gates) + self.of_group * value_size
        gate = self.fused(first + column)
        read = read + self._rate(2) * v if self.small.scales is None else self._normalized(read, column, eps)
        return read * gate / (1 + jnp.exp(-gate))

    def _normalized(self, read: jax.Array, column: jax.Array, eps: float) -> jax.Array:
        scale = vector(self.small.scales, (self.layer,), column).astype(jnp.float32)
        return read * lax.rsqrt(jnp.sum(read * read) / len(read) + eps) * scale

    def _rate(self, row: int) -> jax.Array:
        rate: jax.Array = self.small.rates[self.layer, self.key_head, row, self.of_group]
        return rate


class ChannelHead(Head):
    """The same where each number of a key decays by itself: see `ChannelTokens.product`."""

    def decay_and_beta(self) -> tuple[jax.Array, jax.Array]:
        """See `Head`."""
        key_size = self.small.rates.shape[-1]
        row = jnp.arange(key_size, dtype=jnp.int32)
        rate, bias = (vector(self.small.rates, (self.layer, self.key_head, number), row) for number in (0, 1))
        decay = jnp.exp(-jnp.exp(rate) * softplus(self.fused(self.num_fused - key_size + row) + bias))
        write = self.fused(self.num_fused - key_size - self.small.scales.shape[-1] - 1 + self.of_group)
        return decay, 1 / (1 + jnp.exp(-write))

    def gated(self, read: jax.Array, v: jax.Array, eps: float, column: jax.Array, value_size: int) -> jax.Array:
        """See `Head`."""
        gate = self.fused(self.num_fused - self.small.rates.shape[-1] - len(v) + column)
        return self._normalized(read, column, eps) / (1 + jnp.exp(-gate))


def normalized(head: jax.Array) -> jax.Array:
    """A query or key of unit length."""
    return head * lax.rsqrt(jnp.sum(head * head) + L2_EPS)


def decayed(state: jax.Array, decay: jax.Array) -> jax.Array:
    """`state [h, v]` times a number, or one for each row."""
    return state * (decay[:, None] if decay.ndim else decay)


def softplus(x: jax.Array) -> jax.Array:
    """log(1 + exp(x))."""
    return jnp.maximum(x, 0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


def ids_of(group: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sequence, key head and number in the group of a program's value head."""
    head = pl.program_id(1)
    return pl.program_id(0), lax.div(head, jnp.int32(group)), lax.rem(head, jnp.int32(group))


def num_warps_for(matrices: jax.Array) -> int:
    """Warps of a program that has a state of `matrices [P, K, r, h, v]` in registers, or a part."""
    return min(max(matrices.shape[-2] * matrices.shape[-1] // _NUMBERS_OF_WARP, 1), 16)


def num_value_parts(matrices: jax.Array, corrects: bool) -> int:
    """How many programs share a state `[h, v]`, each with some of the values: what one writes follows from its own.

    A delta-net's is one program's, which normalizes what it has read.
    """
    key_size, value_size = matrices.shape[-2:]
    return 1 if corrects else max(1, min(key_size * value_size // _MOST_NUMBERS, value_size // 16))


def vector(ref: Any, index: tuple[Any, ...], column: jax.Array, is_there: jax.Array | None = None) -> jax.Array:
    """The numbers of the last axis at `column`; zeros unless `is_there`."""
    where = ref.at[_along(index, column)]
    if is_there is None:
        return plgpu.load(where)
    return plgpu.load(where, mask=jnp.broadcast_to(is_there, column.shape), other=0)


def store(
    ref: Any, index: tuple[Any, ...], column: jax.Array, numbers: jax.Array, is_due: jax.Array | None = None
) -> None:
    """Writes the last axis at `column`, if that is due."""
    mask = None if is_due is None else jnp.broadcast_to(is_due, column.shape)
    plgpu.store(ref.at[_along(index, column)], numbers, mask=mask)


def _along(index: tuple[Any, ...], column: jax.Array) -> tuple[jax.Array, ...]:
    return (*(jnp.broadcast_to(jnp.int32(each), column.shape) for each in index), column)
