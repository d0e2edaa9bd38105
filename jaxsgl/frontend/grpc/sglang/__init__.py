"""SGLang's gRPC worker protocol: what gateways speak. One file per idea; service.py is the servicer."""
