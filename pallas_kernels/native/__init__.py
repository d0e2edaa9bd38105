"""Kernels in C++ for CPUs: attention, and the products of models. docs/kernels/native.md explains them."""

from pallas_kernels.backend import Backend
from pallas_kernels.native.attention import decode_attention, extend_attention, refuse_attention

BACKEND = Backend(
    "native", decode_attention, extend_attention, refuse_decode=refuse_attention, refuse_extend=refuse_attention,
    platform="cpu",
)  # fmt: skip
