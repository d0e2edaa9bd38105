"""Everything that touches the device: weights and KV buffers on a mesh, one compiled step per bucket, sampling."""
