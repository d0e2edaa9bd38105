"""What a backend is: the ops with one typed signature each, and the reasons for which it refuses a call.

Owns the contract between the public functions and the platforms. Each platform's package has one `BACKEND`; `dispatch`
lists and chooses them. A backend gets checked arguments. It knows no scales, which `api` applies, but in
`rotate_and_store`.
"""

import dataclasses
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import jax
from jax.typing import DTypeLike

from pallas_kernels.delta_tokens import Heads, Sequences, Solved, SolvedByChannel, StateTokens
from pallas_kernels.experts import GatedUnit, Groups, UnitWeights
from pallas_kernels.grouped_tokens import GroupedCache
from pallas_kernels.latent import LatentHeads, LatentQkv
from pallas_kernels.norm import Addend
from pallas_kernels.options import AttentionOptions
from pallas_kernels.packed import PackedMatrix
from pallas_kernels.paged_kv import PagedKv
from pallas_kernels.qkv import FusedQkv
from pallas_kernels.routing import Router
from pallas_kernels.scaled import ScaledMatrix, ScaledRows
from pallas_kernels.token_index import IndexTiles


class Store(Protocol):
    """`store_kv` on one backend."""

    def __call__(self, kv: PagedKv, k: jax.Array, v: jax.Array, slots: jax.Array, interpret: bool) -> PagedKv:
        """Tokens k and v `[T, K, H]` of the cache's dtype at slots `[T]`; returns the changed cache."""
        ...


class RotateAndStore(Protocol):
    """`rotate_and_store` on one backend."""

    def __call__(self, qkv: FusedQkv, kv: PagedKv, slots: jax.Array, interpret: bool) -> tuple[jax.Array, PagedKv]:
        """Stores K and V at slots `[T]`, over the cache's scales; returns queries `[T, N, H]` and the cache."""
        ...


