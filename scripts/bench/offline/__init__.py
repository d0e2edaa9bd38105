"""The parts of `bench_offline.py`: a recorded run of the serving loop, and its figures."""
