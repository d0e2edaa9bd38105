"""Makes padded device inputs of scheduling decisions: shapes, packing, buckets, and the engine's protocol."""
