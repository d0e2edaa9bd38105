"""Attention of a step's layers over the KV pages: each layer stores what is new in its pages, then attends to all.

Called by `step`, and by what drafts, with its own layers. Knows where a step's tokens lie and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxsgl.batch.inputs import StepKind
from jaxsgl.engine.state import KvBuffers
from jaxsgl.models.layers import Qkv, Queries
from jaxsgl.models.tensor_parallel import num_parts, of_this_part
from jaxsgl.weights import KvScales
from pallas_kernels import (
    AttentionOptions,
    GroupedCache,
    GroupedQkv,
    KernelChoice,
    LatentQkv,
    PagedKv,
    absorb_and_store,
    attend_to_chosen,
    attend_to_groups,
    choose_tokens,
    decode_latents,
    paged_decode_attention,
    paged_extend_attention,
    rotate_and_store,
    sees_ahead,
    store_and_decode,
    store_entries,
)
from pallas_kernels.choice import AUTO
from pallas_kernels.paged_kv import Scale


class Places(Protocol):
    """Where a step's tokens lie; fields of `StepArrays`."""

    @property
    def slots(self) -> jax.Array:
        """`[T]` where each token's K and V go."""
        ...

    @property
    def lengths(self) -> jax.Array:
        """`[S]` KV tokens of each sequence, the step's included."""
        ...

    @property
    def query_offsets(self) -> jax.Array:
        """`[S + 1]` which tokens are whose."""
        ...

    @property
    def positions(self) -> jax.Array:
        """`[T]` of the tokens in their sequences."""
        ...

    @property
    def seen(self) -> jax.Array | None:
        """`[T]` how many tokens of its sequence each token sees, from the first on; None: those up to itself."""
        ...


