"""Batches as OpenAI has them: a file of requests becomes a file of answers."""
