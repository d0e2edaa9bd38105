"""SGLang's gRPC worker protocol, which gateways speak; service.py is the servicer."""
