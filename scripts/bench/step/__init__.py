"""What `bench_step.py` runs in the process of each variant."""
