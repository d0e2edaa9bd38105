"""The measurements of a server: counts and times of its requests, and the rates at which its engine works.

generation.py reports each request through a `Timing`. The engine's numbers come with its load after every step and are
read when a scrape or a status line asks, so that a step costs nothing. Never knows Prometheus: metric_rows.py names the
measurements and shows them. Used by one thread, hence without locks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from jaxsgl.messages.replies import STEP_BOUNDS_S, HostState, Load, StageTimes, unpack_times
from jaxsgl.requests.request import FinishReason
from jaxsgl.text.sample import End

WINDOW_S = 10.0
SAMPLE_S = 1.0  # between two samples of the throughput
BUSY_SAMPLES = 10


@dataclass(frozen=True)
class Replica:
    """One replica at one moment.

    Attributes:
      is_up: whether it takes requests.
      load: the latest that it has sent.
      pool_tokens: the size of its KV pool, 0 until it is ready and once it is dead.
      kernels: operation, backend and verdict of each kernel that was tested at its start.
      hosts: those that share the model, if there are several.
    """

    is_up: bool
    load: Load
    pool_tokens: int
    kernels: tuple[tuple[str, str, str], ...] = ()
    hosts: tuple[HostState, ...] = ()

    @property
    def token_usage(self) -> float:
        """Share of the KV pool that running samples need, 0 to 1."""
        return self.load.used_tokens / self.pool_tokens if self.pool_tokens else 0.0


@dataclass(frozen=True)
class Snapshot:
    """The engine at one moment, or all replicas of it together.

    `pool_tokens` is the size of the KV pool, 0 until the engine is ready.
    """

    load: Load
    rates: Rates
    pool_tokens: int
    replicas: Sequence[Replica] = ()

    @property
    def token_usage(self) -> float:
        """Share of the KV pool that running samples need, 0 to 1."""
        return self.load.used_tokens / self.pool_tokens if self.pool_tokens else 0.0

    def kernels(self) -> dict[tuple[str, str, str], float]:
        """Returns 1 for each operation, backend and verdict of a test at the start."""
        return {kernel: 1.0 for replica in self.replicas for kernel in replica.kernels}

    def step_histograms(self) -> dict[tuple[str, str], Histogram]:
        """Returns how long steps took, by kind and bucket."""
        empty = Histogram(STEP_BOUNDS_S)
        return {
            (times.kind, times.bucket): empty.with_state(times.counts, times.seconds)
            for times in unpack_times(self.load.step_times)
        }

    def step_seconds(self) -> dict[str, float]:
        """Returns how long all steps of each kind took together."""
        seconds = {"decode": 0.0, "extend": 0.0}
        for times in unpack_times(self.load.step_times):
            seconds[times.kind] = seconds.get(times.kind, 0.0) + times.seconds
        return seconds


class Metrics:
    """All that is measured. A request with n samples counts as n: that is what the engine runs.

    Attributes:
      finished: samples that ended, by reason; those that the client left count as aborted.
      errors: requests that ended with an error, by the error's name.
      prepare_s: from a request's arrival until it is tokenized and checked.
      queue_s: from a sample's arrival in the engine to its admission.
      prefill_s: from there to its first token.
      decode_s: from a sample's first token to its last.
      inference_s: from admission to the last token.
      first_token_s: from submission to a sample's first token.
      inter_token_s: between two tokens of a sample.
      request_s: from submission to a sample's end. Aborted samples are left out here and in the lengths.
      prompt_tokens, output_tokens: lengths of samples that ended.
      throughput: how fast the engine works now, or all replicas together.
      of_replicas: the same of each replica.
      clock: gives seconds.
      log_lines: counts of log lines: those dropped because standard error did not take them.
    """

    def __init__(
        self,
        load: Callable[[], Load],
        clock: Callable[[], float] = time.monotonic,
        log_lines: Counter[str] | None = None,
        replicas: Callable[[], Sequence[Replica]] = tuple,
    ) -> None:
        """`load` gives the engine's latest load, `replicas` each replica's; `log_lines` is kept; logs.py counts it."""
        self._load = load
        self._replicas = replicas
        self.log_lines: Counter[str] = Counter(dropped=0) if log_lines is None else log_lines
        self.clock = clock
        self.throughput = Throughput(load, clock)
        self.of_replicas = [self.throughput]
        if (num_replicas := len(replicas())) > 1:
            self.of_replicas = [Throughput(partial(self._load_of, rank), clock) for rank in range(num_replicas)]
        self.finished: Counter[str] = Counter({reason.value: 0 for reason in FinishReason})
        self.errors: Counter[str] = Counter()
        self.prepare_s = Histogram(one_two_five(1e-4, 10))
        self.queue_s = Histogram(one_two_five(1e-4, 5000))
        self.prefill_s = Histogram(one_two_five(1e-3, 500))
        self.decode_s = Histogram(one_two_five(1e-2, 5000))
        self.inference_s = Histogram(one_two_five(1e-2, 5000))
        self.first_token_s = Histogram(one_two_five(1e-3, 500))
        self.inter_token_s = Histogram(one_two_five(5e-4, 10))
        self.request_s = Histogram(one_two_five(1e-2, 5000))
        self.prompt_tokens = Histogram(one_two_five(1, 1e6))
        self.output_tokens = Histogram(one_two_five(1, 1e6))

    def snapshot(self) -> Snapshot:
        """Returns the engine's load and rates now."""
        replicas = self._replicas()
        pool_tokens = sum(replica.pool_tokens for replica in replicas)
        return Snapshot(self._load(), self.throughput.rates(), pool_tokens, replicas)

    def sample(self) -> None:
        """Remembers the latest loads; must be called about once a second."""
        self.throughput.sample()
        if len(self.of_replicas) > 1:
            for throughput in self.of_replicas:
                throughput.sample()

    async def keep_sampling(self) -> None:
        """Samples until it is cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(SAMPLE_S)

    def _load_of(self, rank: int) -> Load:
        return self._replicas()[rank].load

    def failed(self, error: Exception) -> bool:
        """Counts a request that ended with `error`, and returns True.

        It ends all other requests of its call too, for which it isn't counted again.
        """
        if vars(error).get(_IS_COUNTED):
            return False
        vars(error)[_IS_COUNTED] = True
        self.errors[type(error).__name__] += 1
        return True

    @contextlib.contextmanager
    def counting_errors(self) -> Iterator[None]:
        """Counts an error that leaves this block as the end of a request."""
        try:
            yield
        except Exception as error:
            self.failed(error)
            raise


_IS_COUNTED = "_is_counted"  # an attribute of errors


class Timing:
    """The clock of one request. It starts when it is made; the request runs in its `with` block.

    Attributes:
      first_token_s: seconds until the first token of any sample, None until it comes.
      stages: what the engine said of the sample that had its first token first, None until then.
    """

    def __init__(self, metrics: Metrics, num_samples: int) -> None:
        self._metrics = metrics
        self._start_s = metrics.clock()
        self._first_s = [0.0] * num_samples
        self._last_s: list[float | None] = [None] * num_samples
        self._prefill_s = [0.0] * num_samples
        self._num_running = num_samples
        self._failed = False
        self.first_token_s: float | None = None
        self.stages: StageTimes | None = None

    @property
    def total_s(self) -> float:
        """Seconds since the start."""
        return self._metrics.clock() - self._start_s

    def tokens(self, index: int, count: int) -> None:
        """Counts `count` tokens that sample `index` got at once, as if they had come at equal intervals.

        For tokens that come together with the first one no interval is known, so none is counted.
        """
        now_s = self._metrics.clock()
        last_s = self._last_s[index]
        self._last_s[index] = now_s
        if last_s is not None:
            self._metrics.inter_token_s.observe((now_s - last_s) / count, count)
            return
        self._first_s[index] = now_s
        self._metrics.first_token_s.observe(now_s - self._start_s)
        if self.first_token_s is None:
            self.first_token_s = now_s - self._start_s

    def engine_times(self, index: int, stages: StageTimes) -> None:
        """Counts what sample `index` spent in the engine before its first token."""
        self._metrics.queue_s.observe(stages.queue_s)
        self._metrics.prefill_s.observe(stages.prefill_s)
        self._prefill_s[index] = stages.prefill_s
        if self.stages is None:
            self.stages = stages

    def sample_ended(self, index: int, end: End) -> None:
        """Counts that sample `index` ended."""
        self._num_running -= 1
        metrics = self._metrics
        metrics.finished[end.reason.value] += 1
        if end.reason is not FinishReason.ABORT:
            metrics.request_s.observe(self.total_s)
            decode_s = (self._last_s[index] or self._first_s[index]) - self._first_s[index]
            metrics.decode_s.observe(decode_s)
            metrics.inference_s.observe(self._prefill_s[index] + decode_s)
            metrics.prompt_tokens.observe(end.prompt_tokens)
            metrics.output_tokens.observe(end.completion_tokens)

    def failed(self, error: Exception) -> None:
        """Counts that `error` has ended the request."""
        self._failed = self._metrics.failed(error)

    def __enter__(self) -> Timing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Ends the request, with or without an error.

        Samples that the client left count as aborted, and those that an error of another request of the call has ended.
        """
        if isinstance(error, Exception) and not self._failed:
            self._failed = self._metrics.failed(error)
        if not self._failed:
            self._metrics.finished[FinishReason.ABORT.value] += self._num_running


