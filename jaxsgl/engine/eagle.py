"""EAGLE-3 on the device: what the head keeps of each token, and a step of its chain (`draft.py` has the rest).

    layer 0       K and V of the head's only layer. Token i's are those of (state of token i - 1, embedding of token i),
                  so that a page depends on its own tokens and those before it
    layers 1 ..   the state of token i: what the head's fc makes of the model's streams, its numbers spread over the
                  pages' heads, since the next token, maybe of another step or request, needs it

Token i stands at position i. Training counts from the pair (state 0, token 1): queries and keys turn with differences
of positions, which are the same. Token 0 has no state before it, and keeps zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsgl.batch.inputs import StepArrays, StepKind
from jaxsgl.cache.pages import page_of, place_of
from jaxsgl.engine import vocabulary
from jaxsgl.engine.draft import Attending, slots_of_positions
from jaxsgl.engine.layer_state import LayerState, LayerStates
from jaxsgl.engine.state import KvBuffers
from jaxsgl.errors import ConfigError
from jaxsgl.models import Decoder, ModelArch, Params
from jaxsgl.models.eagle import EagleArch, EagleHead
from jaxsgl.models.quantization import FP8_E4M3
from jaxsgl.models.tensor_parallel import all_parts, num_parts, of_this_part
from pallas_kernels import KernelChoice, PagedKv, rotate_and_store, store_kv
from pallas_kernels.paged_kv import to_numbers


@dataclass(frozen=True, eq=False)
class EagleDrafting:
    """See `Drafting`.

    Attributes:
      graphdef, params, arch: the head.
      like: what the model's layers keep, each the same.
      num_drafts: k.
    """

    graphdef: nnx.GraphDef[EagleHead]
    params: Params
    arch: EagleArch
    like: LayerState
    num_drafts: int

    @property
    def taps(self) -> tuple[int, ...]:
        """See `Drafting`."""
        return self.arch.taps

    @cached_property
    def num_state_layers(self) -> int:
        """Layers that the state of a token takes."""
        heads, _, width = self.like.by_page[0].shape
        return -(-self.arch.layer.hidden_size // (len(self.like.by_page) * heads * width))

    def layers(self, scratch_pages: int) -> tuple[LayerState, ...]:
        """See `Drafting`."""
        return self.like.with_scratch(scratch_pages), *(self.like,) * self.num_state_layers

    def read(
        self,
        params: Params,
        model: Decoder,
        token_ids: jax.Array,
        streams: dict[int, jax.Array],
        arrays: StepArrays[jax.Array],
        kind: StepKind,
        kv: KvBuffers,
        table_SP: jax.Array,
        kernels: KernelChoice,
    ) -> KvBuffers:
        """See `Drafting`."""
        head = nnx.merge(self.graphdef, params)
        states_TD = head.projected([streams[layer] for layer in self.taps])
        kv = self._with_states(kv, states_TD, arrays.slots, kernels)
        first = arrays.query_offsets[:-1]
        positions = arrays.positions.at[first].get(mode="clip")
        page_size = kv.k[0].shape[2]
        before = jnp.maximum(positions - 1, 0)
        states_SD = self._states(kv, slots_of_positions(table_SP, before, page_size)).astype(states_TD.dtype)
        before_TD = jnp.roll(states_TD, 1, axis=0).at[first].set(states_SD, mode="drop")
        qkv = head.attention(_embedded(head, model, token_ids), before_TD, arrays.positions)
        paged = PagedKv(kv.k[0], kv.v[0], table_SP, arrays.lengths)
        _, stored = rotate_and_store(
            qkv, paged, arrays.slots, backend=kernels.rotate_and_store, store_backend=kernels.store_kv
        )
        return KvBuffers((stored.k, *kv.k[1:]), (stored.v, *kv.v[1:]))

    def begin(self, params: Params, kv: KvBuffers, last_slots: jax.Array) -> jax.Array:
        """See `Drafting`: the states `[S, D]` of the tokens before the newest ones."""
        return self._states(kv, last_slots).astype(nnx.merge(self.graphdef, params).activations)

    def step(
        self,
        params: Params,
        model: Decoder,
        carried: jax.Array,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attending,
        kernels: KernelChoice,
    ) -> tuple[jax.Array, jax.Array]:
        """See `Drafting`."""
        head = nnx.merge(self.graphdef, params)
        qkv = head.attention(_embedded(head, model, tokens), carried, positions)
        options = self.arch.layer.attention_options(0).for_heads(qkv.head_dim)
        output_SD = head.output(carried, attend(0, qkv, options), kernels)
        logits, hidden_SD = head.logits(output_SD)
        return hidden_SD, head.target_ids[...][vocabulary.greedy(logits)]

    def _with_states(self, kv: KvBuffers, states_TD: jax.Array, slots: jax.Array, kernels: KernelChoice) -> KvBuffers:
        """The layers with these states at `slots [T]`."""
        num_tokens, size = states_TD.shape
        shape = num_tokens, self.num_state_layers, 2, *(kv.k[1].shape[i] for i in (1, 3))
        numbers = shape[1] * shape[2] * shape[3] * shape[4]
        padded = jnp.pad(states_TD, ((0, 0), (0, numbers * num_parts() - size)))
        parts = of_this_part(padded, axis=1).reshape(shape)
        ks, vs = list(kv.k), list(kv.v)
        for layer in range(self.num_state_layers):
            paged = PagedKv(ks[1 + layer], vs[1 + layer], slots[:0], slots[:0])
            stored = store_kv(paged, parts[:, layer, 0], parts[:, layer, 1], slots, backend=kernels.store_kv)
            ks[1 + layer], vs[1 + layer] = stored.k, stored.v
        return KvBuffers(tuple(ks), tuple(vs))

    def _states(self, kv: KvBuffers, slots: jax.Array) -> jax.Array:
        """`[S, D]` at `slots [S]`, in the pages' format."""
        page_size = kv.k[1].shape[2]
        pages, places = page_of(slots, page_size), place_of(slots, page_size)
        parts = [to_numbers(array[pages, :, places]) for pair in zip(kv.k[1:], kv.v[1:], strict=True) for array in pair]
        flat = jnp.stack(parts, axis=1).reshape(len(slots), -1)
        return all_parts(flat, axis=1)[:, : self.arch.layer.hidden_size]


