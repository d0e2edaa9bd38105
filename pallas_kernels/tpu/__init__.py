"""Kernels for TPUs, on Pallas Mosaic. docs/kernels/tpu.md explains them."""

from pallas_kernels.backend import Backend, Kernel
from pallas_kernels.lazily import imported

_REFUSE_ATTENTION = imported("tpu.attention", "refuse_attention")

BACKEND = Backend(
    "mosaic_tpu",
    Kernel(imported("tpu.attention", "decode_attention"), _REFUSE_ATTENTION),
    Kernel(imported("tpu.attention", "extend_attention"), _REFUSE_ATTENTION),
    Kernel(imported("tpu.store", "store_kv"), imported("tpu.store", "refuse_store")),
    store_and_decode=Kernel(
        imported("tpu.attention", "store_and_decode"), imported("tpu.attention", "refuse_store_and_decode")
    ),
    grouped_product=Kernel(
        imported("tpu.products", "grouped_product"), imported("tpu.products", "refuse_grouped_product")
    ),
    grouped_scaled_product=Kernel(
        imported("tpu.products", "grouped_scaled_product"),
        imported("tpu.products", "refuse_scaled_product"),
    ),
    grouped_packed_product=Kernel(
        imported("tpu.products", "grouped_packed_product"), imported("tpu.products", "refuse_packed_product")
    ),
    quantized_product=Kernel(
        imported("tpu.products", "quantized_product"), imported("tpu.products", "refuse_quantized_product")
    ),
    platform="tpu",
    has_interpreter=True,
)
