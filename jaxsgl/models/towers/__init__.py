"""Towers, which see or hear: what turns patches of images and sounds into embeddings of tokens.

Used by `decoder`, weights and the engine.
"""
