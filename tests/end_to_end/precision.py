"""Which number formats the tests of the bundled model ask for.

By default formats would depend on the processor: the checkpoint is bfloat16, which not every CPU multiplies. Tokens
and scores would differ between batch sizes, too, as rounding to 8 bits makes near numbers equal.
"""

EXACT = "float32"
"""For tests that compare with transformers, or compare two runs."""

EXACT_FLAGS = ("--dtype", EXACT)

NARROW = "bfloat16"
"""Weights and products in bfloat16, everything else in float32, the KV cache in float16."""
