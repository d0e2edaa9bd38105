"""Kernels in C++ for CPUs: attention, the products of models, sums of rows. docs/kernels/native.md explains them."""
