"""Moving KV pages between a prefill and a decode worker: messages, and the wires that carry them. Knows no JAX."""
