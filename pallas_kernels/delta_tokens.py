"""What a layer with states makes of its tokens, and how `delta.py` and backends read it: that of a gated delta-net, of
one whose states decay by channel, of Mamba-2, and of Mamba.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp

from pallas_kernels.norm import rms_norm
from pallas_kernels.parts import whole
from pallas_kernels.sums import mean_squares
from pallas_kernels.target import target_device

L2_EPS = 1e-6  # added to the sum of a head's squares, in q and k of the delta rule


BLOCK = 64  # tokens


class Sequences(NamedTuple):
    """Whose tokens these are, and where their states are. All `[S]` int32 but `query_offsets`.

    Attributes:
      query_offsets: `[S + 1]` sequence s owns tokens query_offsets[s] .. query_offsets[s + 1] - 1.
      starts: position of its first token in this step.
      source: place of the state before that token; not read if the position is 0.
      place: where the state goes after its tokens; -1: nowhere, which kernels take that go from token to token.
      kept_at: `[N, S]` after how many of its tokens the state is kept besides, 0 for not at all; where that lies in the
        middle of a block, the block must be the sequence's last one in this step.
      kept_to: `[N, S]` the places for that; any to which nothing is written elsewhere, if it isn't kept.
    """

    query_offsets: jax.Array
    starts: jax.Array
    source: jax.Array
    place: jax.Array
    kept_at: jax.Array
    kept_to: jax.Array

    def apart(self) -> Sequences:
        """The sequences where state s is that of sequence s, and none is kept on the way."""
        places = jnp.arange(len(self.place), dtype=jnp.int32)
        return self._replace(source=places, place=places, kept_at=jnp.zeros_like(self.kept_at))

    def nowhere(self) -> Sequences:
        """The sequences where no state goes anywhere."""
        return self._replace(place=jnp.full_like(self.place, -1), kept_at=jnp.zeros_like(self.kept_at))


class Heads(NamedTuple):
    """What moves a state: q and k `[T, K, h]`, v `[T, K, r, v]`, b `[T, K, r]`, and log a `[T, K, r, 1]`, or one for
    each number of a key, `[T, K, r, h]`.

    Of Mamba b is a step of each number of v, `[T, K, r, v]`, and so is log a, before it is multiplied by rates.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array


class Solved(NamedTuple):
    """What corrects the values of blocks, whatever the states before them.

    Attributes:
      values: `[B, K, r, 64, v]` what tokens write after a state of zeros.
      keys: `[B, K, r, 64, h]` what a state reads at these is written less.
      first: `[S]` the first of each sequence's blocks.
    """

    values: jax.Array
    keys: jax.Array
    first: jax.Array


class SolvedByChannel(NamedTuple):
    """The same where each number of a key decays by itself, and all else that blocks read of their tokens.

    Attributes:
      solved: see there.
      queries: `[B, K, r, 64, h]` what the state before the block is read at: q, as much as is left of the state.
      scores: `[B, K, r, 64, 64]` what queries find of the block's keys.
      left: `[B, K, r, 64, h]` of keys, what is left at the block's end.
      decay: `[B, K, r, h]` of the whole block.
    """

    solved: Solved
    queries: jax.Array
    scores: jax.Array
    left: jax.Array
    decay: jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=("taps", "rates", "scales"), meta_fields=("row", "eps"))
@dataclass(frozen=True)
class DeltaVectors:
    """The small parameters of a layer: row `row` of those of L layers. Kernels take the whole arrays and the row.

    Attributes:
      taps: `[L, K, C, taps]` float32, that of the newest token last.
      rates: `[L, K, 2, r]` float32: log a = -exp(rates[0]) softplus(logit + rates[1]). `[L, K, 3, r]`: b is rates[2]
        times a sigmoid; else that itself. Of `ChannelTokens` `[L, K, 2, h]`.
      scales: `[L, v]` of the norm of what is read.
      row: of the layer.
      eps: of the norm.
    """

    taps: jax.Array
    rates: jax.Array
    scales: jax.Array
    row: int
    eps: float


