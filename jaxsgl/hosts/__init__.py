"""One model over several hosts: host 0 decides and streams its engine's calls, the others play them. Imports no JAX."""
