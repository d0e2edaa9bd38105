"""A smaller model that drafts (STANDALONE): it computes what the larger one computes, then a chain of its own tokens.

Its layers come after the larger model's in the KV pool, in pages of the same numbers, so that one page table serves
both. In each step it reads the same tokens as the larger model. Unlike a head it needs nothing of that one.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsgl.batch.inputs import StepArrays, StepKind
from jaxsgl.engine import vocabulary
from jaxsgl.engine.attending import Pages
from jaxsgl.engine.draft import Attending
from jaxsgl.engine.layer_state import LayerState
from jaxsgl.engine.state import KvBuffers
from jaxsgl.errors import ConfigError
from jaxsgl.models import Decoder, ModelArch, Params, Qkv
from pallas_kernels import FusedQkv, KernelChoice


@dataclass(frozen=True, eq=False)
class ModelDrafting:
    """See `Drafting`.

    Attributes:
      graphdef, params, arch: the model.
      kept: what its layers keep.
      num_drafts: k.
    """

    graphdef: nnx.GraphDef[Decoder]
    params: Params
    arch: ModelArch
    kept: tuple[LayerState, ...]
    num_drafts: int
    taps: tuple[int, ...] = ()

    def layers(self, scratch_pages: int) -> tuple[LayerState, ...]:
        """See `Drafting`."""
        return tuple(layer.with_scratch(scratch_pages) for layer in self.kept)

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
        """See `Drafting`. Nothing reads the last hidden states, so that XLA leaves the end of the last layer out."""
        options = [self.arch.attention_options(layer) for layer in range(self.arch.num_layers)]
        pages = Pages(kv, table_SP, arrays, kind, options, kernels)
        is_token = arrays.slots >= kv.k[0].shape[2]
        nnx.merge(self.graphdef, params)(token_ids, arrays.positions, pages.attend, is_token, kernels=kernels)
        return pages.buffers()

    def begin(self, params: Params, kv: KvBuffers, last_slots: jax.Array) -> jax.Array:
        """See `Drafting`: nothing but tokens."""
        return jnp.zeros((len(last_slots), 0), jnp.float32)

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

        def attend_layer(layer: int, qkv: Qkv, sinks: jax.Array | None) -> jax.Array:
            assert isinstance(qkv, FusedQkv) and sinks is None, "check_draft_model refuses such models"
            return attend(layer, qkv, self.arch.attention_options(layer).for_heads(qkv.head_dim))

        own = nnx.merge(self.graphdef, params)
        hidden = own(tokens, positions, attend_layer, kernels=kernels)
        return carried, vocabulary.greedy(own.logits(hidden))


def check_draft_model(arch: ModelArch, target: ModelArch, context_length: int) -> None:
    """Raises `ConfigError` for a model that can't draft for `target`."""
    keeps_pairs = arch.latent is None and arch.delta_net is None
    if not keeps_pairs or arch.sinks or arch.vision is not None or arch.head != "vocabulary":
        raise ConfigError(
            f"--speculative-draft-model-path: {arch.name} has latents, states, attention sinks, a vision tower or no "
            "head over a vocabulary, with which a model can't draft"
        )
    if target.latent is not None:
        raise ConfigError(
            f"--speculative-algorithm STANDALONE needs layers of keys and values, but {target.name} keeps latents"
        )
    if arch.vocab_size > target.vocab_size:
        raise ConfigError(
            f"--speculative-draft-model-path: {arch.name} has {arch.vocab_size} tokens, but {target.name} "
            f"{target.vocab_size}: take a model of the same tokenizer"
        )
    if arch.max_context < context_length:
        raise ConfigError(
            f"--speculative-draft-model-path: {arch.name} was made for {arch.max_context} tokens: give "
            f"--context-length {arch.max_context} or less"
        )
