"""A smaller model that drafts (STANDALONE): it computes what the larger one computes, then a chain of its own tokens.

Its layers come after the larger model's in the KV pool, in pages of the same numbers, so that one page table serves
both. In each step it reads the same tokens as the larger model. Unlike a head it needs nothing of that one.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsgl.engine.attending import Pages
from jaxsgl.engine.drafting.draft import Drafting, Link, Seen
from jaxsgl.engine.layer_state import LayerState
from jaxsgl.engine.sampling import vocabulary
from jaxsgl.engine.state import KvBuffers
from jaxsgl.errors import ConfigError
from jaxsgl.models import Decoder, ModelArch, Params, StepContext


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelDrafting(Drafting):
    """See `Drafting`.

    Attributes:
      graphdef: the model.
      kept: what its layers keep.
    """

    graphdef: nnx.GraphDef[Decoder]
    kept: tuple[LayerState, ...]

    def layers(self, scratch_pages: int) -> tuple[LayerState, ...]:
        """See `Drafting`."""
        return tuple(layer.with_scratch(scratch_pages) for layer in self.kept)

    def read(self, params: Params, seen: Seen, kv: KvBuffers) -> KvBuffers:
        """See `Drafting`. Nothing reads the last hidden states, so that XLA leaves the end of the last layer out."""
        pages = Pages(kv, seen.table_SP, seen.arrays, seen.kind, self.options, seen.kernels)
        is_token = seen.arrays.slots >= kv.k[0].shape[2]
        own = nnx.merge(self.graphdef, params)
        context = StepContext(pages.attend, is_token=is_token, kernels=seen.kernels)
        own(seen.token_ids, seen.arrays.positions, context)
        return pages.buffers()

    def begin(self, params: Params, kv: KvBuffers, last_slots: jax.Array) -> jax.Array:
        """See `Drafting`: nothing but tokens."""
        return jnp.zeros((len(last_slots), 0), jnp.float32)

    def step(self, params: Params, link: Link) -> tuple[jax.Array, jax.Array]:
        """See `Drafting`."""
        own = nnx.merge(self.graphdef, params)
        hidden = own(link.tokens, link.positions, StepContext(link.attend, kernels=link.kernels))
        return link.carried, vocabulary.greedy(own.logits(hidden))


def check_draft_model(arch: ModelArch, target: ModelArch, context_length: int) -> None:
    """Raises `ConfigError` for a model that can't draft for `target`."""
    keeps_pairs = arch.latent is None and arch.recurrent_net is None and not arch.reading_layers
    if not keeps_pairs or arch.has_sinks or arch.tower is not None or arch.head != "vocabulary":
        raise ConfigError(
            f"--speculative-draft-model-path: {arch.name} has latents, states, keys that layers share, sinks, "
            "a vision tower or no head over a vocabulary, with which a model can't draft"
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