class Pages:
    """The KV pages during one trace: each layer that has some replaces its pair, so that XLA sees one in-place update
    per buffer.

    The scales of a float8 cache are constants of the program. XLA multiplies queries and outputs by them where it
    computes or reads these anyway.
    """

    def __init__(
        self,
        kv: KvBuffers,
        page_table_SP: jax.Array,
        places: Places,
        kind: StepKind,
        options: Sequence[AttentionOptions],
        kernels: KernelChoice,
        scales: KvScales | None = None,
        biases: jax.Array | None = None,
        chooses: bool = False,
    ) -> None:
        """`biases` are those of `paged_extend_attention`, the same for all layers; `chooses` is that of `Bucket`."""
        self._k, self._v = list(kv.k), list(kv.v)  # no values where layers keep latents
        self._groups, self._sums = list(kv.groups), list(kv.sums)  # of layers that have groups of tokens, in order
        self._next_group = 0
        self._page_table = page_table_SP
        self._places, self._kind, self._options, self._kernels = places, kind, options, kernels
        self._biases, self._chooses = biases, chooses
        self._scales = scales or KvScales.of_one(len(kv.k))
        self._seen_in: dict[int | None, jax.Array | None] = {}  # by windows on both sides
        self._chosen: jax.Array | None = None  # positions `[T, k]` that the last index chose

    def attend(self, place: int, qkv: Qkv | Queries, sinks: jax.Array | None = None) -> jax.Array:
        """Stores this step's K and V of the layer, then attends to all K and V of each sequence; `[T, N, H]`."""
        if isinstance(qkv, GroupedQkv):
            return self._attend_to_groups(place, qkv, sinks)
        if isinstance(qkv, LatentQkv | Queries):
            return self._attend_latent(place, qkv) if isinstance(qkv, LatentQkv) else self._attend_to_stored(place, qkv)
        a, kernels, head_dim = self._places, self._kernels, qkv.head_dim
        options = self._options[place].for_heads(head_dim)
        paged = self._paged(place)
        if self._kind == "decode":
            out_TNH, kv = store_and_decode(
                qkv, paged, a.slots, options, sinks, backend=kernels.store_and_decode, parts=kernels
            )
        else:
            q_TNH, kv = rotate_and_store(
                qkv, paged, a.slots, backend=kernels.rotate_and_store, store_backend=kernels.store_kv
            )
            out_TNH = self._extend(q_TNH, kv, options, sinks)
        self._k[place], self._v[place] = kv.k, kv.v
        return kv.kept(qkv.num_kv_heads).own_numbers(out_TNH, head_dim)

    def _extend(
        self, q_TNH: jax.Array, kv: PagedKv, options: AttentionOptions, sinks: jax.Array | None = None
    ) -> jax.Array:
        """Attention of an extend; where the layer sees ahead, by a kernel that can."""
        a, backend = self._places, self._kernels.paged_extend_attention
        seen = self._seen(options.sliding_window if options.symmetric else None) if options.sees_ahead else None
        if seen is not None and not sees_ahead(backend):
            backend = AUTO
        return paged_extend_attention(
            q_TNH, a.query_offsets, kv, options, sinks, seen, biases=self._biases, backend=backend
        )

    def _seen(self, window: int | None) -> jax.Array | None:
        """`[T]` how many tokens each token sees, at most `window` from itself on; made once for all layers."""
        if window not in self._seen_in:
            seen, positions = self._places.seen, self._places.positions
            self._seen_in[window] = seen if seen is None or window is None else jnp.minimum(seen, positions + window)
        return self._seen_in[window]

    def _paged(self, place: int) -> PagedKv:
        scales = _of_heads(self._scales.k[place]), _of_heads(self._scales.v[place])
        return PagedKv(self._k[place], self._v[place], self._page_table, self._places.lengths, *scales)

    def _attend_to_stored(self, place: int, queries: Queries) -> jax.Array:
        """Attends to all K and V of each sequence that the layer at `place` has stored, this step's included."""
        kernels, head_dim = self._kernels, queries.head_dim
        options = self._options[place].for_heads(head_dim)
        kv = self._paged(place)
        kept = kv.kept(queries.num_kv_heads)
        q_TNH = kept.queries(queries.heads)
        if self._kind == "decode":
            out_TNH = paged_decode_attention(q_TNH, kv, options, backend=kernels.paged_decode_attention)
        else:
            out_TNH = self._extend(q_TNH, kv, options)
        return kept.own_numbers(out_TNH, head_dim)

    def _attend_to_groups(self, place: int, qkv: GroupedQkv, sinks: jax.Array | None) -> jax.Array:
        """The same over a window and entries of groups of tokens."""
        a, kernels = self._places, self._kernels
        offsets = None if self._kind == "decode" else a.query_offsets
        own: tuple[jax.Array | None, jax.Array | None] = (None, None)
        if qkv.groups is not None:
            own = self._groups[self._next_group], self._sums[self._next_group]
        cache = GroupedCache(self._k[place], *own, self._page_table, a.lengths)
        options = self._options[place].for_heads(qkv.queries.shape[2])
        out_TNH, cache = attend_to_groups(
            qkv, cache, a.slots, offsets, options, sinks,
            chooses=self._chooses, backend=kernels.attend_to_groups, index_backend=kernels.score_tokens,
        )  # fmt: skip
        self._k[place] = cache.tokens
        if cache.groups is not None and cache.sums is not None:
            self._groups[self._next_group], self._sums[self._next_group] = cache.groups, cache.sums
            self._next_group += 1
        return out_TNH

    def _attend_latent(self, place: int, qkv: LatentQkv) -> jax.Array:
        """The same over entries, whose values are a part of themselves; `[T, N, V]`, each head's output."""
        a, kernels = self._places, self._kernels
        options = self._options[place].for_heads(qkv.head_dim)
        q_TNH, pages = absorb_and_store(qkv, self._k[place], a.slots, backend=kernels.rotate_and_store)
        self._k[place] = pages
        kv = PagedKv(pages, pages, self._page_table, a.lengths)
        if qkv.num_chosen and self._chooses:
            return qkv.heads.outputs(self._read_chosen(q_TNH, qkv, kv, options))
        if self._kind == "decode":
            return decode_latents(q_TNH, kv, qkv.heads, options, backend=kernels.paged_decode_attention)
        return qkv.heads.outputs(self._extend(q_TNH, kv, options))

    def _read_chosen(self, q_TNH: jax.Array, qkv: LatentQkv, kv: PagedKv, options: AttentionOptions) -> jax.Array:
        """What heads read of the tokens that an index chooses: the layer's own, or else the last one before it."""
        kernels, offsets = self._kernels, self._places.query_offsets
        if self._kind == "decode":
            offsets = jnp.arange(qkv.num_tokens + 1, dtype=jnp.int32)
        if qkv.index is not None:
            self._chosen = choose_tokens(
                qkv.index, offsets, kv, qkv.head_dim, qkv.num_chosen, backend=kernels.score_tokens
            )
        assert self._chosen is not None, "the first layer has an index"
        return attend_to_chosen(q_TNH, self._chosen, offsets, kv, options, backend=kernels.attend_to_chosen)

    def store(self, place: int, qkv: Qkv | Queries, sinks: jax.Array | None = None) -> jax.Array:
        """Stores this step's K and V of the layer, and attends to nothing: zeros, of `attend`'s shape."""
        a, kernels = self._places, self._kernels
        assert not isinstance(qkv, Queries | GroupedQkv), "layers that draft store keys of their own"
        if isinstance(qkv, LatentQkv):
            self._k[place] = store_entries(self._k[place], qkv.entries, a.slots)
            return jnp.zeros((qkv.num_tokens, qkv.heads.num_heads, qkv.heads.num_outputs), qkv.dtype)
        paged = PagedKv(self._k[place], self._v[place], self._page_table, a.lengths)
        q_TNH, kv = rotate_and_store(
            qkv, paged, a.slots, backend=kernels.rotate_and_store, store_backend=kernels.store_kv
        )
        self._k[place], self._v[place] = kv.k, kv.v
        return jnp.zeros((*q_TNH.shape[:2], qkv.head_dim), q_TNH.dtype)

    def buffers(self) -> KvBuffers:
        """The pages as the layers left them."""
        return KvBuffers(*map(tuple, (self._k, self._v, self._groups, self._sums)))


def _of_heads(scale: Scale) -> Scale:
    """A scale of the cache, or the scales of this device's kv heads."""
    if scale is None or np.ndim(scale) == 0 or num_parts() == 1:
        return scale
    return of_this_part(jnp.asarray(scale))
