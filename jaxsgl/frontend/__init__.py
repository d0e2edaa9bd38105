"""Process A, which clients talk to: tokenizes, checks, and streams the engine's tokens back as text."""
