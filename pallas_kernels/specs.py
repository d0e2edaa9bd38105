"""Named shapes of the ops' arguments, shared by tests and benchmarks.

Owns which shapes are worth checking and measuring. Never knows backends, or contents: lengths and page ids are chosen
where arrays are filled.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from pallas_kernels import packed
from pallas_kernels.api.attention import (
    decode_latents,
    paged_decode_attention,
    paged_extend_attention,
    store_and_decode,
)
from pallas_kernels.api.chosen import attend_to_chosen, choose_tokens
from pallas_kernels.api.grouped import attend_to_stored_groups
from pallas_kernels.api.products import float8_product, float8_rows, quantized_product
from pallas_kernels.api.stores import absorb_and_store, rotate_and_store, store_kv
from pallas_kernels.grouped_tokens import GroupedCache
from pallas_kernels.latent import LatentHeads, LatentQkv
from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import BITS, FLOAT8, FLOAT8_BITS, PagedKv
from pallas_kernels.qkv import FusedQkv
from pallas_kernels.scaled import ScaledMatrix
from pallas_kernels.token_index import TokenIndex

# Function, arguments as shapes, and keyword arguments.
_Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class ArgSpec:
    """The static side of a call: shapes, dtype and options. Letters as in the ops' docstrings."""

    name: str
    num_seqs: int
    """S."""
    num_tokens: int
    """T of an extend; in a decode, T is S."""
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
    float8_cache: bool = False
    """Whether the cache holds float8_e4m3fn, with one scale for K and one per head for V."""
    bits_cache: bool = False
    """Whether the cache holds the bits of bfloat16 or float8 numbers, as the engine's does on a CPU."""
    sm_scale: float | None = None
    has_sinks: bool = False
    """Whether query heads have attention sinks."""
    value_dim: int | None = None
    """How many of the first numbers of a key are its value, for attention over a latent."""
    num_absorbing: int | None = None
    """D of a latent's heads; None, as for V: a fourth of the latent's size."""
    num_outputs: int | None = None
    """V of a latent's heads."""
    kept_head_dim: int | None = None
    """The cache's H, if it keeps zeros after the numbers of a head; queries of attention have it too."""
    index_size: int = 0
    """Numbers that the cache has after these, of the key of an index."""

    @property
    def width(self) -> int:
        """H of queries and keys."""
        return self.kept_head_dim or self.head_dim

    @property
    def cache_dtype(self) -> Any:
        """What the pages hold."""
        if self.float8_cache:
            return FLOAT8_BITS if self.bits_cache else FLOAT8
        return BITS if self.bits_cache else self.dtype

    @property
    def scales(self) -> dict[str, Any]:
        """k_scale and v_scale of a `PagedKv`; none for a cache of full width."""
        if not self.float8_cache:
            return {}
        return {"k_scale": 0.02, "v_scale": 0.01 * jnp.arange(1, self.num_kv_heads + 1, dtype=jnp.float32)}

    @property
    def max_len(self) -> int:
        """The most tokens that a sequence can have."""
        return self.pages_per_seq * self.page_size

    @property
    def num_pages(self) -> int:
        """Pages of the cache: one for every entry of the page table, and the dummy page."""
        return 1 + self.num_seqs * self.pages_per_seq

    @property
    def options(self) -> AttentionOptions:
        """The options of the attention ops."""
        options = AttentionOptions(self.sm_scale, self.sliding_window, self.logit_soft_cap, self.value_dim)
        return options.for_heads(self.head_dim) if self.kept_head_dim else options

    @property
    def attention(self) -> dict[str, Any]:
        """Options and sinks of the attention ops; sinks from far below the scores of random queries to far above."""
        num_heads = self.num_kv_heads * self.num_groups
        sinks = 12 * jnp.sin(jnp.arange(1, num_heads + 1, dtype=jnp.float32)) if self.has_sinks else None
        return {"options": self.options, "sinks": sinks}

    def paged_kv(self) -> PagedKv:
        """The cache, its page table and lengths as shapes."""
        shape = (self.num_pages, self.num_kv_heads, self.page_size, self.width + self.index_size)
        pages: Any = jax.ShapeDtypeStruct(shape, self.cache_dtype)
        scales: dict[str, Any] = {
            name: jax.ShapeDtypeStruct(jnp.shape(scale), jnp.float32) for name, scale in self.scales.items()
        }
        table: Any = _int32(self.num_seqs, self.pages_per_seq)
        lengths: Any = _int32(self.num_seqs)
        return PagedKv(pages, pages, table, lengths, **scales)

    def _queries(self, num_tokens: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_tokens, self.num_kv_heads * self.num_groups, self.width), self.dtype)

    def store_args(self) -> tuple[Any, ...]:
        """kv, k, v, slots of `store_kv`, as shapes."""
        new = jax.ShapeDtypeStruct((self.num_tokens, self.num_kv_heads, self.head_dim), self.dtype)
        return self.paged_kv(), new, new, _int32(self.num_tokens)

    def rotate_and_store_args(self, num_layers: int = 2, *, norms: bool = True, bias: bool = True) -> tuple[Any, ...]:
        """kv, qkv and slots of `rotate_and_store`, as shapes; the cache first, as for a store."""
        heads = (self.num_kv_heads, self.num_groups + 2, self.head_dim)

        def array(*shape: int, dtype: Any = self.dtype) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype)

        table, norm = array(self.num_tokens, 1, self.head_dim // 2, dtype=jnp.float32), array(num_layers, self.head_dim)
        qkv = FusedQkv(
            product=array(self.num_tokens, *heads), cos=table, sin=table,
            bias=array(num_layers, *heads) if bias else None,
            q_norm=norm if norms else None, k_norm=norm if norms else None, layer=num_layers - 1,
        )  # fmt: skip
        return self.paged_kv(), qkv, _int32(self.num_tokens)

    def store_and_decode_args(self) -> tuple[Any, ...]:
        """kv, qkv and slots of `store_and_decode`, as shapes; the cache first, as for a store."""
        return dataclasses.replace(self, num_tokens=self.num_seqs).rotate_and_store_args()

    def decode_args(self) -> tuple[Any, ...]:
        """q and kv of `paged_decode_attention`, as shapes."""
        return self._queries(self.num_seqs), self.paged_kv()

    def extend_args(self) -> tuple[Any, ...]:
        """q, query_offsets and kv of `paged_extend_attention`, as shapes."""
        return self._queries(self.num_tokens), _int32(self.num_seqs + 1), self.paged_kv()

    def chosen_args(self, num_tokens: int) -> tuple[Any, ...]:
        """q, chosen, query_offsets and kv of `attend_to_chosen`, as shapes: half of the longest sequence is chosen."""
        chosen = _int32(num_tokens, self.max_len // 2)
        return self._queries(num_tokens), chosen, _int32(self.num_seqs + 1), self.paged_kv()

    def choice_args(self, num_tokens: int) -> tuple[Any, ...]:
        """index, query_offsets and kv of `choose_tokens`, as shapes; the index has up to 64 heads."""
        heads = min(64, 4 * self.num_groups)
        queries: Any = jax.ShapeDtypeStruct((num_tokens, heads, self.index_size), self.dtype)
        weights: Any = jax.ShapeDtypeStruct((num_tokens, heads), jnp.float32)
        keys: Any = jax.ShapeDtypeStruct((num_tokens, self.index_size), self.dtype)
        return TokenIndex(queries, weights, keys), _int32(self.num_seqs + 1), self.paged_kv()

    def latent_heads(self) -> LatentHeads:
        """The matrices of a layer with a latent, as shapes."""
        assert self.value_dim is not None
        absorbing, outputs = (each or max(16, self.value_dim // 4) for each in (self.num_absorbing, self.num_outputs))
        weights: Any = jax.ShapeDtypeStruct((self.num_groups, absorbing + outputs, self.value_dim), self.dtype)
        return LatentHeads(weights, absorbing)

    def store_latents_args(self) -> tuple[Any, ...]:
        """pages, qkv and slots of `absorb_and_store` in a decode, as shapes; one product in four parts makes all."""
        assert self.value_dim is not None
        heads, num_rotated = self.latent_heads(), self.head_dim - self.value_dim
        width = heads.num_heads * (heads.num_absorbing + num_rotated) + self.head_dim
        table: Any = jax.ShapeDtypeStruct((self.num_seqs, 1, num_rotated // 2), jnp.float32)
        product: Any = jax.ShapeDtypeStruct((4, self.num_seqs, width), jnp.float32)
        scales: Any = jax.ShapeDtypeStruct((self.value_dim,), self.dtype)
        qkv = LatentQkv(product, None, scales, heads, table, table, 1e-6, jnp.dtype(self.dtype))
        return self.paged_kv().k, qkv, _int32(self.num_seqs)

    def calls(self) -> tuple[_Call, ...]:
        """Both stores, decode and extend with this spec: function, arguments as shapes, and keyword arguments.

        Of a latent its store, its decode with and without outputs, and extend; with an index a choice and attention to
        what is chosen in place of the store, which is XLA's.
        """
        attention: tuple[_Call, ...] = (
            (paged_decode_attention, self.decode_args(), self.attention),
            (paged_extend_attention, self.extend_args(), self.attention),
        )
        if self.value_dim is not None:
            with_heads = (*self.decode_args(), self.latent_heads())
            own: tuple[_Call, ...] = ((store_latents, self.store_latents_args(), {}),)
            if self.index_size:
                few, many, scale = self.num_seqs, self.num_tokens, {"options": self.options}
                choice = {"first": self.width, "count": self.max_len // 2}
                own = (
                    (decode_chosen, self.chosen_args(few), scale),
                    (extend_chosen, self.chosen_args(many), scale),
                    (decode_choice, self.choice_args(few), choice),
                    (extend_choice, self.choice_args(many), choice),
                )
            return (
                *own,
                *attention,
                (decode_latents, with_heads, {"options": self.options}),
            )
        return (
            (store_kv, self.store_args(), {}),
            (store_rotated, self.rotate_and_store_args(), {}),
            *attention,
        )


def store_rotated(kv: PagedKv, qkv: FusedQkv, slots: jax.Array, **choice: Any) -> tuple[PagedKv, jax.Array]:
    """`rotate_and_store` with the cache first and returned first, as for `store_kv`."""
    q, kv = rotate_and_store(qkv, kv, slots, **choice)
    return kv, q


def store_latents(pages: jax.Array, qkv: LatentQkv, slots: jax.Array, **choice: Any) -> tuple[jax.Array, jax.Array]:
    """`absorb_and_store` with the pages first and returned first, as for `store_kv`."""
    q, pages = absorb_and_store(qkv, pages, slots, **choice)
    return pages, q


def decode_chosen(*args: Any, **choice: Any) -> jax.Array:
    """`attend_to_chosen` of one token of each sequence."""
    return attend_to_chosen(*args, **choice)


def extend_chosen(*args: Any, **choice: Any) -> jax.Array:
    """`attend_to_chosen` of more tokens."""
    return attend_to_chosen(*args, **choice)


def decode_choice(*args: Any, **choice: Any) -> jax.Array:
    """`choose_tokens` for one token of each sequence."""
    return choose_tokens(*args, **choice)


def extend_choice(*args: Any, **choice: Any) -> jax.Array:
    """`choose_tokens` for more tokens."""
    return choose_tokens(*args, **choice)


def store_decoded(kv: PagedKv, qkv: FusedQkv, slots: jax.Array, **choice: Any) -> tuple[PagedKv, jax.Array]:
    """`store_and_decode` with the cache first and returned first, as for `store_kv`."""
    out, kv = store_and_decode(qkv, kv, slots, **choice)
    return kv, out


@dataclasses.dataclass(frozen=True)
class GroupedSpec:
    """The static side of attention to a window and to entries of groups. Letters as in `grouped_tokens`."""

    num_seqs: int
    """S."""
    num_tokens: int
    """T of an extend; in a decode, T is S."""
    pages_per_seq: int
    page_size: int
    num_heads: int
    """N."""
    head_dim: int
    """H."""
    window: int
    size: int = 0
    """m; 0: queries attend to the window alone."""
    index_size: int = 0
    """Numbers of an entry after H, of the key of an index."""
    num_chosen: int = 0
    """Entries that an index chooses; 0: all are attended to."""
    dtype: Any = jnp.bfloat16

    @property
    def name(self) -> str:
        """Such as "grouped_m4_g64_k512_bfloat16"."""
        chosen = [f"k{self.num_chosen}"] if self.num_chosen else []
        return "_".join(["grouped", f"m{self.size}", f"g{self.num_heads}", *chosen, jnp.dtype(self.dtype).name])

    def pages(self, num_entries: int, width: int) -> jax.ShapeDtypeStruct:
        """A cache of pages of so many entries."""
        return jax.ShapeDtypeStruct((1 + self.num_seqs * self.pages_per_seq, 1, num_entries, width), self.dtype)

    def args(self, num_tokens: int) -> tuple[Any, ...]:
        """q, chosen, query_offsets, cache and sinks, as shapes."""
        pages: Any = self.pages(self.page_size, self.head_dim)
        groups: Any = self.pages(self.page_size // self.size, self.head_dim + self.index_size) if self.size else None
        table: Any = _int32(self.num_seqs, self.pages_per_seq)
        lengths: Any = _int32(self.num_seqs)
        q = jax.ShapeDtypeStruct((num_tokens, self.num_heads, self.head_dim), self.dtype)
        chosen = _int32(num_tokens, self.num_chosen) if self.num_chosen else None
        sinks = jax.ShapeDtypeStruct((self.num_heads,), jnp.float32)
        return q, chosen, _int32(self.num_seqs + 1), GroupedCache(pages, groups, None, table, lengths), sinks

    def calls(self) -> tuple[_Call, ...]:
        """A decode and an extend: function, arguments as shapes, and keyword arguments."""
        told = {"size": self.size, "options": AttentionOptions(sliding_window=self.window)}
        return (
            (decode_groups, self.args(self.num_seqs), told),
            (extend_groups, self.args(self.num_tokens), told),
        )


def decode_groups(
    q: jax.Array, chosen: jax.Array | None, query_offsets: jax.Array, cache: GroupedCache, sinks: jax.Array,
    **choice: Any,
) -> jax.Array:  # fmt: skip
    """`attend_to_groups` of one token of each sequence, which is stored."""
    return attend_to_stored_groups(q, chosen, query_offsets, cache, sinks=sinks, **choice)


def extend_groups(
    q: jax.Array, chosen: jax.Array | None, query_offsets: jax.Array, cache: GroupedCache, sinks: jax.Array,
    **choice: Any,
) -> jax.Array:  # fmt: skip
    """`attend_to_groups` of more tokens."""
    return attend_to_stored_groups(q, chosen, query_offsets, cache, sinks=sinks, **choice)


@dataclasses.dataclass(frozen=True)
class ProductSpec:
    """The static side of a `quantized_product`, or a `float8_product`. Letters as in its docstring."""

    num_rows: int
    """T."""
    num_outputs: int
    """O."""
    num_inputs: int
    """I."""
    numbers: str
    """dtype of the weights; "mxfp4" is packed."""
    group: int
    """Inputs that share a scale."""
    has_zeros: bool = False
    in_parts: bool = False
    dtype: Any = jnp.bfloat16
    in_float8: bool = False
    """Whether rows are rounded."""
    packs: bool = True
    """Whether int4 is packed, for GPUs."""
    block_outputs: int = 1
    """Outputs that share their scales."""

    @property
    def name(self) -> str:
        """Such as "256x4096x12288_float8_e4m3fn_g128_parts"; "rounded" are the rows of a `float8_product`."""
        has_extra = {
            "zeros": self.has_zeros,
            "parts": self.in_parts,
            "rounded": self.in_float8,
            "unpacked": not self.packs,
        }
        extras = [name for name, has in has_extra.items() if has]
        kind = [jnp.dtype(self.dtype).name] if self.dtype != jnp.bfloat16 else []
        shape = f"{self.num_rows}x{self.num_outputs}x{self.num_inputs}"
        blocks = [f"b{self.block_outputs}"] if self.block_outputs > 1 else []
        return "_".join([shape, self.numbers, f"g{self.group}", *blocks, *kind, *extras])

    def args(self) -> tuple[Any, ...]:
        """x and weights, as shapes."""
        x = jax.ShapeDtypeStruct((self.num_rows, self.num_inputs), self.dtype)
        groups = (self.num_outputs, self.num_inputs // self.group)
        if self.numbers == packed.MXFP4:
            pairs: Any = jax.ShapeDtypeStruct((self.num_outputs, self.num_inputs // 2), jnp.uint8)
            return x, jax.eval_shape(packed.mxfp4_fragments_of, pairs, jax.ShapeDtypeStruct(groups, jnp.uint8))
        numbers: Any = jax.ShapeDtypeStruct((self.num_outputs, self.num_inputs), jnp.dtype(self.numbers))
        scale: Any = jax.ShapeDtypeStruct(groups, jnp.float32)
        zero: Any = jax.ShapeDtypeStruct(groups, jnp.int8) if self.has_zeros else None
        weights = ScaledMatrix(numbers, scale, zero, self.group, self.block_outputs)
        return x, jax.eval_shape(packed.fragments_of, weights) if self.numbers == "int4" and self.packs else weights

    def call(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Function, arguments as shapes, and keyword arguments."""
        return round_and_multiply if self.in_float8 else quantized_product, self.args(), {"in_parts": self.in_parts}


def round_and_multiply(x: jax.Array, weights: ScaledMatrix, *, in_parts: bool = False, **choice: Any) -> jax.Array:
    """`float8_product` of rows that are rounded first."""
    return float8_product(float8_rows(x, **choice), weights, in_parts=in_parts, **choice)


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
    ArgSpec("bfloat16", 3, 20, 5, 16, 2, 2, 16, dtype=jnp.bfloat16),
    ArgSpec("float16", 3, 20, 5, 16, 2, 2, 16, dtype=jnp.float16),
    ArgSpec("head_dim_64", 2, 12, 4, 16, 1, 4, 64),
    ArgSpec("float8", 3, 20, 5, 16, 2, 2, 64, float8_cache=True),
    ArgSpec("scale_window_cap_and_sinks", 3, 20, 5, 16, 2, 3, 16, jnp.float32, 33, 6.0, sm_scale=0.9, has_sinks=True),
    ArgSpec("float8_bfloat16", 3, 20, 5, 16, 2, 4, 64, dtype=jnp.bfloat16, float8_cache=True),
    ArgSpec("heads_of_512", 2, 12, 4, 16, 1, 4, 512, dtype=jnp.bfloat16),
    ArgSpec("heads_of_80", 3, 20, 5, 16, 2, 2, 80, kept_head_dim=128),
    ArgSpec("heads_of_96", 3, 20, 5, 16, 2, 2, 96, kept_head_dim=128, dtype=jnp.bfloat16),
    ArgSpec("heads_of_80_float8", 3, 20, 5, 16, 2, 1, 80, kept_head_dim=128, dtype=jnp.bfloat16, float8_cache=True),
)


def _serving_spec(
    head_dim: int, num_groups: int, page_size: int, dtype: str, extras: str = "", kept_head_dim: int | None = None
) -> ArgSpec:
    """32 sequences of up to 4096 tokens, 1024 new ones in an extend. `extras` names float8, window, cap and sinks.

    "rows" among them stands for 256 sequences, of which a program of a decode may take several.
    """
    chosen = extras.split()
    return ArgSpec(
        name="_".join([f"h{head_dim}", f"g{num_groups}", f"p{page_size}", dtype, *chosen]),
        num_seqs=256 if "rows" in chosen else 32,
        num_tokens=1024,
        pages_per_seq=4096 // page_size,
        page_size=page_size,
        num_kv_heads=8 if num_groups < 8 else 4,
        num_groups=num_groups,
        head_dim=head_dim,
        dtype={"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}[dtype],
        sliding_window=1024 if "window" in chosen else None,
        logit_soft_cap=50.0 if "cap" in chosen else None,
        float8_cache="float8" in chosen,
        has_sinks="sinks" in chosen,
        kept_head_dim=kept_head_dim,
    )


# What most models serve with.
COMMON_SPECS = tuple(
    _serving_spec(128, num_groups, page_size, "bf16") for num_groups in (2, 4, 8) for page_size in (16, 64)
)

# For lowering and compiling: any two values of two axes meet in some spec (a test checks the list for it).
GRID_SPECS = (
    *COMMON_SPECS,
    _serving_spec(64, 1, 1, "bf16", "float8 window"),
    _serving_spec(64, 2, 16, "bf16", "cap"),
    _serving_spec(64, 2, 64, "f16", "float8"),
    _serving_spec(64, 4, 64, "bf16", "window"),
    _serving_spec(64, 7, 128, "f32", "float8"),
    _serving_spec(64, 8, 64, "bf16", "window sinks"),
    _serving_spec(64, 8, 128, "bf16", "float8 cap"),
    _serving_spec(64, 16, 1, "f16", "cap"),
    _serving_spec(64, 16, 64, "bf16", "cap"),
    _serving_spec(128, 1, 128, "f32", "window cap"),
    _serving_spec(128, 2, 1, "f32", "window"),
    _serving_spec(128, 4, 1, "f32", "window cap"),
    _serving_spec(128, 4, 16, "bf16", "window cap rows"),
    _serving_spec(128, 4, 64, "bf16", "float8 rows"),
    _serving_spec(128, 7, 16, "bf16", "window cap sinks"),
    _serving_spec(128, 7, 64, "f16", "window cap"),
    _serving_spec(128, 8, 1, "f16", "float8 cap"),
    _serving_spec(128, 8, 16, "bf16", "float8 window"),
    _serving_spec(128, 16, 16, "f32", "float8"),
    _serving_spec(256, 1, 16, "f16", "float8 window"),
    _serving_spec(256, 1, 64, "bf16", "float8 cap"),
    _serving_spec(256, 2, 128, "f16", "float8"),
    _serving_spec(256, 4, 16, "f16", "float8"),
    _serving_spec(256, 4, 128, "f16", "float8"),
    _serving_spec(256, 7, 1, "f16", "cap"),
    _serving_spec(256, 8, 64, "f32", "window cap"),
    _serving_spec(256, 16, 128, "f16", "window"),
    # Gemma 3's layers, with a window and without, and those of Qwen 3.5 with attention.
    _serving_spec(256, 2, 64, "bf16", "window rows"),
    _serving_spec(256, 2, 16, "bf16"),
    _serving_spec(256, 8, 64, "bf16"),
    _serving_spec(80, 1, 64, "bf16", kept_head_dim=128),
    _serving_spec(80, 4, 64, "bf16", "float8", kept_head_dim=128),
    _serving_spec(96, 1, 64, "bf16", kept_head_dim=128),
    _serving_spec(96, 1, 64, "bf16", "float8", kept_head_dim=128),
    _serving_spec(96, 4, 16, "bf16", "window", kept_head_dim=128),
    _serving_spec(192, 8, 64, "bf16", kept_head_dim=256),
    _serving_spec(512, 1, 16, "f16", "window sinks"),
    _serving_spec(512, 2, 64, "f32"),
    _serving_spec(512, 4, 1, "bf16", "cap"),
    _serving_spec(512, 8, 64, "bf16"),
    _serving_spec(512, 8, 64, "bf16", "float8"),
    _serving_spec(512, 8, 16, "f32", "float8"),
    _serving_spec(512, 16, 64, "bf16", "window"),
)

# The latents of DeepSeek-V2-Lite (or V3 on 8 devices), GLM-4.7-Flash, Kimi-K2 and DeepSeek-V3, then those of GLM-5 on 8
# devices and DeepSeek-V3.2, whose entries end in the key of an index.
LATENT_SPECS = tuple(
    ArgSpec(
        f"latent_g{num_groups}_{dtype.name}{'_index' if index_size else ''}", 32, 1024, 64, 64, 1, num_groups, 576,
        dtype, value_dim=512, num_absorbing=192 if num_groups in (8, 20) else 128,
        num_outputs=256 if num_groups in (8, 20) else 128, index_size=index_size,
    )
    for dtype, every, index_size in (
        (jnp.dtype(jnp.bfloat16), (16, 20, 64, 128), 0),
        (jnp.dtype(jnp.float32), (16, 128), 0),
        (jnp.dtype(jnp.bfloat16), (8, 128), 128),
    )
    for num_groups in every
)  # fmt: skip

# DeepSeek V4's layers: on one device, on four and on two of its larger model, and on one in float32.
GROUPED_SPECS = tuple(
    GroupedSpec(32, 1024, 1024, 128, num_heads, 512, 128, size, index_size, num_chosen, dtype)
    for num_heads, dtype in ((64, jnp.bfloat16), (16, jnp.float16), (64, jnp.float32), (128, jnp.bfloat16))
    for size, index_size, num_chosen in ((4, 128, 512), (128, 0, 0), (0, 0, 0))
)

# Products of Qwen3-8B's layer in the formats that are published, for each of the kernel's tiles; and odd sizes.
PRODUCT_SPECS = (
    ProductSpec(64, 6144, 4096, "float8_e4m3fn", 128),
    ProductSpec(128, 4096, 4096, "float8_e4m3fn", 128, in_parts=True),
    ProductSpec(256, 24_576, 4096, "float8_e4m3fn", 128),
    ProductSpec(256, 4096, 12_288, "float8_e4m3fn", 128, in_parts=True),
    ProductSpec(16, 6144, 4096, "int4", 32),
    ProductSpec(32, 24_576, 4096, "int4", 64, has_zeros=True, dtype=jnp.float16),
    ProductSpec(64, 4096, 12_288, "int4", 128, has_zeros=True, in_parts=True),
    ProductSpec(128, 24_576, 4096, "int4", 128, has_zeros=True),
    ProductSpec(256, 4096, 12_288, "int4", 128, has_zeros=True, in_parts=True),
    ProductSpec(256, 24_576, 4096, "int4", 32, has_zeros=True),
    ProductSpec(16, 6144, 4096, "mxfp4", 32),
    ProductSpec(256, 24_576, 4096, "mxfp4", 32),
    ProductSpec(256, 6144, 4096, "int8", 128, has_zeros=True),
    ProductSpec(300, 1000, 1536, "float8_e4m3fn", 64, dtype=jnp.float16),
    ProductSpec(64, 6144, 4096, "float8_e4m3fn", 128, in_float8=True),
    ProductSpec(128, 4096, 12_288, "float8_e4m3fn", 128, in_parts=True, in_float8=True),
    ProductSpec(256, 24_576, 4096, "float8_e4m3fn", 128, in_float8=True),
    ProductSpec(300, 1000, 1536, "float8_e4m3fn", 1536, dtype=jnp.float16, in_float8=True),
)

# Of many rows on Hopper: tiles of two blocks and of one, scales of blocks, of half a tile's outputs, and of each.
HOPPER_PRODUCT_SPECS = (
    ProductSpec(4096, 24_576, 4096, "float8_e4m3fn", 128, in_float8=True, block_outputs=128),
    ProductSpec(384, 24_576, 1536, "float8_e4m3fn", 128, in_float8=True, block_outputs=64),
    ProductSpec(4096, 4096, 12_288, "float8_e4m3fn", 12_288, in_parts=True, in_float8=True),
)

# The same layer's on TPUs, whose kernel spreads small groups over lanes and takes long rows in smaller tiles.
TPU_PRODUCT_SPECS = (
    ProductSpec(16, 6144, 4096, "float8_e4m3fn", 128, packs=False),
    ProductSpec(256, 24_576, 4096, "float8_e4m3fn", 128, dtype=jnp.float32, packs=False),
    ProductSpec(4096, 4096, 12_288, "int8", 128, has_zeros=True, packs=False),
    ProductSpec(64, 24_576, 4096, "int4", 128, has_zeros=True, packs=False),
    ProductSpec(4096, 4096, 12_288, "int4", 32, has_zeros=True, packs=False),
    ProductSpec(64, 5120, 25_600, "int8", 16, packs=False),
)
