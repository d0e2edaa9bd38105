"""How a model's heads lie in a cache whose heads are wider or fewer: several side by side, zeros after each.

    2 heads of 48 in one of 128:   | head 0 | 0 | head 1 | 0 |

Attention over such a cache needs no other kernel. A query has its numbers where its own kv head lies and zeros
elsewhere, so that the other heads add nothing to its scores; of its output the numbers of its own head are taken.
Owns these places. Never knows pages or kernels. Used by the public functions, and by models after attention.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class KeptHeads:
    """How the kv heads of a model are kept."""

    num_kv_heads: int
    """K, the model's."""
    kept_heads: int
    """The cache's; K / kept_heads of the model's lie side by side in each."""
    width: int
    """Numbers of a head of the cache."""

    @property
    def together(self) -> int:
        """How many lie side by side."""
        return self.num_kv_heads // self.kept_heads

    @property
    def share(self) -> int:
        """Numbers that each of them has of the width."""
        return self.width // self.together

    def takes(self, head_dim: int) -> bool:
        """Whether heads of this size can be kept so."""
        return self.num_kv_heads % self.kept_heads == 0 == self.width % self.together and head_dim <= self.share

    def joined(self, heads: jax.Array) -> jax.Array:
        """Keys or values `[T, K, share]` as the cache holds them, `[T, kept_heads, width]`."""
        return heads.reshape(heads.shape[0], self.kept_heads, self.width)

    def queries(self, q: jax.Array) -> jax.Array:
        """Queries `[T, N, H]` for attention over the cache, `[T, N, width]`."""
        q = widened(q, self.share)
        if self.together == 1:
            return q
        num_tokens, num_heads, _ = q.shape
        q = q.reshape(num_tokens, self.kept_heads, self.together, -1, self.share)
        places = [((0, 0),) * 3 + ((i * self.share, self.width - (i + 1) * self.share),) for i in range(self.together)]
        placed = [jnp.pad(q[:, :, i], place) for i, place in enumerate(places)]
        return jnp.stack(placed, axis=2).reshape(num_tokens, num_heads, self.width)

    def own_numbers(self, out: jax.Array, head_dim: int) -> jax.Array:
        """Of the output `[T, N, width]` of attention over the cache each head's own numbers, `[T, N, head_dim]`."""
        if self.together == 1:
            return out[..., :head_dim]
        num_tokens, num_heads, _ = out.shape
        out = out.reshape(num_tokens, self.kept_heads, self.together, -1, self.width)
        own = [out[:, :, i, :, i * self.share : i * self.share + head_dim] for i in range(self.together)]
        return jnp.stack(own, axis=2).reshape(num_tokens, num_heads, head_dim)


def widened(heads: jax.Array, width: int) -> jax.Array:
    """Heads `[.., H]` with zeros after their own numbers, `[.., width]`."""
    missing = width - heads.shape[-1]
    return jnp.pad(heads, [(0, 0)] * (heads.ndim - 1) + [(0, missing)]) if missing else heads
