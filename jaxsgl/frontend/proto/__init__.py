"""The gRPC contract: `jaxsgl.proto` and the code generated from it by `scripts/make proto`."""
