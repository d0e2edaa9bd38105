"""Which number formats the tests of the bundled model ask for.

By default they would depend on the processor: the checkpoint is bfloat16, which not every CPU multiplies. Nor would
tokens and scores be the same in a batch of another size, as rounding to 8 bits makes equals of what is near.
"""

EXACT = "float32"
"""Of tests that compare with transformers, or a run with another run."""

EXACT_FLAGS = ("--dtype", EXACT)

NARROW = "bfloat16"
"""Weights and products in bfloat16, everything else in float32, the KV cache in float16."""
