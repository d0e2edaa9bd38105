"""The parts of bench_kernels.py, check_kernels.py and tune_kernels.py: cases, contenders, timing and checks."""
