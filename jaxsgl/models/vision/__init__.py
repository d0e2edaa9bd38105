"""Vision towers: what turns patches of images into embeddings of tokens. Used by `dense`, `weights` and the engine."""
