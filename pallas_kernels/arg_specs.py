"""Named shapes of the ops' arguments, shared by tests and benchmarks.

Owns which shapes are worth checking and measuring. Never knows contents (who fills the arrays decides on lengths and
pages) or backends.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class ArgSpec:
    """The static side of a call: shapes, dtype and options. Letters as in the ops' docstrings."""

    name: str
    num_seqs: int
    """S."""
    num_tokens: int
    """T of an extend; a decode has S."""
    pages_per_seq: int
    """P, the width of the page table."""
    page_size: int
    num_kv_heads: int
    """K."""
    num_groups: int
    """Query heads per kv head, N / K."""
    head_dim: int
    """H."""
    dtype: Any = jnp.float32
    sliding_window: int | None = None
    logit_soft_cap: float | None = None

    @property
    def num_pages(self) -> int:
        """Pages of the cache: all that the table can name, and the dummy page."""
        return 1 + self.num_seqs * self.pages_per_seq

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of the attention ops."""
        return {"sliding_window": self.sliding_window, "logit_soft_cap": self.logit_soft_cap}

    def _pages(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.num_pages, self.num_kv_heads, self.page_size, self.head_dim), self.dtype)

    def _queries(self, num_tokens: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_tokens, self.num_kv_heads * self.num_groups, self.head_dim), self.dtype)

    def store_args(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """k_pages, v_pages, k, v, slots."""
        new = jax.ShapeDtypeStruct((self.num_tokens, self.num_kv_heads, self.head_dim), self.dtype)
        return self._pages(), self._pages(), new, new, _int32(self.num_tokens)

    def decode_args(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, k_pages, v_pages, page_table, lengths."""
        table = _int32(self.num_seqs, self.pages_per_seq)
        return self._queries(self.num_seqs), self._pages(), self._pages(), table, _int32(self.num_seqs)

    def extend_args(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, k_pages, v_pages, page_table, lengths, query_offsets."""
        return self._queries(self.num_tokens), *self.decode_args()[1:], _int32(self.num_seqs + 1)


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


# Small enough for an interpreter; each differs from the first in what its name says.
SMALL_SPECS = (
    ArgSpec("plain", 4, 24, 5, 16, 2, 2, 16),
    ArgSpec("page_size_1", 3, 20, 70, 1, 1, 2, 16),
    ArgSpec("page_size_64", 3, 20, 2, 64, 2, 1, 16),
    ArgSpec("groups_3_odd_page_size", 3, 20, 6, 12, 2, 3, 32),
    ArgSpec("groups_16", 2, 12, 4, 16, 1, 16, 16),
    ArgSpec("one_sequence", 1, 40, 9, 16, 2, 2, 16),
    ArgSpec("sliding_window", 4, 24, 10, 16, 1, 2, 16, sliding_window=9),
    ArgSpec("soft_cap", 3, 20, 5, 16, 2, 2, 16, logit_soft_cap=3.0),
    ArgSpec("window_and_cap", 3, 20, 5, 16, 2, 2, 16, sliding_window=33, logit_soft_cap=2.0),
    ArgSpec("bfloat16", 3, 20, 5, 16, 2, 2, 16, dtype=jnp.bfloat16),
    ArgSpec("float16", 3, 20, 5, 16, 2, 2, 16, dtype=jnp.float16),
    ArgSpec("head_dim_64", 2, 12, 4, 16, 1, 4, 64),
)

# What serving uses; for lowering and compiling, and for measuring.
SERVING_SPECS = (
    ArgSpec("0.6b", 32, 1024, 64, 16, 8, 2, 128),
    ArgSpec("0.6b_bfloat16_page_64", 32, 1024, 16, 64, 8, 2, 128, dtype=jnp.bfloat16),
    ArgSpec("8b_page_1", 64, 2048, 512, 1, 8, 4, 128, dtype=jnp.bfloat16),
    ArgSpec("8b_page_128", 64, 2048, 32, 128, 8, 4, 128, dtype=jnp.bfloat16),
    ArgSpec("head_dim_64_float16", 32, 1024, 32, 16, 8, 7, 64, dtype=jnp.float16),
    ArgSpec(
        "head_dim_256_window_and_cap", 8, 512, 32, 16, 4, 2, 256,
        dtype=jnp.bfloat16, sliding_window=4096, logit_soft_cap=50.0,
    ),
    ArgSpec("groups_16", 8, 512, 32, 256, 2, 16, 128, dtype=jnp.bfloat16),
)  # fmt: skip
