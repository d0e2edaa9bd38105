"""Kernels for NVIDIA GPUs since Ampere, on Pallas's Triton backend. docs/kernels/triton.md explains them."""
