"""The gRPC port: our own service, SGLang's worker protocol, health and reflection."""
