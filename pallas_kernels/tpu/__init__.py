"""Kernels for TPUs, on Pallas Mosaic. docs/kernels/tpu.md explains them."""

from pallas_kernels.backend import Backend
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
    decode_attention,
    extend_attention,
    store_kv,
    store_and_decode=store_and_decode,
    grouped_product=grouped_product,
    refuse_decode=refuse_attention,
    refuse_extend=refuse_attention,
    refuse_store=refuse_store,
    refuse_store_and_decode=refuse_store_and_decode,
    refuse_grouped_product=refuse_grouped_product,
    platform="tpu",
    has_interpreter=True,
)
