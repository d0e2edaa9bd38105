"""Anthropic's HTTP API: what Claude Code and the `anthropic` clients speak."""