def _embedded(head: EagleHead, model: Decoder, token_ids: jax.Array) -> jax.Array:
    """`[T, D]` by the head's own embedding, or the model's."""
    return head.embedded(token_ids) if head.arch.has_embedding else model.embedded(token_ids)


def check_head(arch: EagleArch, target: ModelArch, states: LayerStates, kv_cache_dtype: str) -> None:
    """Raises `ConfigError` for a head whose layer can't be kept with those of `target`."""
    if target.latent is not None:
        raise ConfigError(
            f"--speculative-algorithm EAGLE3 needs layers of keys and values, but {target.name} keeps latents"
        )
    if kv_cache_dtype == FP8_E4M3:
        raise ConfigError(
            f"--kv-cache-dtype {FP8_E4M3} does not go with --speculative-algorithm EAGLE3, which keeps the head's "
            "inputs in the cache: give bfloat16"
        )
    ours, theirs = (arch.layer.num_kv_heads, arch.layer.head_dim), (target.num_kv_heads, target.head_dim)
    if ours != theirs:
        raise ConfigError(
            f"the EAGLE-3 head has {ours[0]} kv heads of {ours[1]}, but {target.name} {theirs[0]} of {theirs[1]}: "
            "their pages must be alike"
        )
    if target.kv_copies > 1:
        raise ConfigError(
            f"--tp {states.num_devices} is more than the {target.stored_kv_heads} kv heads of {target.name}: with "
            "--speculative-algorithm EAGLE3 each device needs heads of its own"
        )
    if arch.draft_vocab_size % states.num_devices:
        raise ConfigError(
            f"the EAGLE-3 head drafts {arch.draft_vocab_size} tokens, which --tp {states.num_devices} doesn't divide"
        )
