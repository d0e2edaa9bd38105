"""Kernels for TPUs, on Pallas Mosaic. docs/kernels/tpu.md explains them."""

from pallas_kernels.backend import Backend, Kernel
from pallas_kernels.tpu.attention import (
    decode_attention,
    extend_attention,
    refuse_attention,
    refuse_store_and_decode,
    store_and_decode,
)
from pallas_kernels.tpu.grouped_product import grouped_product, refuse_grouped_product
from pallas_kernels.tpu.store import refuse_store, store_kv

BACKEND = Backend(
    "mosaic_tpu",
    Kernel(decode_attention, refuse_attention),
    Kernel(extend_attention, refuse_attention),
    Kernel(store_kv, refuse_store),
    store_and_decode=Kernel(store_and_decode, refuse_store_and_decode),
    grouped_product=Kernel(grouped_product, refuse_grouped_product),
    platform="tpu",
    has_interpreter=True,
)
