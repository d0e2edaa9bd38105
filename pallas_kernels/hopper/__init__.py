"""Kernels for NVIDIA's Hopper GPUs: TMA and wgmma, on Pallas Mosaic GPU. docs/kernels/hopper.md explains them."""

from pallas_kernels.backend import Backend
from pallas_kernels.hopper.decode import decode_attention, refuse_decode
from pallas_kernels.hopper.extend import extend_attention, refuse_extend

BACKEND = Backend(
    "mosaic_gpu",
    decode_attention,
    extend_attention,
    refuse_decode=refuse_decode,
    refuse_extend=refuse_extend,
    platform="gpu",
    has_interpreter=True,
)
