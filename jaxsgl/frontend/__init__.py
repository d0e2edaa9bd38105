"""Process A: what clients talk to. Tokenizes, checks, and streams the engine's tokens back as text."""
