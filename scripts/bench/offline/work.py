"""What a step has to do at least, from real lengths: padding, masks and second readings are the engine's loss.

Bytes: each weight once (an embedding that is no output head isn't read), and K and V of all tokens of each sequence.
FLOPs: 2 for each weight of the layers and new token, 2 for each of the head and sequence, and 4 * head_dim for each
query head and token that it sees. The same rules as in `bench.kernels.work`, for whole models.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from bench.kernels.work import Work
from bench.offline.recording import Step
from bench.simulation.cost import num_params
from jaxsgl.engine.engine import Engine


@dataclass(frozen=True)
class ModelWork:
    """A model in numbers.

    Attributes:
      layer_params, head_params: weights of all layers, and of the output head.
      weight_bytes: of one weight.
      kv_token_bytes: K and V of one token in all layers.
      pair_flops: of a token that sees another, in all heads and layers.
    """

    layer_params: int
    head_params: int
    weight_bytes: int
    kv_token_bytes: int
    pair_flops: int

    @classmethod
    def of(cls, engine: Engine) -> ModelWork:
        """As `engine` holds it."""
        arch, capacity = engine.arch, engine.capacity
        kv_tokens = capacity.pool_tokens + capacity.page_size  # the dummy page too
        pair_flops = 4 * arch.num_layers * arch.num_heads * arch.head_dim
        width = jnp.dtype(engine.info.dtype).itemsize
        return cls(*num_params(arch), width, engine.info.kv_bytes // kv_tokens, pair_flops)

    def of_step(self, step: Step) -> Work:
        """The least that `step` could do."""
        lengths, new = step.lengths.astype(np.int64), step.new.astype(np.int64)
        pairs = (new * lengths - new * (new - 1) // 2).sum()
        weights = step.bucket.num_steps * (self.layer_params + self.head_params)
        several = step.bucket.num_steps > 1  # each of them reads K and V anew, and yields tokens
        num_bytes = self.weight_bytes * weights + self.kv_token_bytes * (pairs if several else lengths.sum())
        products = 2 * (self.layer_params * step.num_tokens)
        products += 2 * self.head_params * (step.num_tokens if several else step.num_seqs)
        return Work(int(num_bytes), int(products + self.pair_flops * pairs))
