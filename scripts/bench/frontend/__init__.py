"""The parts of bench_frontend.py: a fake engine, the server around it, and the load."""
