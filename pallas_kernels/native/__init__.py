"""Kernels in C++ for the CPU, compiled on the machine that runs them. See `attention` and docs/kernels/native.md."""
