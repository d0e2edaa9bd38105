"""Grammars that requests are held to: which are being compiled, and what the next token of one sample may be."""
