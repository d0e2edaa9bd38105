"""All code that touches the device: sizes and state, one compiled step per bucket, sampling."""
