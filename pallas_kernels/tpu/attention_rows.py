"""The arithmetic of paged attention inside a TPU kernel: query rows of all heads against one KV tile in VMEM.

Owns the running softmax and how heads and pages lie in VMEM. Never knows copies, page tables or sequences: callers say
at which positions rows and tile stand. Called by `attention`.

The query heads that share a kv head are the rows of one product, group by group: row g * Q + i is query i of the g-th
head, Q the queries in the tile. Maximum and sum of a row are kept in all 128 lanes, so that neither is ever moved
between lanes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.options import AttentionOptions, with_sinks
from pallas_kernels.tpu.common import LANES, PageForm

# Below any real score; finite, so that subtracting it from itself gives 0 and not NaN.
_UNSEEN = -1e30
# Up to this many rows the heads are unrolled, so that the products of one head hide the reductions of another.
_UNROLLED_ROWS = 32


@dataclasses.dataclass(frozen=True)
class RowsState:
    """VMEM of the rows being computed; R rows per kv head."""

    queries: Any
    """`[K, R, H]` in q's dtype."""
    top: Any
    """`[K, R, 128]` float32, the highest score so far."""
    total: Any
    """`[K, R, 128]` float32, the sum of weights."""
    acc: Any
    """`[K, R, H]` float32, the weighted sum of V."""

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return int(self.queries.shape[0])


