"""The options of attention besides its arrays: softmax scale, window, chunks, soft cap; and the sum with a sink.

Owns their ranges and what they mean for a position. Used by the callers of the public functions and by every backend.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Static options of an attention op; hashable, so that it can be a static argument of `jax.jit`.

    Raises:
        ValueError: a window, chunk or value below 1, or a scale or soft cap that isn't positive and finite.
    """

    sm_scale: float | None = None
    """Factor on q . k before the softmax; None is 1 / sqrt(H)."""
    sliding_window: int | None = None
    """A query at position p sees positions p - sliding_window + 1 .. p; None is no limit."""
    logit_soft_cap: float | None = None
    """Scaled scores become cap * tanh(score / cap) before masking; None leaves them."""
    value_dim: int | None = None
    """How many of the first numbers of a key are its value, where the cache's v is its k; the output has as many. None:
    values are v's, of H numbers."""
    sees_ahead: bool = False
    """Whether queries of an extend may see positions after their own, up to where `seen` says."""
    in_fixed_order: bool = False
    """Whether a decode's sums have an order that depends on the sequence alone; set by `api` in programs that ask."""
    chunk: int | None = None
    """A query at position p sees no position before p // chunk * chunk; None is no limit. `chunks` makes plain
    attention of it before a backend is called. Not for queries that see ahead, nor for latents."""
    symmetric: bool = False
    """Whether a window holds for positions after a query's own, too: the caller cuts `seen` to it. Backends need not
    know."""

    def __post_init__(self) -> None:
        if self.sm_scale is not None and not (0 < self.sm_scale < math.inf):
            raise ValueError(f"sm_scale is {self.sm_scale}; it must be positive, or None for 1 / sqrt(head size)")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window is {self.sliding_window}; it must be at least 1, or None for no window")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk is {self.chunk}; it must be at least 1, or None for no chunks")
        if self.value_dim is not None and self.value_dim < 1:
            raise ValueError(f"value_dim is {self.value_dim}; it must be at least 1, or None for values of their own")
        if self.chunk is not None and (self.value_dim is not None or self.sees_ahead):
            raise ValueError(f"chunk is {self.chunk}; it must be None for latents and for queries that see ahead")
        if self.logit_soft_cap is not None and not (0 < self.logit_soft_cap < math.inf):
            raise ValueError(f"logit_soft_cap is {self.logit_soft_cap}; it must be positive, or None for no cap")

    def scale(self, head_dim: int) -> float:
        """The factor on q . k for heads of this size."""
        return float(head_dim**-0.5 if self.sm_scale is None else self.sm_scale)

    def for_heads(self, head_dim: int) -> "AttentionOptions":
        """The same with the scale written out, for heads of this size in a wider cache."""
        return dataclasses.replace(self, sm_scale=self.scale(head_dim))

    def first_visible(self, position: jax.Array) -> jax.Array:
        """The lowest KV position that a query at `position` may see."""
        if self.sliding_window is None:
            return jnp.zeros_like(position)
        return jnp.maximum(position - self.sliding_window + 1, 0)

    def longest_view(self, max_len: int) -> int:
        """The most KV tokens that one query can see of a sequence of up to `max_len`."""
        return max_len if self.sliding_window is None else min(max_len, self.sliding_window)


def places_of_biases(biases: jax.Array, distance: jax.Array) -> jax.Array:
    """Which of `biases [.., 2 B + 1]` keys have that come `distance` after a query: beyond B the outermost."""
    reach = biases.shape[-1] // 2
    return jnp.clip(distance, -reach, reach) + reach


def with_sinks(total: jax.Array, top: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """The denominators of softmaxes that have sinks: `total`, the sums of exp(score - top), and exp(sink - top).

    Exact whatever `top` is: where a sink exceeds all scores by so much that the sum overflows, the output is 0, as it
    should be. A row that has seen nothing, whose top is a number far below any score, yields 0 too.
    """
    return total if sinks is None else total + jnp.exp(sinks - top)
