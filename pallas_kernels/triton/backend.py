"""The Triton kernels as a backend, for `dispatch`."""

from pallas_kernels.backend import Backend, Kernel
from pallas_kernels.triton.add_and_norm import add_and_norm, refuse_add_and_norm
from pallas_kernels.triton.choose_experts import choose_experts, refuse_choose_experts
from pallas_kernels.triton.common import refuse_attention
from pallas_kernels.triton.decode import decode_attention
from pallas_kernels.triton.delta_decode import delta_decode, refuse_delta_decode
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
    Kernel(decode_attention, refuse_attention),
    Kernel(extend_attention, refuse_attention),
    Kernel(store_kv, refuse_store),
    Kernel(rotate_and_store, refuse_rotate_and_store),
    Kernel(add_and_norm, refuse_add_and_norm),
    Kernel(grouped_product, refuse_grouped_product),
    Kernel(quantized_product, refuse_quantized_product),
    Kernel(gated_product, refuse_gated_product),
    Kernel(choose_experts, refuse_choose_experts),
    Kernel(group_by_expert),
    Kernel(float8_rows),
    Kernel(float8_product, refuse_float8_product),
    ordered_product=Kernel(ordered_product, refuse_ordered_product),
    delta_decode=Kernel(delta_decode, refuse_delta_decode),
    platform="gpu",
    has_interpreter=True,
)
