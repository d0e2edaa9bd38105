"""Checks, of which each has a command: `python scripts/check NAME` runs `main` of the module of that name."""

from collections.abc import Sequence


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """The number of equal tokens before the first different one."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
