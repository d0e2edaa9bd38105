"""What the layers of one step work with besides tokens and positions; the engine makes it, and drafters their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxsgl.models.layers import (
    Attend,
    Recur,
    no_states,
)
from jaxsgl.models.lora import ActiveAdapters, LayerAdapters
from pallas_kernels import KernelChoice
from pallas_kernels.choice import AUTO_CHOICE


@dataclass(frozen=True)
class ImageTokens:
    """What a tower made of images, for the tokens of a step.

    Attributes:
      rows: `[T, (1 + J) D]`: embeddings, then what is added after each of the first J layers; 0 for other tokens.
      is_image: `[T]` whether a token is an image's.
      num_parts: 1 + J.
    """

    rows: jax.Array
    is_image: jax.Array
    num_parts: int

    def part(self, index: int) -> jax.Array:
        """`[T, D]`: the embeddings (0), or what is added after layer `index` - 1."""
        size = self.rows.shape[1] // self.num_parts
        return self.rows[:, index * size : (index + 1) * size]


@dataclass(frozen=True)
class StepContext:
    """What the layers work with besides tokens and positions, the same for all layers of a step.

    Attributes:
      attend, recur: called once per layer, in order.
      is_token: `[T]`, false where a bucket is padded, which costs no expert's weights; None: all are tokens.
      adapters: those of the tokens; None: there are none.
      images: take the places of some of the embeddings; None: there are none.
      kernels: what norms, experts and products with quantized weights run on.
      mlp_tokens: places for the tokens of all ranks in MLPs; 0: those of all their batches.
      experts: the chosen experts of each layer are appended here: `[T, k]` int32, `[T, 0]` of a layer without. None:
        the step doesn't report them.
      streams: by the index of a layer, each item becomes the residual stream `[T, D]` before that layer, or after the
        last one.
    """

    attend: Attend
    recur: Recur = no_states
    is_token: jax.Array | None = None
    adapters: ActiveAdapters | None = None
    images: ImageTokens | None = None
    kernels: KernelChoice = AUTO_CHOICE
    mlp_tokens: int = 0
    experts: list[jax.Array] | None = None
    streams: dict[int, Any] = field(default_factory=dict)

    def adapters_of(self, layer: int) -> LayerAdapters | None:
        """The adapters of one layer; None: there are none."""
        return None if self.adapters is None else self.adapters.of_layer(layer)

    def note_stream(self, index: int, x_TD: jax.Array) -> None:
        """Keeps the residual stream before layer `index`, if it is asked for."""
        if index in self.streams:
            self.streams[index] = x_TD

    def note_no_experts(self, num_tokens: int) -> None:
        """Keeps that a layer has no experts to choose from, if that is asked for."""
        if self.experts is not None:
            self.experts.append(jnp.zeros((num_tokens, 0), jnp.int32))
