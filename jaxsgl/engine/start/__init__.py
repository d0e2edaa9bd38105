"""What is decided and checked before an engine serves: devices, memory, sizes, flags, and a first run."""
