"""How many drafts pay: of a request, by how often its own were kept (`Pace`), and of a step, by its size (`shares`).

A draft costs what its token adds to a step, whether it is kept or not. While a step is bound by reading the weights,
that is little; beyond `free_tokens` of a device it is as much as a token of another request. Knows no requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MEMORY = 0.8  # how much a step before counts of the next one
AT_FIRST = (1.6, 2.0)  # drafts kept and tried, as if so many had been: a request may begin with long drafts
LEAST = 0.15  # the probability that the last draft of a step must have of being kept
FIRST_WAIT, LONGEST_WAIT = 16, 1024  # tokens


class Pace:
    """How many drafts one source may propose for one request, by what became of those before.

    The probability p that a draft is kept if all before it are is estimated over the last steps. Drafts are proposed up
    to the last whose probability, p to the power of its place, is `LEAST`. If not even the first one's is, none is
    for a while; then one step tries again, and the next while is twice as long unless a draft of that step was kept.
    So a text that can't be guessed costs a few steps at its beginning, and fewer and fewer later.
    """

    __slots__ = ("_kept", "_tried", "_wait", "_waited")

    def __init__(self) -> None:
        self._kept, self._tried = AT_FIRST
        self._wait, self._waited = 0, 0

    @property
    def probability(self) -> float:
        """That a draft is kept, if all before it are."""
        return self._kept / self._tried

    @property
    def length(self) -> int:
        """How many drafts may be proposed now."""
        p = self.probability
        if p < LEAST:
            return int(self._waited >= self._wait)
        return 1 << 20 if p >= 1.0 else int(math.log(LEAST) / math.log(p) + 1e-9)

    def extend(self, num_tokens: int) -> None:
        """Counts tokens that were appended to the request."""
        self._waited += num_tokens

    def judge(self, drafted: int, kept: int) -> None:
        """Takes what became of a step's drafts; none after the first that was not kept counts as tried."""
        if not drafted:
            return
        self._kept = MEMORY * self._kept + kept
        self._tried = MEMORY * self._tried + min(kept + 1, drafted)
        self._waited = 0
        if kept:
            self._wait = 0
        elif self.probability < LEAST:
            self._wait = min(max(2 * self._wait, FIRST_WAIT), LONGEST_WAIT)


def shares(wanted: Sequence[int], num_rows: int, free_tokens: int) -> list[int]:
    """How many drafts of each request a step of `num_rows` decoding requests verifies: the step stays in `free_tokens`.

    `wanted` are those that each one proposes, at most. All get the same number, unless they want fewer; what is left
    over goes to the first ones.

        wanted 7 1 0 3, 4 rows, 12 tokens free  ->  4 1 0 3
    """
    left = max(free_tokens - num_rows, 0)
    if sum(wanted) <= left:
        return list(wanted)
    given = [0] * len(wanted)
    hungry = [i for i, most in enumerate(wanted) if most]
    while left and hungry:
        each = max(left // len(hungry), 1)
        for i in hungry[:left]:
            more = min(each, wanted[i] - given[i])
            given[i] += more
            left -= more
        hungry = [i for i in hungry if given[i] < wanted[i]]
    return given
