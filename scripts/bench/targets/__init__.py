"""The parts of compile_targets.py: kernels and engine steps are compiled for accelerators that this machine lacks."""
