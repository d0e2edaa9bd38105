"""Paged attention kernels for JAX: KV store, decode attention and extend attention.

Owns the arithmetic over a paged KV cache. Never knows requests, schedulers or models: it sees arrays only, and
imports JAX and NumPy only. Callers are model code, tests and benchmarks, through the functions below, which take the
cache as a `PagedKv` and the static options of attention as `AttentionOptions`.

There is one package per platform, each with all the kernels for it: `xla`, `native` (C++ for CPUs), `triton`, `hopper`
(Mosaic GPU) and `tpu`. `reference` defines what is right, `specs` names shapes for tests and benchmarks.
"""

from pallas_kernels.api.attention import (
    decode_latents,
    paged_decode_attention,
    paged_extend_attention,
    store_and_decode,
)
from pallas_kernels.api.chosen import attend_to_chosen, choose_tokens
from pallas_kernels.api.experts import (
    choose_experts,
    experts_multiply_float8,
    gated_packed_product,
    gated_product,
    group_by_expert,
    grouped_float8_product,
    grouped_packed_product,
    grouped_product,
    grouped_scaled_product,
    joins_shared,
    products_with_shared,
)
from pallas_kernels.api.grouped import attend_to_groups
from pallas_kernels.api.norms import add_and_norm, add_and_norm_in_float8
from pallas_kernels.api.products import (
    device_multiplies_float8,
    float8_product,
    float8_rows,
    multiplies_float8,
    ordered_product,
    quantized_product,
)
from pallas_kernels.api.stores import absorb_and_store, rotate_and_store, store_entries, store_kv
from pallas_kernels.choice import KernelChoice
from pallas_kernels.dispatch import BACKENDS, STORE_BACKENDS, sees_ahead
from pallas_kernels.experts import Choices, GatedUnit, Groups, UnitWeights, add_choices
from pallas_kernels.grouped_tokens import GroupedCache, GroupedQkv, GroupParts
from pallas_kernels.latent import LatentHeads, LatentQkv
from pallas_kernels.options import AttentionOptions
from pallas_kernels.paged_kv import PagedKv
from pallas_kernels.qkv import FusedQkv
from pallas_kernels.routing import Router
from pallas_kernels.scaled import ScaledMatrix, ScaledRows
from pallas_kernels.token_index import TokenIndex

__all__ = [
    "BACKENDS",
    "STORE_BACKENDS",
    "AttentionOptions",
    "Choices",
    "FusedQkv",
    "GatedUnit",
    "GroupParts",
    "GroupedCache",
    "GroupedQkv",
    "Groups",
    "KernelChoice",
    "LatentHeads",
    "LatentQkv",
    "PagedKv",
    "Router",
    "ScaledMatrix",
    "ScaledRows",
    "TokenIndex",
    "UnitWeights",
    "absorb_and_store",
    "add_and_norm",
    "add_and_norm_in_float8",
    "add_choices",
    "attend_to_chosen",
    "attend_to_groups",
    "choose_experts",
    "choose_tokens",
    "decode_latents",
    "device_multiplies_float8",
    "experts_multiply_float8",
    "float8_product",
    "float8_rows",
    "gated_packed_product",
    "gated_product",
    "group_by_expert",
    "grouped_float8_product",
    "grouped_packed_product",
    "grouped_product",
    "grouped_scaled_product",
    "joins_shared",
    "multiplies_float8",
    "ordered_product",
    "paged_decode_attention",
    "paged_extend_attention",
    "products_with_shared",
    "quantized_product",
    "rotate_and_store",
    "sees_ahead",
    "store_and_decode",
    "store_entries",
    "store_kv",
]
