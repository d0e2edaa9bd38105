"""Weights that draft: what they keep of each token, and the programs that run after a step."""
