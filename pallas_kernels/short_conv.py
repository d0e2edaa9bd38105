"""Short convolutions between two gates, which take the place of attention in LFM2: tokens, and the ops of a step.

Of each token a layer makes b, c and x; what it yields is

    c conv(b x)        depthwise and causal, over the last few tokens

So all that a sequence keeps is what the convolution has read of its last tokens (`convolution.py`).

Source: Liquid AI, LFM2 (arXiv 2511.23404).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Convolve
from pallas_kernels.convolution import convolve_decode, convolve_extend
from pallas_kernels.delta_tokens import Sequences
from pallas_kernels.dispatch import choose_kernel_or_xla, refusals_of
from pallas_kernels.parts import whole


class ConvStates(NamedTuple):
    """What one layer keeps.

    Attributes:
      inputs: `[P, taps, K, C]` float32, what it has convolved of the last tokens (`convolution.py`).
    """

    inputs: jax.Array


@partial(jax.tree_util.register_dataclass, data_fields=("product", "all_taps"), meta_fields=("row", "dtype"))
@dataclass(frozen=True)
class ConvTokens:
    """What a layer makes of its tokens, and how it reads that.

    Attributes:
      product: `[T, K, 3 C]`, or float32 parts of it `[P, T, ...]`: b, c and x of the C channels of K groups.
      all_taps: `[L, K, C, taps]` float32 of all layers, that of the newest token last.
      row: of the layer.
      dtype: of the product as a whole.
    """

    product: jax.Array
    all_taps: jax.Array
    row: int
    dtype: jnp.dtype

    @property
    def taps(self) -> jax.Array:
        """`[K, C, taps]`."""
        return self.all_taps[self.row]

    @property
    def mixed(self) -> jax.Array:
        """`[T, K, C]` float32, what is convolved: b x."""
        b, _, x = self._sides()
        return b * x

    def in_one_part(self) -> ConvTokens:
        """The tokens with their product as a whole."""
        return replace(self, product=whole(self.product, 3, self.dtype))

    def gated(self, convolved: jax.Array) -> jax.Array:
        """What tokens yield of `convolved [T, K, C]`, `[T, K, 1, C]` in the dtype of the product."""
        _, c, _ = self._sides()
        return (c * convolved).astype(self.dtype)[:, :, None]

    def _sides(self) -> list[jax.Array]:
        return jnp.split(whole(self.product, 3, self.dtype).astype(jnp.float32), 3, axis=-1)


def conv_decode(
    tokens: ConvTokens,
    states: ConvStates,
    positions: jax.Array,
    place: jax.Array,
    kept_to: jax.Array | None = None,
    *,
    backend: str = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, ConvStates]:
    """What each of S sequences yields for one token more, `[S, K, 1, C]`, and what is kept, as `delta_decode`."""
    mixed = tokens.mixed
    kernel = _kernel(mixed, states, backend, interpret)
    if kernel is not None:
        to = jnp.full_like(place, -1) if kept_to is None else kept_to
        seqs = Sequences(jnp.arange(len(place) + 1), positions, place, place, (to >= 0)[None], to[None])
        convolved, inputs = kernel(mixed, tokens.taps, states.inputs, seqs, interpret)
        return tokens.gated(convolved), ConvStates(inputs)
    convolved, inputs = convolve_decode(mixed, tokens.taps, states.inputs, positions, place, kept_to)
    return tokens.gated(convolved), ConvStates(inputs)


def conv_extend(
    tokens: ConvTokens, states: ConvStates, seqs: Sequences, *, backend: str = "auto", interpret: bool = False
) -> tuple[jax.Array, ConvStates]:
    """What each token yields, `[T, K, 1, C]` (any for padding), and what is kept, as `delta_extend`."""
    return conv_run(tokens, states, seqs, backend=backend, interpret=interpret)


def conv_run(
    tokens: ConvTokens,
    states: ConvStates,
    seqs: Sequences,
    *,
    moves: bool = True,
    backend: str = "auto",
    interpret: bool = False,
) -> tuple[jax.Array, ConvStates]:
    """The same; what is kept stays as it is unless it `moves`, as `delta_run`."""
    mixed = tokens.mixed
    kernel = _kernel(mixed, states, backend, interpret)
    if kernel is not None:
        seqs = seqs if moves else seqs.nowhere()
        convolved, inputs = kernel(mixed, tokens.taps, states.inputs, seqs, interpret)
    else:
        convolved, inputs = convolve_extend(mixed, tokens.taps, states.inputs, seqs)
        inputs = inputs if moves else states.inputs
    return tokens.gated(convolved), ConvStates(inputs)


def _kernel(mixed: jax.Array, states: ConvStates, backend: str, interpret: bool) -> Convolve | None:
    """That of the backend, or of what "auto" means, if it has one."""
    if backend not in ("auto", *refusals_of(lambda each: each.convolve, mixed, states.inputs)):
        return None
    return choose_kernel_or_xla(
        "delta_decode", lambda each: each.convolve, backend, mixed, states.inputs, interpret=interpret
    )
