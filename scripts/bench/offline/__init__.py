"""What `bench_offline.py` is made of: recording a run of the serving loop, and the figures of what was recorded."""