@dataclass(frozen=True)
class _Tokens:
    """What both kinds of tokens have; `DeltaTokens` says what the fields are."""

    product: jax.Array
    vectors: DeltaVectors | MambaVectors | SelectiveVectors
    key_size: int
    dtype: jnp.dtype

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.product.shape[-3]

    @property
    def fused(self) -> jax.Array:
        """The product as a whole, `[T, K, ...]`."""
        return whole(self.product, 3, self.dtype)

    def in_one_part(self) -> Self:
        """The tokens with their product as a whole."""
        return replace(self, product=self.fused)

    @property
    def mixed(self) -> jax.Array:
        """`[T, K, C]` what the convolution mixes."""
        return self.fused[..., : self.vectors.taps.shape[2]]

    @property
    def taps(self) -> jax.Array:
        """`[K, C, taps]` of the convolution."""
        return self.vectors.taps[self.vectors.row]

    def finished(self, out: jax.Array) -> jax.Array:
        """What a backend's step leaves to do of what it returns: nothing."""
        return out


@partial(jax.tree_util.register_dataclass, data_fields=("product", "vectors"), meta_fields=("key_size", "dtype"))
@dataclass(frozen=True)
class DeltaTokens(_Tokens):
    """What a layer makes of its tokens, and how it reads that.

    Attributes:
      product: `[T, K, C + r v + 2 r]`, or float32 parts of it `[P, T, ...]`. For each key head q, k and the v of r
        heads, before the convolution: C = 2 h + r v; the gates z of what is read; the logits of b, and those of a.
      vectors: of the layer.
      key_size: h.
      dtype: of the product as a whole.
    """

    vectors: DeltaVectors

    corrects = True  # v - S^T k is written, not v

    @property
    def sizes(self) -> tuple[int, int, int]:
        """h, r and v."""
        return self.key_size, self.vectors.rates.shape[-1], self.vectors.scales.shape[-1]

    @property
    def bias(self) -> None:
        """The convolution has none."""
        return None

    def heads(self, activated: jax.Array) -> Heads:
        """What moves states, of what the convolution yields: q and k are normalized."""
        h, group, _ = self.sizes
        heads, v = _normalized(activated, h)
        rates = self.vectors.rates[self.vectors.row]
        write, forget = jnp.split(self.fused[..., -2 * group :].astype(jnp.float32), 2, axis=-1)
        log_decay = -jnp.exp(rates[:, 0]) * jax.nn.softplus(forget + rates[:, 1])
        v = v.reshape(*v.shape[:2], group, -1)
        beta = jax.nn.sigmoid(write) if rates.shape[1] == 2 else jax.nn.sigmoid(write) * rates[:, 2]
        return Heads(heads[:, :, 0] * h**-0.5, heads[:, :, 1], v, log_decay[..., None], beta)

    def gated(self, read: jax.Array, values: jax.Array) -> jax.Array:
        """What `read [T, K, r, v]` float32 gives, normalized and gated, in the dtype of the product."""
        vectors = self.vectors
        gates = self.fused[..., vectors.taps.shape[2] : -2 * self.sizes[1]].astype(jnp.float32)
        out = rms_norm(read, vectors.scales[vectors.row].astype(jnp.float32), vectors.eps)
        return (out * jax.nn.silu(gates).reshape(read.shape)).astype(self.dtype)


def _normalized(activated: jax.Array, h: int) -> tuple[jax.Array, jax.Array]:
    """q and k `[T, K, 2, h]`, each of length 1, and the rest of what the convolution yields."""
    heads, v = jnp.split(activated, (2 * h,), axis=-1)
    heads = heads.reshape(*v.shape[:2], 2, h)
    return heads * jax.lax.rsqrt(mean_squares(heads) * h + L2_EPS), v


