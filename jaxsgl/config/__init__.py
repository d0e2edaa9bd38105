"""One frozen dataclass per concern, composed in engine.py and server.py. flags.py makes the command line of them."""