@dataclass(frozen=True)
class Rates:
    """The engine's rates over about the last `WINDOW_S` seconds, or since the first look at its load.

    Attributes:
      output_tokens_per_s: tokens read from the device.
      prompt_tokens_per_s: prompt tokens of admitted samples, cached or not.
      cache_hit_rate: share of prompt tokens that the prefix cache had; if no prompt came, the last known share.
      accept_length: tokens that a sample got of a step that verified drafts for it; if none did, the last known number,
        0 before the first.
      accept_rate: share of such drafts that was accepted, likewise.
      busy_tokens_per_s: output tokens per second over the last intervals in which the engine had work, however long
        ago. Gateways estimate waiting times from it, so it must not fall while the engine is idle. 0: not known yet.
    """

    output_tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    cache_hit_rate: float = 0.0
    accept_length: float = 0.0
    accept_rate: float = 0.0
    busy_tokens_per_s: float = 0.0


class Throughput:
    """Rates over a sliding window of loads, from their differences.

    `load` gives the engine's latest load, `clock` seconds. `sample` must be called about once a second.
    """

    def __init__(self, load: Callable[[], Load], clock: Callable[[], float]) -> None:
        self._load = load
        self._clock = clock
        self._loads = deque([(clock(), load())])
        self._busy: deque[tuple[float, int]] = deque(maxlen=BUSY_SAMPLES)  # seconds and output tokens between samples
        self._cache_hit_rate = self._accept_length = self._accept_rate = 0.0

    def sample(self) -> None:
        """Remembers the latest load. Must be called several times in `WINDOW_S`."""
        now_s, load = self._clock(), self._load()
        before_s, before = self._loads[-1]
        if before.num_running and load.num_running and now_s > before_s:
            self._busy.append((now_s - before_s, load.totals.output_tokens - before.totals.output_tokens))
        self._loads.append((now_s, load))
        # Samples come a little more than a second apart, so that none is of exactly the window's start: the one before
        # it is kept, for what was done in between. One from before a long silence (the model was loaded) is not.
        start_s = now_s - WINDOW_S
        while self._loads[0][0] < start_s - 2 * SAMPLE_S or (len(self._loads) > 1 and self._loads[1][0] <= start_s):
            self._loads.popleft()

    def rates(self) -> Rates:
        """Returns the rates from the oldest load in the window to the latest."""
        since_s, old = self._loads[0]
        new = self._load()
        seconds = max(self._clock() - since_s, 1e-9)
        prompt_tokens = new.totals.prompt_tokens - old.totals.prompt_tokens
        if prompt_tokens:
            cached_tokens = new.totals.cached_prompt_tokens - old.totals.cached_prompt_tokens
            self._cache_hit_rate = cached_tokens / prompt_tokens
        before, after = old.speculation, new.speculation
        if after.runs > before.runs:
            accepted = after.accepted_tokens - before.accepted_tokens
            self._accept_length = 1 + accepted / (after.runs - before.runs)
            self._accept_rate = accepted / (after.draft_tokens - before.draft_tokens)
        return Rates(
            output_tokens_per_s=(new.totals.output_tokens - old.totals.output_tokens) / seconds,
            prompt_tokens_per_s=prompt_tokens / seconds,
            cache_hit_rate=self._cache_hit_rate,
            accept_length=self._accept_length,
            accept_rate=self._accept_rate,
            busy_tokens_per_s=sum(tokens for _, tokens in self._busy) / (sum(s for s, _ in self._busy) or 1.0),
        )