@partial(jax.tree_util.register_dataclass, data_fields=("product", "vectors"), meta_fields=("key_size", "dtype"))
@dataclass(frozen=True)
class ChannelTokens(_Tokens):
    """What a delta-net with a decay for each number of a key makes of its tokens; a key head has one value head.

    Attributes:
      product: `[T, K, C + 1 + v + h]`. For each head q, k and v, before the convolution: C = 2 h + v; the logit of b;
        the gates z of what is read; the logits of a.
      vectors, key_size, dtype: as in `DeltaTokens`.
    """

    vectors: DeltaVectors

    corrects = True

    @property
    def bias(self) -> None:
        """The convolution has none."""
        return None

    @property
    def _others(self) -> list[jax.Array]:
        """What isn't convolved, in float32: `[T, K, 1]`, `[T, K, v]` and `[T, K, h]`."""
        values = self.vectors.scales.shape[-1]
        return jnp.split(self.fused[..., self.vectors.taps.shape[2] :].astype(jnp.float32), (1, 1 + values), axis=-1)

    def heads(self, activated: jax.Array) -> Heads:
        """What moves states, of what the convolution yields: q and k are normalized."""
        h, rates = self.key_size, self.vectors.rates[self.vectors.row]
        heads, v = _normalized(activated, h)
        write, _, forget = self._others
        log_decay = -jnp.exp(rates[:, 0]) * jax.nn.softplus(forget + rates[:, 1])
        return Heads(
            heads[:, :, 0] * h**-0.5, heads[:, :, 1], v[:, :, None], log_decay[:, :, None], jax.nn.sigmoid(write)
        )

    def gated(self, read: jax.Array, values: jax.Array) -> jax.Array:
        """What `read [T, K, 1, v]` float32 gives, normalized and gated, in the dtype of the product."""
        vectors, gates = self.vectors, self._others[1]
        out = rms_norm(read, vectors.scales[vectors.row].astype(jnp.float32), vectors.eps)
        return (out * jax.nn.sigmoid(gates).reshape(read.shape)).astype(self.dtype)


@partial(jax.tree_util.register_dataclass, data_fields=("taps", "bias", "rates", "scales"), meta_fields=("row", "eps"))
@dataclass(frozen=True)
class MambaVectors:
    """The small parameters of a layer of Mamba-2, as `DeltaVectors` has them.

    Attributes:
      taps, row, eps: see there.
      bias: `[L, K, C]` float32, of the convolution.
      rates: `[L, K, 3, r]` float32: b = softplus(logit + rates[1]) and log a = -exp(rates[0]) b; of what is read, so
        many times v is a part besides (rates[2]).
      scales: `[L, K, r v]` of the norm of what all heads of a group read; None: it has none.
    """

    taps: jax.Array
    bias: jax.Array
    rates: jax.Array
    scales: jax.Array | None
    row: int
    eps: float


@partial(jax.tree_util.register_dataclass, data_fields=("product", "vectors"), meta_fields=("key_size", "dtype"))
@dataclass(frozen=True)
class MambaTokens(_Tokens):
    """What a layer of Mamba-2 makes of its tokens, in the words of `DeltaTokens`: C is q, B is k and x is v.

    Attributes:
      product: `[T, K, C + r v + r]`, or parts of it. For each group q, k and the v of r heads, before the convolution:
        C = 2 h + r v; the gates of what is read; the logits of b.
      vectors, key_size, dtype: as there.
    """

    vectors: MambaVectors

    corrects = False

    @property
    def bias(self) -> jax.Array:
        """`[K, C]` of the convolution."""
        return self.vectors.bias[self.vectors.row]

    def heads(self, activated: jax.Array) -> Heads:
        """What moves states, of what the convolution yields."""
        vectors, h = self.vectors, self.key_size
        q, k, v = jnp.split(activated, (h, 2 * h), axis=-1)
        rates = vectors.rates[vectors.row]
        group = rates.shape[-1]
        beta = jax.nn.softplus(self.fused[..., -group:].astype(jnp.float32) + rates[:, 1])
        log_decay = -jnp.exp(rates[:, 0]) * beta
        return Heads(q, k, v.reshape(*v.shape[:2], group, -1), log_decay[..., None], beta)

    def gated(self, read: jax.Array, values: jax.Array) -> jax.Array:
        """What `read` and `values [T, K, r, v]` float32 give, gated and normalized, in the dtype of the product."""
        vectors = self.vectors
        group = vectors.rates.shape[-1]
        gates = self.fused[..., vectors.taps.shape[2] : -group].astype(jnp.float32)
        out = read + vectors.rates[vectors.row, :, 2, :, None] * values
        return self.finished(out * jax.nn.silu(gates).reshape(read.shape))

    def finished(self, out: jax.Array) -> jax.Array:
        """What a backend's step leaves to do: `out [T, K, r, v]` float32, normalized over the heads of a group."""
        vectors = self.vectors
        if vectors.scales is None:
            return out.astype(self.dtype)
        scales = vectors.scales[vectors.row].astype(jnp.float32)
        return rms_norm(out.reshape(*out.shape[:2], -1), scales, vectors.eps).reshape(out.shape).astype(self.dtype)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("channels", "rates", "low", "low_norms", "steps"),
    meta_fields=("eps",),
)
@dataclass(frozen=True)
class SelectiveVectors:
    """The small parameters of a layer of Mamba, whose C channels are one group.

    Attributes:
      channels: `[C, taps + 3]` float32, of each channel its taps, and the biases of the convolution and of its steps;
        of what is read, so many times x is a part besides.
      rates: `[h, C]` float32: log a = -exp(rates) times a channel's step.
      low: `[R + 2 h, C]`, what makes R numbers that steps are made of, k and q of what the convolution yields.
      low_norms: `[R + 2 h]` of the norms of these three.
      steps: `[C, R]`.
      eps: of the norms.
    """

    channels: jax.Array
    rates: jax.Array
    low: jax.Array
    low_norms: jax.Array
    steps: jax.Array
    eps: float

    row = 0

    @property
    def taps(self) -> jax.Array:
        """`[1, 1, C, taps]`."""
        return self.channels[None, None, :, :-3]


