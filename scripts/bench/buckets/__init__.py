"""What compiled shapes cost and what they are needed for; parts of bench_buckets.py."""
