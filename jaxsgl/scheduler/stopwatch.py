"""`Stopwatch`: how long requests wait, how long they take to their first token, and how long steps take.

Owns the times; decides nothing. scheduler.py and apply.py report what happens, and take what metrics show: `StageTimes`
go with a sample's first token, the times of steps with the load. A decode step costs two looks at the clock and one
count; the message of all counts is made anew once in `NEWS_S` seconds, and when the engine becomes idle.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable

from jaxsgl.batch.inputs import Bucket
from jaxsgl.messages.replies import STEP_BOUNDS_S, BucketTimes, StageTimes, pack_times
from jaxsgl.scheduler.req import Key

NEWS_S = 1.0


class Stopwatch:
    """Times of one engine. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrived_s: dict[Key, float] = {}  # of samples without a token
        self._queue_s: dict[Key, float] = {}  # of those, the admitted ones
        self._in_flight: deque[tuple[Bucket, float]] = deque()
        self._last_end_s = 0.0
        self._times: dict[tuple[str, int, int, int, int], BucketTimes] = {}
        self._told = b""
        self._told_s = 0.0
        self._has_news = False

    def arrived(self, keys: Iterable[Key]) -> None:
        """Notes samples that join the queue."""
        self._arrived_s.update(dict.fromkeys(keys, self._clock()))

    def admitted(self, key: Key) -> None:
        """Notes an admission; only a sample's first one counts."""
        if key in self._arrived_s and key not in self._queue_s:
            self._queue_s[key] = self._clock() - self._arrived_s[key]

    def first_token(self, key: Key) -> StageTimes | None:
        """Returns the times of a sample whose token has just been read; None if it had one before."""
        arrived_s, queue_s = self._arrived_s.pop(key, None), self._queue_s.pop(key, None)
        if arrived_s is None or queue_s is None:
            return None
        return StageTimes(queue_s, self._clock() - arrived_s - queue_s)

    def ended(self, key: Key) -> None:
        """Forgets a sample."""
        if self._arrived_s.pop(key, None) is not None:
            self._queue_s.pop(key, None)

    def hand_over(self, keys: Iterable[Key], other: Stopwatch) -> None:
        """Gives samples that join another queue to the stopwatch of that one."""
        for key in keys:
            other._arrived_s[key] = self._arrived_s.pop(key)

    def launched(self, bucket: Bucket) -> None:
        """Notes a step that goes to the device."""
        self._in_flight.append((bucket, self._clock()))

    def collected(self) -> float:
        """Returns the seconds of the oldest step in flight, which has ended, and counts them.

        It began at its launch or when the one before ended.
        """
        bucket, launched_s = self._in_flight.popleft()
        began_s, self._last_end_s = max(launched_s, self._last_end_s), self._clock()
        seconds = self._last_end_s - began_s
        key = (bucket.kind, bucket.num_tokens, bucket.num_seqs, bucket.num_steps, bucket.mlp_tokens)
        times = self._times.get(key)
        if times is None:
            counts = [0] * (len(STEP_BOUNDS_S) + 1)
            times = self._times[key] = BucketTimes(bucket.kind, bucket_name(bucket), counts, 0.0)
        times.counts[bisect_left(STEP_BOUNDS_S, seconds)] += 1
        times.seconds += seconds
        self._has_news = True
        return seconds

    def bucket_times(self) -> list[BucketTimes]:
        """The times of all steps that have ended."""
        return [*self._times.values()]

    def step_times(self, is_idle: bool) -> bytes:
        """Returns the times of all steps, as `Load.step_times`; up to `NEWS_S` old unless the engine `is_idle`."""
        if self._has_news and (is_idle or self._last_end_s - self._told_s >= NEWS_S):
            self._told = pack_times([*self._times.values()])
            self._told_s, self._has_news = self._last_end_s, False
        return self._told


def bucket_name(bucket: Bucket) -> str:
    """The shape in short: rows of a decode step (x steps, if there are several); tokens x sequences of others.

    Of ranks it is the shape of each, and after a slash the tokens of all together in MLPs, if those are fewer.
    """
    of_all = f"/{bucket.mlp_tokens}" if bucket.mlp_tokens else ""
    if bucket.kind == "decode":
        return f"{bucket.num_seqs}{of_all}" if bucket.num_steps == 1 else f"{bucket.num_seqs}x{bucket.num_steps}"
    return f"{bucket.num_tokens}x{bucket.num_seqs}{of_all}"
