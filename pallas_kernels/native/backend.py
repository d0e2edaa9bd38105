"""The C++ kernels as a backend. `dispatch` lists it."""

from pallas_kernels.backend import Backend, Kernel
from pallas_kernels.native import packed_product
from pallas_kernels.native.attention import decode_attention, extend_attention, refuse_attention
from pallas_kernels.native.grouped_product import grouped_product, refuse_grouped_product
from pallas_kernels.native.states import convolve, refuse_convolution, refuse_states, scan

BACKEND = Backend(
    "native",
    Kernel(decode_attention, refuse_attention),
    Kernel(extend_attention, refuse_attention),
    extend_ahead=Kernel(extend_attention, refuse_attention),
    extend_biased=Kernel(extend_attention, refuse_attention),
    grouped_product=Kernel(grouped_product, refuse_grouped_product),
    grouped_packed_product=Kernel(packed_product.grouped_product, packed_product.refuse),
    delta_scan=Kernel(scan, refuse_states),
    convolve=Kernel(convolve, refuse_convolution),
    platform="cpu",
)
