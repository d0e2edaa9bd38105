"""Bounds the time between two tokens of a running request (`--max-itl-ms`): measures steps, and sizes extend steps.

Where requests ride along, the extend step has to end within the bound; otherwise a decode step follows every extend
step, and both together have to. Steps that hold no prompt take what they take. Called by the scheduler.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.inputs import Bucket
from jaxsgl.scheduler.allowance import Allowance
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.step_times import StepTimes


class Pace:
    """The clock of the steps.

    Args:
      max_itl_s: seconds between two tokens of a request at most; None: no bound, and nothing is measured.
      buckets: sizes of steps.
      page_size: tokens that each step extends at least, whatever that takes: who prefills must not starve either.
      clock: seconds, of any origin.
    """

    def __init__(self, max_itl_s: float | None, buckets: BucketSet, page_size: int, clock: Callable[[], float]) -> None:
        self._max_itl_s = max_itl_s
        self._buckets = buckets
        self._page_size = page_size
        self._clock = clock
        self._times = {"extend": StepTimes(), "decode": StepTimes()}
        self._in_flight: deque[tuple[Bucket, float, float, float]] = deque()  # KV, pairs, when launched
        self._last_end_s = -math.inf

    @property
    def is_bound(self) -> bool:
        """Whether there is a bound."""
        return self._max_itl_s is not None

    def launched(self, bucket: Bucket, kv_tokens: float, pairs: float) -> None:
        """A step goes to the device, or several in one program."""
        if self.is_bound:
            self._in_flight.append((bucket, kv_tokens, pairs, self._clock()))

    def collected(self) -> None:
        """The oldest step in flight has ended. It began when it was launched or when the one before ended."""
        if not self.is_bound:
            return
        bucket, kv_tokens, pairs, launched_s = self._in_flight.popleft()
        began_s, self._last_end_s = max(launched_s, self._last_end_s), self._clock()
        if bucket.kind in self._times:  # scores of prompts are rare, and their steps of one size only
            seconds = (self._last_end_s - began_s) / bucket.num_steps
            self._times[bucket.kind].measured(bucket.num_tokens, kv_tokens / bucket.num_steps, pairs, seconds)

    def leaves_time_for(self, num_steps: int, decoding: Collection[Req]) -> bool:
        """Whether so many decode steps in one program end within the bound: their tokens come all at once."""
        if self._max_itl_s is None:
            return True
        if self._times["decode"].base(1) is None:
            return False  # nothing is measured
        return num_steps * self._seconds_of_decoding(decoding, (), ()) <= self._max_itl_s

    def allowance(
        self, most: int, decoding: Collection[Req], continuing: Sequence[Req], riders: Sequence[Req]
    ) -> Allowance:
        """What the next extend step may hold beside `riders`: of all sizes that end in time, the one that extends most
        tokens a second, supposing that all chunks stand as deep as the deepest. Before anything is measured, and
        where nothing ends in time, the smallest size.

        Args:
          most: tokens, whatever time they take.
          decoding: requests that wait for their next token, the riders included.
          continuing: requests between chunks.
        """
        if self._max_itl_s is None or not decoding:
            return Allowance(most)
        times = self._times["extend"]
        left_s = self._max_itl_s - self._seconds_of_decoding(
            decoding, [req for req in continuing if req.extend_left <= most], riders
        )
        deepest = max((req.kv_len for req in continuing), default=0)
        best, best_rate = None, 0.0
        for smaller, size in pairwise((0, *self._buckets.extend_sizes)):
            room = min(size - len(riders), most)
            if room < min(self._page_size, most) or smaller - len(riders) >= most:
                continue
            base_s = times.base(size)
            for_chunks_s = left_s - (base_s or 0.0)
            if base_s is None or for_chunks_s <= 0:
                best = best or Allowance(room, math.inf if base_s is None else 0.0)
                continue
            length = Allowance(room, for_chunks_s, times.kv_token_s, times.pair_s).longest_chunk(deepest)
            seconds = self._max_itl_s - for_chunks_s + times.attention(deepest + length, deepest * length)
            rate = length / max(seconds, 1e-9)
            if best is None or rate > best_rate:
                best = Allowance(max(length, min(self._page_size, room)), for_chunks_s, times.kv_token_s, times.pair_s)
                best_rate = rate
        return best or Allowance(most)

    def _seconds_of_decoding(self, decoding: Collection[Req], ending: Sequence[Req], riders: Sequence[Req]) -> float:
        """What one token of each takes: of an extend step in which they ride, or in a step of their own.

        In the latter, those whose prompt may be `ending` will have joined them.
        """
        if riders:
            kv_tokens = sum(req.kv_len + 1 for req in riders)
            return self._times["extend"].attention(kv_tokens, kv_tokens)
        times = self._times["decode"]
        kv_tokens = sum(req.kv_len + 1 for req in decoding) + sum(req.extend_to for req in ending)
        rows = min(len(decoding) + len(ending), self._buckets.decode_sizes[-1])
        size = self._buckets.decode(rows, False).num_tokens
        return (times.base(size) or 0.0) + times.attention(kv_tokens, 0)
