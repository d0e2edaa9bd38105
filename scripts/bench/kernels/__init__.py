"""What `bench_kernels.py`, `tune_kernels.py` and `gpu_report.py` are made of: cases, their work, contenders, timing."""
