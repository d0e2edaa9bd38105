"""Compiling kernels and engine steps for accelerators that aren't there. Used by `compile_targets.py` alone."""
