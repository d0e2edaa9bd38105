"""From scheduling decisions to padded device inputs: fixed shapes, packing, buckets, and the engine's protocol."""
