"""The parts of bench_peers.py: the same requests through jaxsgl and other engines, side by side."""
