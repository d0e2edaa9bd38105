"""Kernels for NVIDIA GPUs since Ampere, on Pallas's Triton backend. docs/kernels/triton.md explains them."""

from pallas_kernels.backend import Backend
from pallas_kernels.triton.common import refuse_attention
from pallas_kernels.triton.decode import decode_attention
from pallas_kernels.triton.extend import extend_attention
from pallas_kernels.triton.store import refuse_store, store_kv

BACKEND = Backend(
    "triton",
    decode_attention,
    extend_attention,
    store_kv,
    refuse_decode=refuse_attention,
    refuse_extend=refuse_attention,
    refuse_store=refuse_store,
    platform="gpu",
    has_interpreter=True,
)