@partial(jax.tree_util.register_dataclass, data_fields=("product", "vectors"), meta_fields=("key_size", "dtype"))
@dataclass(frozen=True)
class SelectiveTokens(_Tokens):
    """What a layer of Mamba makes of its tokens, in the words of `MambaTokens`: all channels are one value head.

    Attributes:
      product: `[T, 1, 2 C]`, or parts of it: x before the convolution, and gates of what is read.
      vectors, key_size, dtype: as there.
    """

    vectors: SelectiveVectors

    corrects = False

    @property
    def bias(self) -> jax.Array:
        """`[1, C]` of the convolution."""
        return self.vectors.channels[None, :, -3]

    def heads(self, activated: jax.Array) -> Heads:
        """What moves states, of what the convolution yields, `[T, 1, C]`."""
        vectors, h = self.vectors, self.key_size
        rank = vectors.steps.shape[1]
        low = self._product("tc,rc->tr", activated[:, 0], vectors.low)
        cuts = rank, rank + h
        steps, k, q = (
            rms_norm(part, scale.astype(jnp.float32), vectors.eps)
            for part, scale in zip(jnp.split(low, cuts, axis=-1), jnp.split(vectors.low_norms, cuts), strict=True)
        )
        made = self._product("tr,cr->tc", steps, vectors.steps)
        step = jax.nn.softplus(made + vectors.channels[:, -2])[:, None, None]
        return Heads(q[:, None], k[:, None], activated[:, :, None], step, step)

    def gated(self, read: jax.Array, values: jax.Array) -> jax.Array:
        """What `read` and `values [T, 1, 1, C]` float32 give, gated, in the dtype of the product."""
        gates = self.fused[..., len(self.vectors.channels) :].astype(jnp.float32)
        out = read + self.vectors.channels[:, -1] * values
        return (out * jax.nn.silu(gates)[:, :, None]).astype(self.dtype)

    def _product(self, axes: str, x: jax.Array, weights: jax.Array) -> jax.Array:
        """In float32, of factors in the model's dtype; of 16 bits they are widened for a CPU, which is faster."""
        rounded, weights = x.astype(self.dtype), weights.astype(self.dtype)
        if target_device().platform == "cpu":
            rounded, weights = rounded.astype(jnp.float32), weights.astype(jnp.float32)
        return jnp.einsum(axes, rounded, weights, preferred_element_type=jnp.float32)


StateTokens: TypeAlias = DeltaTokens | ChannelTokens | MambaTokens | SelectiveTokens
