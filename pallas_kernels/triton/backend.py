"""The Triton kernels as a backend, for `dispatch`."""

from pallas_kernels.backend import Backend
from pallas_kernels.triton.add_and_norm import add_and_norm, refuse_add_and_norm
from pallas_kernels.triton.choose_experts import choose_experts, refuse_choose_experts
from pallas_kernels.triton.common import refuse_attention
from pallas_kernels.triton.decode import decode_attention
from pallas_kernels.triton.extend import extend_attention
from pallas_kernels.triton.float8_product import float8_product, refuse_float8_product
from pallas_kernels.triton.float8_rows import float8_rows
from pallas_kernels.triton.group_by_expert import group_by_expert
from pallas_kernels.triton.grouped_product import (
    gated_product,
    grouped_product,
    refuse_gated_product,
    refuse_grouped_product,
)
from pallas_kernels.triton.ordered_product import ordered_product, refuse_ordered_product
from pallas_kernels.triton.quantized_product import quantized_product, refuse_quantized_product
from pallas_kernels.triton.rotate_and_store import refuse_rotate_and_store, rotate_and_store
from pallas_kernels.triton.store import refuse_store, store_kv

BACKEND = Backend(
    "triton",
    decode_attention,
    extend_attention,
    store_kv,
    rotate_and_store,
    add_and_norm,
    grouped_product,
    quantized_product,
    gated_product,
    choose_experts,
    group_by_expert,
    float8_rows,
    float8_product,
    ordered_product=ordered_product,
    refuse_decode=refuse_attention,
    refuse_extend=refuse_attention,
    refuse_store=refuse_store,
    refuse_rotate_and_store=refuse_rotate_and_store,
    refuse_add_and_norm=refuse_add_and_norm,
    refuse_grouped_product=refuse_grouped_product,
    refuse_gated_product=refuse_gated_product,
    refuse_choose_experts=refuse_choose_experts,
    refuse_quantized_product=refuse_quantized_product,
    refuse_float8_product=refuse_float8_product,
    refuse_ordered_product=refuse_ordered_product,
    platform="gpu",
    has_interpreter=True,
)