class AbsorbAndStore(Protocol):
    """`absorb_and_store` on one backend."""

    def __call__(
        self, qkv: LatentQkv, pages: jax.Array, slots: jax.Array, interpret: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Stores entries at slots `[T]`; returns queries `[T, N, H]` and the pages; H as `api.stores` says."""
        ...


class Decode(Protocol):
    """`paged_decode_attention` on one backend."""

    def __call__(
        self, q: jax.Array, kv: PagedKv, sinks: jax.Array | None, options: AttentionOptions, interpret: bool
    ) -> jax.Array:
        """Queries `[S, N, H]`, one per sequence, and sinks `[N]`; returns `[S, N, H]` in q's dtype."""
        ...


class DecodeLatents(Protocol):
    """`decode_latents` on one backend."""

    def __call__(
        self, q: jax.Array, kv: PagedKv, heads: LatentHeads, options: AttentionOptions, interpret: bool
    ) -> jax.Array:
        """Queries `[S, N, H]`, one per sequence; returns each head's output `[S, N, V]` in q's dtype."""
        ...


class Extend(Protocol):
    """`paged_extend_attention` on one backend."""

    def __call__(
        self,
        q: jax.Array,
        query_offsets: jax.Array,
        kv: PagedKv,
        sinks: jax.Array | None,
        options: AttentionOptions,
        interpret: bool,
    ) -> jax.Array:
        """Ragged queries `[T, N, H]` at offsets `[S + 1]`, and sinks `[N]`; returns `[T, N, H]` in q's dtype."""
        ...


class ExtendAhead(Protocol):
    """`paged_extend_attention` with `seen` on one backend."""

    def __call__(
        self,
        q: jax.Array,
        query_offsets: jax.Array,
        kv: PagedKv,
        sinks: jax.Array | None,
        options: AttentionOptions,
        interpret: bool,
        seen: jax.Array,
    ) -> jax.Array:
        """The same; `seen [T]`: of how many of its sequence's tokens, from the first, each query sees none after."""
        ...


class ExtendBiased(Protocol):
    """`paged_extend_attention` with `biases` on one backend."""

    def __call__(
        self,
        q: jax.Array,
        query_offsets: jax.Array,
        kv: PagedKv,
        sinks: jax.Array | None,
        options: AttentionOptions,
        interpret: bool,
        seen: jax.Array | None,
        biases: jax.Array,
    ) -> jax.Array:
        """The same with or without `seen`; `biases [N, 2 B + 1]` are added to scores, by the distance of the key."""
        ...


class AttendToChosen(Protocol):
    """`attend_to_chosen` on one backend."""

    def __call__(
        self,
        q: jax.Array,
        chosen: jax.Array,
        query_offsets: jax.Array,
        kv: PagedKv,
        options: AttentionOptions,
        interpret: bool,
    ) -> jax.Array:
        """Queries `[T, N, H]` at offsets `[S + 1]`, positions `[T, k]`; returns `[T, N, value_dim or more]`."""
        ...


class AttendToGroups(Protocol):
    """The attention of `attend_to_groups` on one backend."""

    def __call__(
        self,
        q: jax.Array,
        chosen: jax.Array | None,
        query_offsets: jax.Array,
        cache: GroupedCache,
        size: int,
        sinks: jax.Array | None,
        options: AttentionOptions,
        interpret: bool,
    ) -> jax.Array:
        """Queries `[T, N, H]` at offsets `[S + 1]`, whose tokens are stored; returns `[T, N, H]` in q's dtype.

        `chosen [T, k]` are numbers of groups of `size` tokens, no more than have ended, then -1; None: all that have
        ended are attended to, if the cache has any.
        """
        ...


class ScoreTokens(Protocol):
    """The scores of `choose_tokens` on one backend, and the choice by them."""

    def __call__(self, tiles: IndexTiles, kv: PagedKv, first: int, count: int, interpret: bool) -> jax.Array:
        """`[n, queries, count]` int32 positions of the best scores, by keys from number `first` of an entry on.

        They come in any order; -1 follows where a query sees fewer.
        """
        ...


class StoreAndDecode(Protocol):
    """`store_and_decode` on one backend."""

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kv: PagedKv,
        slots: jax.Array,
        sinks: jax.Array | None,
        options: AttentionOptions,
        interpret: bool,
    ) -> tuple[jax.Array, PagedKv]:
        """Queries `[S, N, H]` of newest tokens; their k and v `[S, K, H]` of the cache's dtype, for slots `[S]`; sinks
        `[N]`. Returns `[S, N, H]` in q's dtype and the changed cache."""
        ...


class AddAndNorm(Protocol):
    """`add_and_norm` on one backend."""

    def __call__(
        self,
        x: jax.Array,
        update: Addend,
        scales: jax.Array,
        row: int,
        eps: float,
        biases: jax.Array | None,
        in_float8: bool,
        interpret: bool,
    ) -> tuple[jax.Array, jax.Array | ScaledRows]:
        """x `[T, D]` plus the update `[T, D]`, or what `norm.sum_parts` makes of it; the sum and its norm, `[T, D]`.

        With `in_float8` the norm is rounded.
        """
        ...


class GroupedProduct(Protocol):
    """`grouped_product` on one backend."""

    def __call__(self, x: jax.Array, groups: Groups, weights: jax.Array, of_tokens: bool, interpret: bool) -> jax.Array:
        """x `[T, in]` with `of_tokens`, else `[M, in]`, times weights `[E, out, in]`; `[M, out]` in `result_dtype`."""
        ...


class GroupedPackedProduct(Protocol):
    """`grouped_packed_product` on one backend."""

    def __call__(
        self,
        x: jax.Array,
        groups: Groups,
        weights: PackedMatrix,
        bias: jax.Array | None,
        of_tokens: bool,
        dtype: str,
        row_bits: int,
        interpret: bool,
    ) -> jax.Array:
        """As `GroupedProduct`, with packed weights and biases `[E, out]`; `[M, out]` in x's dtype."""
        ...


class GroupedScaledProduct(Protocol):
    """`grouped_scaled_product` on one backend."""

    def __call__(
        self, x: jax.Array, groups: Groups, weights: ScaledMatrix, of_tokens: bool, interpret: bool
    ) -> jax.Array:
        """As `GroupedProduct`, with weights of numbers and scales; `[M, out]` in x's dtype."""
        ...