@dataclasses.dataclass(frozen=True)
class Rows:
    """The work of one query tile on a `RowsState`."""

    state: RowsState
    num_queries: int
    """Q, a power of two."""
    num_groups: int
    """G; the tile has R = G * Q rows per kv head."""
    form: PageForm
    options: AttentionOptions

    @property
    def num_rows(self) -> int:
        """R."""
        return self.num_queries * self.num_groups

    def _each_head(self, work: Callable[[Any], None]) -> None:
        num_kv_heads = self.state.num_kv_heads
        # In the form HEADS a head is a sublane, which an instruction names by a constant.
        if self.num_rows <= _UNROLLED_ROWS or self.form is PageForm.HEADS:
            for head in range(num_kv_heads):
                work(head)
        else:
            lax.fori_loop(0, num_kv_heads, lambda head, _: work(head), None)

    def begin(self, q_ref: Any) -> None:
        """Take the queries q_ref `[Q, N, H]`; nothing is seen yet."""
        state, rows = self.state, self.num_rows
        for head in range(state.num_kv_heads):
            for part, heads in self._parts(head):
                state.queries[head, part] = self._query_rows(q_ref, heads)
        shape = (state.num_kv_heads, rows, LANES)
        state.top[:, :rows] = jnp.full(shape, _UNSEEN, jnp.float32)
        state.total[:, :rows] = jnp.zeros(shape, jnp.float32)
        state.acc[:, :rows] = jnp.zeros((*shape[:2], state.acc.shape[2]), jnp.float32)

    def end(self, out_ref: Any, sinks_ref: Any) -> None:
        """Leave the results in out_ref `[Q, N, H]`; rows that saw no tile are zeros. Sinks: `[N, 128]` or None."""
        state = self.state
        for head in range(state.num_kv_heads):
            for part, heads in self._parts(head):
                total = state.total[head, part]
                if sinks_ref is not None:
                    total = with_sinks(total, state.top[head, part], sinks_ref[heads])
                # A row that sees something has a total of at least 1, the weight of its top score.
                total = _widen(jnp.maximum(total, 1.0), state.acc.shape[2])
                result = (state.acc[head, part] / total).astype(out_ref.dtype)
                if self.num_queries == 1:
                    out_ref[0, heads] = result
                else:
                    out_ref[:, heads.start] = result

    def _parts(self, head: int) -> list[tuple[slice, slice]]:
        """Pairs of the rows of a kv head and the query heads they hold."""
        first = head * self.num_groups
        if self.num_queries == 1:
            return [(slice(0, self.num_groups), slice(first, first + self.num_groups))]
        q = self.num_queries
        return [(slice(g * q, (g + 1) * q), slice(first + g, first + g + 1)) for g in range(self.num_groups)]

    def _query_rows(self, q_ref: Any, heads: slice) -> jax.Array:
        rows: jax.Array = q_ref[0, heads] if self.num_queries == 1 else q_ref[:, heads.start]
        return rows

    def add_tile(
        self, k_ref: Any, v_ref: Any, tile_start: jax.Array, kv_range: tuple[jax.Array, jax.Array], first: jax.Array
    ) -> None:
        """Add one KV tile; k_ref and v_ref are its pages `[pages, *form]`.

        `tile_start` is the position of its first token, `kv_range` the first and last position that any row sees, and
        `first` that of query 0. Places outside kv_range may hold anything.
        """
        columns = self._tile_tokens(k_ref)
        low, high = kv_range
        last_visible_to_all, first_visible_to_all = first, jnp.int32(0)
        if self.options.sliding_window is not None:
            first_visible_to_all = first + self.num_queries - self.options.sliding_window
        all_see_all = (tile_start + columns - 1 <= last_visible_to_all) & (tile_start >= first_visible_to_all)

        def with_mask() -> None:
            self._each_head(lambda head: self._add_head(head, k_ref, v_ref, (tile_start, low, high, first)))

        def without_mask() -> None:
            self._each_head(lambda head: self._add_head(head, k_ref, v_ref, None))

        lax.cond(all_see_all, without_mask, with_mask)

    def _add_head(self, head: Any, k_ref: Any, v_ref: Any, mask: tuple[jax.Array, ...] | None) -> None:
        state, options = self.state, self.options
        part = slice(0, self.num_rows)
        queries = state.queries[head, part]
        scores = self._scores(queries, k_ref[:, head].astype(queries.dtype)) * options.scale(queries.shape[1])
        values = v_ref[:, head].astype(queries.dtype)
        if options.logit_soft_cap is not None:
            scores = options.logit_soft_cap * jnp.tanh(scores / options.logit_soft_cap)
        if mask is not None:
            tile_start, low, high, first = mask
            scores = jnp.where(self._seen(scores.shape, tile_start, first), scores, _UNSEEN)
            values = self._clear_unused(values, low - tile_start, high - tile_start)
        old_top = state.top[head, part]
        top = jnp.maximum(old_top, jnp.max(scores, axis=1, keepdims=True))
        # A row that has seen nothing yet collects weights of 1 here; its first real score shrinks them to 0.
        weights = jnp.exp(scores - _widen(top, scores.shape[1]))
        shrink = jnp.exp(old_top - top)
        state.top[head, part] = top
        state.total[head, part] = state.total[head, part] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        acc = state.acc[head, part] * _widen(shrink, state.acc.shape[2])
        state.acc[head, part] = acc + self._weigh(weights.astype(values.dtype), values)

    def _tile_tokens(self, k_ref: Any) -> int:
        pages = int(k_ref.shape[0])
        return (
            pages if self.form is PageForm.HEADS else pages * int(k_ref.shape[2 if self.form is PageForm.ROWS else 3])
        )

    def _scores(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """The products of `[R, H]` with one head of the tile's keys, float32 `[R, tokens]`."""
        if self.form is PageForm.COLUMNS:
            return jnp.concatenate([_dot(queries, keys[page], 0) for page in range(keys.shape[0])], axis=1)
        return _dot(queries, keys.reshape(-1, keys.shape[-1]), 1)

    def _weigh(self, weights: jax.Array, values: jax.Array) -> jax.Array:
        """The products of `[R, tokens]` with one head of the tile's values, float32 `[R, H]`."""
        if self.form is PageForm.COLUMNS:
            size = values.shape[2]
            parts = [_dot(weights[:, p * size : (p + 1) * size], values[p], 1) for p in range(values.shape[0])]
            return sum(parts[1:], parts[0])
        return _dot(weights, values.reshape(-1, values.shape[-1]), 0)

    def _seen(self, shape: tuple[int, ...], tile_start: jax.Array, first: jax.Array) -> jax.Array:
        """`[R, tokens]`: whether the row's query sees the token."""
        position = first + lax.broadcasted_iota(jnp.int32, shape, 0) % self.num_queries
        kv_position = tile_start + lax.broadcasted_iota(jnp.int32, shape, 1)
        seen = kv_position <= position
        if self.options.sliding_window is not None:
            seen &= kv_position > position - self.options.sliding_window
        return seen

    def _clear_unused(self, values: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
        """Zeros for tokens outside low .. high of the tile: a weight of zero would not silence a NaN there."""
        pages = lax.broadcasted_iota(jnp.int32, values.shape, 0)
        if self.form is PageForm.HEADS:
            token = pages
        else:
            axis = 1 if self.form is PageForm.ROWS else 2
            token = pages * values.shape[axis] + lax.broadcasted_iota(jnp.int32, values.shape, axis)
        return jnp.where((token >= low) & (token <= high), values, jnp.zeros_like(values))


def _widen(x: jax.Array, num_columns: int) -> jax.Array:
    """`[R, 128]`, equal in all lanes, to `[R, num_columns]`."""
    if num_columns <= LANES:
        return x[:, :num_columns]
    return jnp.concatenate([x] * (num_columns // LANES), axis=1)


def _dot(a: jax.Array, b: jax.Array, axis_of_b: int) -> jax.Array:
    # float32 stays float32: the default would round it to bfloat16.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    contracted = (((1,), (axis_of_b,)), ((), ()))
    return lax.dot_general(a, b, contracted, precision=precision, preferred_element_type=jnp.float32)
