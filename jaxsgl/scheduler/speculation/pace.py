"""How many drafts pay: of a request, by how often its own were kept (`Pace`), and of a step, by its time (`StepCosts`).

A draft costs what its token adds to a step, whether it is kept or not. While a step is bound by reading the weights,
that is little; with more tokens than a device multiplies meanwhile it is as much as a token of another request, and a
mixture reads more experts for it. So steps are measured. Knows no requests.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence

MEMORY = 0.8  # how much a step before counts of the next one
AT_FIRST = (1.6, 2.0)  # drafts kept and tried, as if so many had been: a request may begin with long drafts
LEAST = 0.15  # the probability that the last draft of a step must have of being kept
FIRST_WAIT, LONGEST_WAIT = 16, 1024  # tokens
WINDOW = 9  # steps of a size that are remembered
FEWEST = 3  # of a size that tell its time: one may be slow by chance
FORGET_AFTER = 256  # steps without drafts, after which those with drafts are tried anew
SLOPE = 0.75
GAIN = 1.05  # times as many tokens a second that drafts must promise


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


class StepCosts:
    """Any number of drafts pays. Others measure."""

    def collected(self, num_tokens: int, verifies: bool) -> None:
        """A step is read that decoded one token of each request, or verified drafts; of another, `num_tokens` is 0.

        They are the tokens that it was about, without padding.
        """

    def may_pay(self, num_rows: int) -> bool:
        """Whether drafts of `num_rows` requests pay if all are kept."""
        return True

    def affordable(self, num_rows: int, chances: Sequence[tuple[int, float]]) -> int:
        """How many of all drafts a step of `num_rows` requests had better verify.

        `chances`: of each request that has some, how many, and the probability that one is kept if all before it are.
        """
        return sum(count for count, _ in chances)


class MeasuredCosts(StepCosts):
    """Chooses the size of step that promises the most tokens a second, by the median time of recent steps of its size.

    A step's time is that since the step before was read: with the host's part, if that isn't hidden.

    A size that was not measured is taken to cost what another does, as long as both have `free_tokens` at most, and
    `SLOPE` of it more for each `free_tokens` beyond: rather little, since what is tried is measured then.

    Args:
      decode_sizes, verify_sizes: padded tokens of steps, ascending.
      free_tokens: that the device multiplies while it reads the weights.
      clock: gives seconds.
    """

    def __init__(
        self,
        decode_sizes: Sequence[int],
        verify_sizes: Sequence[int],
        free_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._last_s: float | None = None
        self._num_plain = 0  # steps since one with drafts
        self._sizes = {False: decode_sizes, True: verify_sizes}
        self._free_tokens = free_tokens
        self._seconds: dict[tuple[bool, int], deque[float]] = {}

    def collected(self, num_tokens: int, verifies: bool) -> None:
        """See `StepCosts`."""
        last_s, self._last_s = self._last_s, self._clock()
        if num_tokens and last_s is not None:
            self.measured(num_tokens, verifies, self._last_s - last_s)
        self._num_plain = 0 if verifies else self._num_plain + 1
        if self._num_plain >= FORGET_AFTER:
            self._num_plain = 0
            self._seconds = {key: seconds for key, seconds in self._seconds.items() if not key[0]}

    def may_pay(self, num_rows: int) -> bool:
        """See `StepCosts`."""
        least_rate = GAIN * num_rows / self.seconds(num_rows, False)
        return any(size / self.seconds(size, True) > least_rate for size in self._sizes[True] if size > num_rows)

    def measured(self, num_tokens: int, verifies: bool, seconds: float) -> None:
        """Notes how long a step took."""
        key = verifies, self._padded(num_tokens, verifies)
        self._seconds.setdefault(key, deque(maxlen=WINDOW)).append(seconds)

    def affordable(self, num_rows: int, chances: Sequence[tuple[int, float]]) -> int:
        """See `StepCosts`."""
        gains = sorted((p**place for count, p in chances for place in range(1, count + 1)), reverse=True)
        best, best_rate = 0, GAIN * num_rows / self.seconds(num_rows, False)
        expected, count = float(num_rows), 0
        for size in self._sizes[True]:
            if size <= num_rows:
                continue
            expected += sum(gains[count : size - num_rows])
            count = min(size - num_rows, len(gains))
            rate = expected / self.seconds(size, True)
            if rate > best_rate:
                best, best_rate = count, rate
            if count == len(gains):
                break
        return best

    def seconds(self, num_tokens: int, verifies: bool) -> float:
        """How long a step of so many tokens takes, or what it takes compared with others where none was measured."""
        size = self._padded(num_tokens, verifies)
        known = self._seconds.get((verifies, size), ())
        if len(known) >= FEWEST:
            return sorted(known)[len(known) // 2]
        trusted = [item for item in self._seconds.items() if len(item[1]) >= FEWEST]
        if not trusted:
            return self._model(size)
        other, like = min(trusted, key=lambda item: (abs(item[0][1] - size), item[0][0] != verifies))
        return sorted(like)[len(like) // 2] * self._model(size) / self._model(other[1])

    def _model(self, num_tokens: int) -> float:
        return 1 + SLOPE * max(num_tokens - self._free_tokens, 0) / self._free_tokens

    def _padded(self, num_tokens: int, verifies: bool) -> int:
        sizes = self._sizes[verifies]
        return sizes[min(bisect_left(sizes, num_tokens), len(sizes) - 1)]
