"""Vision towers: what turns patches of images into embeddings of tokens. Used by `decoder`, weights and the engine."""