class GatedPackedProduct(Protocol):
    """`gated_packed_product` on one backend."""

    def __call__(
        self,
        x: jax.Array,
        groups: Groups,
        weights: PackedMatrix,
        bias: jax.Array | None,
        unit: GatedUnit,
        of_tokens: bool,
        interpret: bool,
    ) -> jax.Array:
        """As `GatedProduct`, with packed weights `[E, 2 F, in]` and biases `[E, 2 F]`; `[M, F]` in x's dtype."""
        ...


class GatedProduct(Protocol):
    """`gated_product` on one backend."""

    def __call__(
        self, x: jax.Array, groups: Groups, weights: jax.Array, activation: str, of_tokens: bool, interpret: bool
    ) -> jax.Array:
        """As `GroupedProduct`, with weights `[E, U F, in]`: the gate's, then what it multiplies; `[M, F]`."""
        ...


class ProductsWithShared(Protocol):
    """`products_with_shared` on one backend."""

    def __call__(
        self,
        x: jax.Array,
        groups: Groups,
        experts: UnitWeights,
        shared: UnitWeights,
        activation: str,
        interpret: bool,
    ) -> jax.Array:
        """x `[T, in]`, groups of E + n experts of which `shared` are the last n; `[M, out]`."""
        ...


class ChooseExperts(Protocol):
    """`choose_experts` on one backend."""

    def __call__(
        self,
        router: Router,
        logits: jax.Array,
        choice_bias: jax.Array | None,
        shared_logits: jax.Array | None,
        logit_bias: jax.Array | None,
        interpret: bool,
    ) -> tuple[jax.Array, jax.Array]:
        """logits `[T, E]` or parts `[P, T, E]`, biases `[E]`, shared_logits `[T]`; experts `[T, k]` int32 and shares
        float32, with those of the shared experts."""
        ...


class GroupByExpert(Protocol):
    """`group_by_expert` on one backend."""

    def __call__(self, experts: jax.Array, num_experts: int, is_token: jax.Array | None, interpret: bool) -> Groups:
        """experts `[T, k]` int32, is_token `[T]`."""
        ...


class QuantizedProduct(Protocol):
    """`quantized_product` on one backend."""

    def __call__(
        self, x: jax.Array, weights: ScaledMatrix | PackedMatrix, dtype: DTypeLike, in_parts: bool, interpret: bool
    ) -> jax.Array:
        """x `[T, I]` times the weights: `[T, O]` in `dtype`; with `in_parts` it may be `[P, T, O]` float32, parts."""
        ...


class Float8Rows(Protocol):
    """`float8_rows` on one backend."""

    def __call__(self, x: jax.Array, activation: str | None, interpret: bool) -> ScaledRows:
        """x `[T, I]`, or with an activation `[T, 2, I]`: gates, and what they multiply."""
        ...


class Float8Product(Protocol):
    """`float8_product` on one backend."""

    def __call__(
        self, rows: ScaledRows, weights: ScaledMatrix, dtype: DTypeLike, in_parts: bool, interpret: bool
    ) -> jax.Array:
        """`[T, I]` times the weights: `[T, O]` in `dtype`; with `in_parts` it may be `[P, T, O]` float32, parts."""
        ...


class GroupedFloat8Product(Protocol):
    """`grouped_float8_product` on one backend."""

    def __call__(
        self, rows: ScaledRows, groups: Groups, weights: ScaledMatrix, of_tokens: bool, interpret: bool
    ) -> jax.Array:
        """Rows `[T, in]` with `of_tokens`, else `[M, in]`, times weights `[E, out, in]`; `[M, out]`."""
        ...


class OrderedProduct(Protocol):
    """`ordered_product` on one backend."""

    def __call__(
        self, x: jax.Array, weights: jax.Array, dtype: DTypeLike, in_parts: bool, interpret: bool
    ) -> jax.Array:
        """x `[T, I]`, rounded to the weights' dtype, times weights `[O, I]`: `[T, O]` in `dtype`; with `in_parts` it
        may be `[P, T, O]` float32, parts to be added in their order."""
        ...


