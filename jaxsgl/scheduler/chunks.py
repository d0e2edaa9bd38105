"""How long a chunk is: within its budget, on a page border, and with little padding.

Decisions as pure functions of lengths in tokens. Called by the `PrefillAdder`.
"""

from __future__ import annotations

from collections.abc import Sequence

STEP_COST_TOKENS = 128  # what a step costs besides its tokens (weights to read, a launch), in tokens


def fair_shares(wanted: Sequence[int], budget: int) -> list[int]:
    """Shares `budget` so that nobody gets more than it wants, and less only if nobody gets much more (max-min fair)."""
    shares = [0] * len(wanted)
    left = budget
    for rank, i in enumerate(sorted(range(len(wanted)), key=lambda i: wanted[i])):
        shares[i] = min(wanted[i], left // (len(wanted) - rank))
        left -= shares[i]
    return shares


def without_much_padding(num_tokens: int, sizes: Sequence[int], can_shed: int) -> int:
    """Tokens that a step had better extend instead of `num_tokens`, if up to `can_shed` may come in the next step.

    Sheds the tail over the next smaller bucket where two steps cost less than the padding of one: step cost is taken
    as proportional to padded tokens plus a constant.

    Args:
      num_tokens: what the budget allows.
      sizes: T of the extend buckets, ascending.
      can_shed: tokens of the last chunk, less the least that it must keep.
    """
    padded = next(size for size in sizes if size >= num_tokens)
    smaller = max((size for size in sizes if size < num_tokens), default=0)
    shed = num_tokens - smaller
    if not smaller or shed > can_shed:
        return num_tokens
    rest = next(size for size in sizes if size >= shed)
    return smaller if smaller + rest + STEP_COST_TOKENS < padded else num_tokens
