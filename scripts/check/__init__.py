"""Checks, of which each has a command: `python scripts/check NAME` runs `main` of the module of that name."""