class DeltaDecode(Protocol):
    """The delta rule, or that of Mamba-2, for one token of each sequence, on one backend."""

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        decay: jax.Array,
        beta: jax.Array,
        matrices: jax.Array,
        place: jax.Array,
        has_state: jax.Array,
        kept_to: jax.Array,
        corrects: bool,
        interpret: bool,
    ) -> tuple[jax.Array, jax.Array]:
        """q and k `[S, K, h]`, v `[S, K, r, v]`, decay and beta `[S, K, r]`, states `[P, K, r, h, v]`, all float32; the
        decay may be `[S, K, r, h]`, of each row of a state.

        Returns what is read, as v, and the states: those at place `[S]` (zeros unless has_state `[S]`) after the token,
        also at kept_to `[S]` where that is not -1. What a state writes is v less what it reads at k if that `corrects`.
        """
        ...


class DeltaBlocks(Protocol):
    """Blocks of 64 tokens of each sequence, one after the other, on one backend."""

    def __call__(
        self,
        heads: Heads | None,
        solved: Solved | SolvedByChannel | None,
        matrices: jax.Array,
        read: jax.Array,
        seqs: Sequences,
        counts: jax.Array,
        interpret: bool,
    ) -> tuple[jax.Array, jax.Array]:
        """All tokens' heads with 64 before and after them; states `[P, K, r, h, v]`; counts `[S]` of tokens.

        q, k and v are in the dtype that factors of products may be rounded to, the rest is float32, log a `[.., K, r]`.
        Returns `read [64 + T + 64, K, r, v]` with the rows of these tokens, and the states after them, also as
        `seqs.kept_to` says.
        `solved` is given if the rule corrects, its keys in that dtype. Where each row of a state decays by itself, no
        heads are given, and in it values and decays alone are float32.
        """
        ...