class Histogram:
    """Counts values up to each of `bounds` (ascending), and above the last.

    An observation costs one bisection: prometheus_client's histogram takes a lock for each of two numbers, and counts
    one value at a time.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts `value` as `times` equal ones."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def state(self) -> tuple[list[int], float]:
        """Returns the number of values in each bucket, the last one without a bound, and the sum of all values."""
        return list(self._counts), self.sum

    def with_state(self, counts: list[int], total: float) -> Histogram:
        """Returns another histogram with the same bounds, and a `state` of its own."""
        other = Histogram(self._bounds)
        other._counts, other.sum = list(counts), total
        return other

    def buckets(self) -> list[tuple[str, float]]:
        """Returns (bound, number of values up to it) for each bound and infinity, as Prometheus wants them."""
        bounds = [*map(str, self._bounds), "+Inf"]
        return [(bound, float(count)) for bound, count in zip(bounds, itertools.accumulate(self._counts), strict=True)]


def one_two_five(first: float, last: float) -> tuple[float, ...]:
    """Returns the bounds 1, 2, 5, 10, 20, ... times a power of ten, from `first` to `last`."""
    series = (float(f"{digit}e{power}") for power in range(-9, 10) for digit in (1, 2, 5))
    return tuple(bound for bound in series if first <= bound <= last)
