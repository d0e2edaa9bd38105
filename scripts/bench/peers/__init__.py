"""The same requests through jaxsgl and others, side by side. Used by bench_peers.py alone."""
