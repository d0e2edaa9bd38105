"""The parts of bench_serving.py: datasets, backends, the run, and figures. Knows servers only by their protocols."""
