"""The product of a layer's fused query, key and value weights as one argument, and what attention takes of it.

Owns the layout of the product, and the definition of its way to queries, keys and values: bias, then norm per head and
rotation by position, in either order; values are normalized at most. Never knows weights or pages. Used by models,
which make the product, and by `rotate_and_store`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.norm import rms_norm, row_of, scale_of
from pallas_kernels.paged_kv import QUERY_DTYPES
from pallas_kernels.parts import whole
from pallas_kernels.sums import mean_squares_of_all


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FusedQkv:
    """Queries, keys and values of T tokens, as the product leaves them; a JAX pytree.

    Vectors come stacked over all layers of the model with the layer's index beside them, so that a program has few
    arguments and a kernel reads its row in place.
    """

    product: jax.Array
    """`[T, K, G + 2, H]`: of each kv head its G query heads, then its key, then its value; no bias added yet.

    After these each kv head may have `num_gates` rows that attention doesn't read. Or float32 parts, `[P, T, ...]`.
    """
    cos: jax.Array
    """`[T, 1, H / 2]` float32, cosines of the tokens' angles; dimension i turns together with i + H / 2."""
    sin: jax.Array
    """`[T, 1, H / 2]` float32."""
    bias: jax.Array | None = None
    """`[L, K, G + 2, H]`, or None."""
    q_norm: jax.Array | None = None
    """`[L, H]`, the scales of an RMSNorm of every query head; None, as k_norm, for no norm."""
    k_norm: jax.Array | None = None
    """`[L, H]`, the same of every key."""
    layer: int = dataclasses.field(default=0, metadata={"static": True})
    """The row of bias and norms."""
    eps: float = dataclasses.field(default=1e-6, metadata={"static": True})
    """Added to the mean square in the norms."""
    rotates_first: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether heads are rotated before they are normalized, and not after that."""
    normalizes_values: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether every value is brought to unit mean square, as keys by k_norm, but without scales."""
    num_gates: int = dataclasses.field(default=0, metadata={"static": True})
    """How many rows of each kv head come after its value."""
    dtype_of_sum: jnp.dtype | None = dataclasses.field(default=None, metadata={"static": True})
    """What the product is in as a whole, if it comes in parts."""

    @property
    def dtype(self) -> jnp.dtype:
        """Of the product as a whole, and so of queries."""
        return self.product.dtype if self.dtype_of_sum is None else self.dtype_of_sum

    @property
    def whole(self) -> jax.Array:
        """`[T, K, G + 2, H]`: the product without gates, its parts added up."""
        product = self.product[..., : self.num_groups + 2, :] if self.num_gates else self.product
        return whole(product, 4, self.dtype)

    @property
    def gates(self) -> jax.Array:
        """`[T, K, gates, H]`: the rows after the values."""
        return whole(self.product[..., self.num_groups + 2 :, :], 4, self.dtype)

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.product.shape[-4])

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return int(self.product.shape[-3])

    @property
    def num_groups(self) -> int:
        """G: query heads per kv head, N / K."""
        return int(self.product.shape[-2]) - 2 - self.num_gates

    @property
    def head_dim(self) -> int:
        """H."""
        return int(self.product.shape[-1])

    def with_heads(self, heads: jax.Array) -> "FusedQkv":
        """The same with `heads [T, K, G + 2, H]` in place of the whole product; the gates stay."""
        product = jnp.concatenate([heads, self.gates], axis=2) if self.num_gates else heads
        return dataclasses.replace(self, product=product, dtype_of_sum=None)

    def split(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries `[T, N, H]`, keys and values `[T, K, H]`, normalized and rotated, by XLA."""
        product = self.whole if self.bias is None else self.whole + row_of(self.bias, self.layer, self.dtype)
        groups = self.num_groups
        q = product[:, :, :groups].reshape(self.num_tokens, self.num_kv_heads * groups, self.head_dim)
        k, v = product[:, :, groups], product[:, :, groups + 1]
        if self.rotates_first:
            q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
        if self.q_norm is not None and self.k_norm is not None:
            squares = mean_squares_of_all(product)  # a rotation keeps them
            of_q = None if squares is None else squares[:, :, :groups].reshape(*q.shape[:2], 1)
            of_k = None if squares is None else squares[:, :, groups]
            q = rms_norm(q, scale_of(self.q_norm, self.layer, q.dtype), self.eps, of_q)
            k = rms_norm(k, scale_of(self.k_norm, self.layer, k.dtype), self.eps, of_k)
        if self.normalizes_values:
            squares = mean_squares_of_all(product)
            of_v = None if squares is None else squares[:, :, groups + 1]
            v = rms_norm(v, jnp.ones(self.head_dim, v.dtype), self.eps, of_v)
        if self.rotates_first:
            return q, k, v
        return rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin), v


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Every head of `x [T, heads, H]` turned by its token's angles; computed in float32, returned in x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def check_qkv(qkv: FusedQkv) -> None:
    """Check the product and what comes with it against each other.

    Raises:
        ValueError: shapes or dtypes that don't fit, or a norm of queries without one of keys.
    """
    has_parts = qkv.dtype_of_sum is not None and qkv.product.ndim == 5 and qkv.product.dtype == jnp.float32
    if (qkv.product.ndim != 4 and not has_parts) or qkv.num_groups < 1 or qkv.dtype not in QUERY_DTYPES:
        raise ValueError(
            f"qkv.product is {qkv.product.shape} {qkv.product.dtype}; it must be [T, K, G + 2, H] in float32, "
            "bfloat16 or float16, or float32 parts [P, T, K, G + 2, H] of that"
        )
    tokens, head_dim = qkv.num_tokens, qkv.head_dim
    heads = qkv.num_kv_heads, qkv.num_groups + 2
    for name, table in (("cos", qkv.cos), ("sin", qkv.sin)):
        if table.shape != (tokens, 1, head_dim // 2) or table.dtype != jnp.float32:
            raise ValueError(
                f"qkv.{name} is {table.shape} {table.dtype}; it must be [T, 1, H / 2] float32 with the T and H of "
                f"qkv.product {qkv.product.shape}"
            )
    for name, rows, shape in (
        ("bias", qkv.bias, (*heads, head_dim)), ("q_norm", qkv.q_norm, (head_dim,)), ("k_norm", qkv.k_norm, (head_dim,))
    ):  # fmt: skip
        if rows is not None and (rows.shape[1:] != shape or not 0 <= qkv.layer < rows.shape[0]):
            raise ValueError(
                f"qkv.{name} is {rows.shape}; it must be [L, {', '.join(map(str, shape))}], L > {qkv.layer}"
            )
    if (qkv.q_norm is None) != (qkv.k_norm is None):
        raise ValueError("qkv has one of q_norm and k_norm; it must have both or none")
