"""The ops as plain XLA: what runs on a CPU without the C++ kernels, and what "auto" falls back to anywhere."""

from pallas_kernels.backend import Backend, Kernel
from pallas_kernels.xla.chosen import attend_to_chosen
from pallas_kernels.xla.decode import decode_attention
from pallas_kernels.xla.extend import extend_attention
from pallas_kernels.xla.float8_product import float8_product, float8_rows
from pallas_kernels.xla.grouped import attend_to_groups
from pallas_kernels.xla.grouped_product import (
    grouped_float8_product,
    grouped_product,
    grouped_scaled_product,
    packed_product,
)
from pallas_kernels.xla.quantized_product import quantized_product
from pallas_kernels.xla.store import store_kv

BACKEND = Backend(
    "xla",
    Kernel(decode_attention),
    Kernel(extend_attention),
    Kernel(store_kv),
    extend_ahead=Kernel(extend_attention),
    extend_biased=Kernel(extend_attention),
    grouped_product=Kernel(grouped_product),
    grouped_packed_product=Kernel(packed_product),
    grouped_scaled_product=Kernel(grouped_scaled_product),
    quantized_product=Kernel(quantized_product),
    float8_rows=Kernel(float8_rows),
    float8_product=Kernel(float8_product),
    grouped_float8_product=Kernel(grouped_float8_product),
    attend_to_chosen=Kernel(attend_to_chosen),
    attend_to_groups=Kernel(attend_to_groups),
)
