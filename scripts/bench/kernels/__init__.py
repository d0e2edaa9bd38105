"""The parts of bench_kernels.py, `check kernels` and tune_kernels.py: cases, contenders, timing and checks."""