class DeltaScan(Protocol):
    """The delta rule, or that of Mamba-2, for all tokens of each sequence, one after the other, on one backend."""

    def __call__(
        self, tokens: StateTokens, matrices: jax.Array, inputs: jax.Array, seqs: Sequences, interpret: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What `delta_extend` returns, with the states as `delta.DeltaStates` has them."""
        ...


class DeltaRun(Protocol):
    """Runs of a few tokens of each sequence, from a layer's product to what goes into the next one, on one backend."""

    def __call__(
        self, tokens: StateTokens, matrices: jax.Array, inputs: jax.Array, seqs: Sequences, interpret: bool
    ) -> tuple[jax.Array, jax.Array]:
        """`[T, K, r, v]` of what is read, gated, as `DeltaStep` returns it, and the states of matrices.

        The product is in one part. A state whose place is -1 goes nowhere; inputs are only read. Of Mamba a prompt is
        such a run, too.
        """
        ...


class Convolve(Protocol):
    """A convolution of a few tokens for all tokens of each sequence, on one backend."""

    def __call__(
        self, mixed: jax.Array, taps: jax.Array, inputs: jax.Array, seqs: Sequences, interpret: bool
    ) -> tuple[jax.Array, jax.Array]:
        """What `convolution.convolve_extend` returns, of `mixed [T, K, C]` float32."""
        ...


class DeltaStep(Protocol):
    """`delta_decode` on one backend: from a layer's product to what goes into the next one."""

    def __call__(
        self,
        tokens: StateTokens,
        matrices: jax.Array,
        inputs: jax.Array,
        positions: jax.Array,
        place: jax.Array,
        kept_to: jax.Array,
        interpret: bool,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """tokens at `positions [S]`, one of each sequence; states as in `delta.DeltaStates`.

        Returns `[S, K, r, v]` of what is read, gated, which `tokens.finished` takes: of a delta-net in its dtype and
        normalized, of Mamba-2 float32; and the states: those at place `[S]` after the token, also at kept_to `[S]`
        where that is not -1.
        """
        ...


def refuse_nothing(*_arguments: object) -> str | None:
    """The refusal of a backend that takes every call."""
    return None


RunT = TypeVar("RunT")


@dataclasses.dataclass(frozen=True)
class Kernel(Generic[RunT]):
    """One op on one backend.

    Attributes:
        run: computes it.
        refuse: says why a call is impossible, in words, or None. It gets the arrays of the call that decide, as the
            public function names them.
    """

    run: RunT
    refuse: Callable[..., str | None] = refuse_nothing


@dataclasses.dataclass(frozen=True)
class Backend:
    """The kernels of one platform."""

    name: str
    """The name that `backend=` and the tuning tables use."""
    decode: Kernel[Decode]
    extend: Kernel[Extend]
    store: Kernel[Store] | None = None
    """None where the backend has attention only."""
    rotate_and_store: Kernel[RotateAndStore] | None = None
    """None where XLA splits, normalizes and rotates before a store."""
    add_and_norm: Kernel[AddAndNorm] | None = None
    """None where XLA does it."""
    grouped_product: Kernel[GroupedProduct] | None = None
    """None where XLA multiplies tile by tile."""
    quantized_product: Kernel[QuantizedProduct] | None = None
    """None where XLA widens the weights."""
    gated_product: Kernel[GatedProduct] | None = None
    """None where XLA computes the gated unit after a `grouped_product`."""
    choose_experts: Kernel[ChooseExperts] | None = None
    """None where XLA scores, ranks and normalizes."""
    group_by_expert: Kernel[GroupByExpert] | None = None
    """None where XLA sorts."""
    float8_rows: Kernel[Float8Rows] | None = None
    float8_product: Kernel[Float8Product] | None = None
    grouped_float8_product: Kernel[GroupedFloat8Product] | None = None
    """None, all three, where activations keep their format."""
    store_and_decode: Kernel[StoreAndDecode] | None = None
    """None where a store comes first."""
    ordered_product: Kernel[OrderedProduct] | None = None
    """None where the order of sums depends on the number of rows."""
    products_with_shared: Kernel[ProductsWithShared] | None = None
    """None where shared experts are an MLP of their own."""
    grouped_packed_product: Kernel[GroupedPackedProduct] | None = None
    """None where weights are not kept packed."""
    grouped_scaled_product: Kernel[GroupedScaledProduct] | None = None
    """None where experts in groups are widened, packed, or meet rows in float8."""
    gated_packed_product: Kernel[GatedPackedProduct] | None = None
    """None where XLA computes the gated unit after a `grouped_packed_product`."""
    delta_decode: Kernel[DeltaDecode] | None = None
    delta_step: Kernel[DeltaStep] | None = None
    """None, both, where XLA gathers states and scatters them."""
    delta_blocks: Kernel[DeltaBlocks] | None = None
    """None where XLA loops over blocks. It takes what `delta_decode` takes."""
    delta_run: Kernel[DeltaRun] | None = None
    """None where runs are blocks. It takes what `delta_decode` takes."""
    delta_scan: Kernel[DeltaScan] | None = None
    """In the place of all three, of decodes and prompts."""
    convolve: Kernel[Convolve] | None = None
    """None where XLA convolves, for layers that do nothing else."""
    absorb_and_store: Kernel[AbsorbAndStore] | None = None
    """None where XLA makes queries and entries of latents, and stores."""
    decode_latents: Kernel[DecodeLatents] | None = None
    """None where XLA multiplies what a `decode` over latents returns."""
    extend_ahead: Kernel[ExtendAhead] | None = None
    """None where no query sees what comes after it."""
    extend_biased: Kernel[ExtendBiased] | None = None
    """None where scores have no biases by distance."""
    attend_to_chosen: Kernel[AttendToChosen] | None = None
    """None where XLA gathers what is chosen."""
    attend_to_groups: Kernel[AttendToGroups] | None = None
    """None where XLA gathers windows and entries of groups."""
    score_tokens: Kernel[ScoreTokens] | None = None
    """None where XLA scores what an index chooses from."""
    cuts_entries: bool = False
    """Whether its attention takes queries of fewer numbers than an entry of the cache has, as `api.attention` does."""
    platform: str | None = None
    """The only platform it runs on, "cpu", "gpu" or "tpu"; None is any."""
    has_interpreter: bool = False
    """Whether `interpret=True` runs it on other platforms too; the backends without one ignore `interpret`."""
