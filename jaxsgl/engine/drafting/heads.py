"""Heads on the device, EAGLE-3's or the model's own next layer (NEXTN): what one keeps of each token, and its chain.

    layer 0       what the head's only layer attends over. Token i's is that of (state of token i - 1, embedding of
                  token i), so that a page depends on its own tokens and those before it
    layers 1 ..   the state of token i: what the head reads of the model's work on it, its numbers spread over the
                  pages' heads, since the next token, maybe of another step or request, needs it. Heads that are copies
                  of each other have equal numbers

Token i stands at position i. Training counts from the pair (state 0, token 1): queries and keys turn with differences
of positions, which are the same. Token 0 has no state before it: a head gets zeros. `draft.py` has the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsgl.cache.pages import rows_of
from jaxsgl.engine.attending import Pages
from jaxsgl.engine.drafting.draft import Drafting, Link, Seen, slots_of_positions
from jaxsgl.engine.layer_state import LayerState, LayerStates
from jaxsgl.engine.sampling import vocabulary
from jaxsgl.engine.state import KvBuffers
from jaxsgl.errors import ConfigError
from jaxsgl.models import Attend, Decoder, ModelArch, Params
from jaxsgl.models.heads import EagleArch
from jaxsgl.models.quantization import FP8_E4M3
from jaxsgl.models.tensor_parallel import all_parts, num_parts, part_index
from pallas_kernels import KernelChoice, PagedKv, store_entries, store_kv
from pallas_kernels.paged_kv import to_numbers


class Head(Protocol):
    """One layer that drafts from states of the model."""

    @property
    def activations(self) -> jnp.dtype:
        """Of states."""
        ...

    def states(self, streams: dict[int, jax.Array], hidden_TD: jax.Array) -> jax.Array:
        """`[T, D]` what it keeps of tokens: of their tapped streams, or of their final hidden states."""
        ...

    def __call__(
        self,
        model: Decoder,
        token_ids: jax.Array,
        before_TD: jax.Array,
        positions: jax.Array,
        attend: Attend,
        kernels: KernelChoice,
    ) -> tuple[jax.Array, jax.Array]:
        """Of tokens `[T]`, whose predecessors' states are given: their own states, as a chain goes on with them, and
        logits `[T, V']` float32 of what comes next, this device's part.
        """
        ...

    def in_model(self, token_ids: jax.Array) -> jax.Array:
        """The model's ids of its own."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadDrafting(Drafting):
    """See `Drafting`.

    Attributes:
      graphdef: the head.
      like: what the model's layers keep, each the same.
      state_size: D, of a state.
      copies: so many consecutive heads of these are equal, each on a device of its own.
    """

    graphdef: nnx.GraphDef[Any]
    like: LayerState
    state_size: int
    copies: int = 1

    @cached_property
    def num_state_layers(self) -> int:
        """Layers that the state of a token takes."""
        heads, _, width = self.like.by_page[0].shape
        return -(-self.state_size // (len(self.like.by_page) * heads // self.copies * width))

    def layers(self, scratch_pages: int) -> tuple[LayerState, ...]:
        """See `Drafting`."""
        return self.like.with_scratch(scratch_pages), *(self.like,) * self.num_state_layers

    def read(self, params: Params, seen: Seen, kv: KvBuffers) -> KvBuffers:
        """See `Drafting`. What follows the layer's keys and values is read by nothing, so that XLA leaves it out."""
        head, arrays, kernels = self._head(params), seen.arrays, seen.kernels
        states_TD = head.states(seen.streams, seen.hidden)
        kv = self._with_states(kv, states_TD, arrays.slots, kernels)
        first = arrays.query_offsets[:-1]
        positions = arrays.positions.at[first].get(mode="clip")
        before = slots_of_positions(seen.table_SP, jnp.maximum(positions - 1, 0), kv.k[0].shape[2])
        states_SD = self._states(kv, before).astype(states_TD.dtype)
        before_TD = jnp.roll(states_TD, 1, axis=0).at[first].set(states_SD, mode="drop")
        before_TD = jnp.where((arrays.positions > 0)[:, None], before_TD, jnp.zeros_like(before_TD))
        pages = Pages(kv, seen.table_SP, arrays, seen.kind, self.options, kernels)
        head(seen.model, seen.token_ids, before_TD, arrays.positions, pages.store, kernels)
        return pages.buffers()

    def begin(self, params: Params, kv: KvBuffers, last_slots: jax.Array) -> jax.Array:
        """See `Drafting`: the states `[S, D]` of the tokens before the newest ones."""
        return self._states(kv, last_slots).astype(self._head(params).activations)

    def step(self, params: Params, link: Link) -> tuple[jax.Array, jax.Array]:
        """See `Drafting`."""
        head = self._head(params)
        states_SD, logits = head(link.model, link.tokens, link.carried, link.positions, link.attend, link.kernels)
        return states_SD, head.in_model(vocabulary.greedy(logits))

    def _head(self, params: Params) -> Head:
        head: Head = nnx.merge(self.graphdef, params)
        return head

    def _with_states(self, kv: KvBuffers, states_TD: jax.Array, slots: jax.Array, kernels: KernelChoice) -> KvBuffers:
        """The layers with these states at `slots [T]`."""
        num_tokens, size = states_TD.shape
        layers = kv.by_layer()
        heads, width = layers[1][0].shape[1], layers[1][0].shape[3]
        shape = num_tokens, self.num_state_layers, len(layers[1]), heads, width
        numbers = shape[1] * shape[2] * heads * width
        padded = jnp.pad(states_TD, ((0, 0), (0, numbers * self._num_shares() - size)))
        share = part_index() // self.copies if self._num_shares() > 1 else 0
        parts = jax.lax.dynamic_slice_in_dim(padded, share * numbers, numbers, axis=1).reshape(shape)
        for layer in range(self.num_state_layers):
            layers[1 + layer] = _stored(layers[1 + layer], parts[:, layer], slots, kernels)
        return KvBuffers.of_layers(layers)

    def _states(self, kv: KvBuffers, slots: jax.Array) -> jax.Array:
        """`[S, D]` at `slots [S]`, in the pages' format."""
        parts = [to_numbers(_entries(array, slots)) for arrays in kv.by_layer()[1:] for array in arrays]
        flat = jnp.stack(parts, axis=1).reshape(len(slots), -1)
        if self._num_shares() > 1:
            of_all = all_parts(flat, axis=1).reshape(len(slots), self._num_shares(), self.copies, -1)
            flat = of_all[:, :, 0].reshape(len(slots), -1)
        return flat[:, : self.state_size]

    def _num_shares(self) -> int:
        """Devices with different heads, which share a state."""
        return num_parts() // self.copies


def _stored(
    arrays: tuple[jax.Array, ...], parts: jax.Array, slots: jax.Array, kernels: KernelChoice
) -> tuple[jax.Array, ...]:
    """The arrays of a layer with `parts [T, arrays, K, H]` at `slots [T]`."""
    if len(arrays) == 1:
        return (store_entries(arrays[0], parts[:, 0], slots),)
    k, v = arrays
    stored = store_kv(PagedKv(k, v, slots[:0], slots[:0]), parts[:, 0], parts[:, 1], slots, backend=kernels.store_kv)
    return stored.k, stored.v


def _entries(pages: jax.Array, slots: jax.Array) -> jax.Array:
    """`[S, K, H]` of `pages [P, K, page, H]` at `slots [S]`.

    Reads rows of H numbers by their index: for a gather over P and the third axis a TPU first copies all pages, into a
    layout with these two next to each other.
    """
    _, num_heads, page_size, width = pages.shape
    heads = jnp.arange(num_heads, dtype=jnp.int32)
    return pages.reshape(-1, width)[rows_of(slots[:, None], heads, num_heads, page_size)]


def check_head(arch: EagleArch, target: ModelArch, states: LayerStates, kv_cache_dtype: str) -> None:
    """Raises `ConfigError` for a head whose layer can't be kept with those of `target`."""
    if target.latent is not None:
        raise ConfigError(
            f"--speculative-algorithm EAGLE3 needs layers of keys and values, but {target.name} keeps latents"
        )
    check_pages(kv_cache_dtype)
    ours, theirs = (arch.layer.num_kv_heads, arch.layer.head_dim), (target.num_kv_heads, target.head_dim)
    if ours != theirs:
        raise ConfigError(
            f"the EAGLE-3 head has {ours[0]} kv heads of {ours[1]}, but {target.name} {theirs[0]} of {theirs[1]}: "
            "their pages must be alike"
        )
    if arch.draft_vocab_size % states.num_devices:
        raise ConfigError(
            f"the EAGLE-3 head drafts {arch.draft_vocab_size} tokens, which --tp {states.num_devices} doesn't divide"
        )


def check_pages(kv_cache_dtype: str) -> None:
    """Raises `ConfigError` where pages of that dtype have no place for states."""
    if kv_cache_dtype == FP8_E4M3:
        raise ConfigError(
            f"--kv-cache-dtype {FP8_E4M3} does not go with --speculative-algorithm EAGLE3 and NEXTN, which keep the "
            "head's inputs in the cache: give bfloat16"
        )
