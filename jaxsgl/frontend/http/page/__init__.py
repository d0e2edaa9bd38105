"""The page for people at / and the list of endpoints at /docs: their files, and the stream of what engines do."""
