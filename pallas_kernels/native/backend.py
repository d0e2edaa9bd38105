"""The C++ kernels as a backend. `dispatch` lists it."""

from pallas_kernels.backend import Backend
from pallas_kernels.native.attention import decode_attention, extend_attention, refuse_attention
from pallas_kernels.native.grouped_product import grouped_product, refuse_grouped_product

BACKEND = Backend(
    "native", decode_attention, extend_attention, grouped_product=grouped_product, refuse_decode=refuse_attention,
    refuse_extend=refuse_attention, refuse_grouped_product=refuse_grouped_product, platform="cpu",
)  # fmt: skip
