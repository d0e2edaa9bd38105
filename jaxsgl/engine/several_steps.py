"""Several decode steps in one program: the step of one token, again and again, each on the tokens of the one before.

Owns what moves from step to step; what a step is stands in `step`. The host launches and reads once for all of them.
Called by `programs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from jaxsgl.batch.inputs import Bucket, layout, packed_len
from jaxsgl.cache.pages import DUMMY_PAGE, slots_at
from jaxsgl.engine.kv_buffers import KvBuffers
from jaxsgl.engine.step import make_forward, sample_step, unpack


class Decoded(NamedTuple):
    """What such a program returns.

    Attributes:
      kv: all pages, with the keys and values of all steps.
      last_tokens: `[rows + 1]` int32, with each sequence's last one.
      tokens: `[num_steps, S]` int32.
    """

    kv: KvBuffers
    last_tokens: jax.Array
    tokens: jax.Array


DecodeSteps: TypeAlias = Callable[[list[jax.Array], KvBuffers, jax.Array, jax.Array], Decoded]


def make_decode_steps(graphdef: nnx.GraphDef, treedef: Any, bucket: Bucket, attention_backend: str) -> DecodeSteps:
    """`decode_steps(params, kv, last_tokens, packed) -> Decoded` for `bucket`; arguments as for `step.make_forward`.

    A loop, not the step written `num_steps` times: it compiles as fast as one step, and the buffers of the pages stay
    where they are.
    """
    forward = make_forward(graphdef, treedef, replace(bucket, num_steps=1), attention_backend)

    def decode_steps(params: list[jax.Array], kv: KvBuffers, last_tokens: jax.Array, packed: jax.Array) -> Decoded:
        page_size, dummy_row = kv.k[0].shape[2], len(last_tokens) - 1

        def step(carry: tuple[KvBuffers, jax.Array], i: jax.Array) -> tuple[tuple[KvBuffers, jax.Array], jax.Array]:
            # Behind the barrier weights seem to depend on the step: else XLA would convert them to other formats before
            # the loop, that is, copy them, where a single step converts as it multiplies.
            weights, i = jax.lax.optimization_barrier((params, i))
            out = forward(weights, *carry, _inputs_of_step(packed, bucket, i, page_size, dummy_row))
            last_tokens, tokens = out.last_tokens, out.tokens
            if bucket.sampled:
                last_tokens, tokens = sample_step(out.logits, out.sampling, last_tokens)
            return (out.kv, last_tokens), tokens

        (kv, last_tokens), tokens = jax.lax.scan(step, (kv, last_tokens), jnp.arange(bucket.num_steps))
        return Decoded(kv, last_tokens, tokens)

    return decode_steps


def _inputs_of_step(packed: jax.Array, bucket: Bucket, i: jax.Array, page_size: int, dummy_row: int) -> jax.Array:
    """What a program of one step takes as step `i`; a sequence that has taken all its steps is padding by then."""
    first = unpack(packed, bucket)
    assert first.steps is not None
    on = i < first.steps
    positions = jnp.where(on, first.positions + i, 0)
    moved = {
        "positions": positions,
        "slots": jnp.where(on, slots_at(first.page_table, positions, page_size), DUMMY_PAGE),
        "lengths": jnp.where(on, first.lengths + i, 0),
        "sample_rows": jnp.where(on, first.sample_rows, dummy_row),
    }
    for name, values in moved.items():
        offset, _ = layout(bucket)[name]
        packed = packed.at[offset : offset + len(values)].set(values)
    return packed[: packed_len(replace(bucket, num_steps=1))]
