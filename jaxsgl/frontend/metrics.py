"""What the front end counts and times of its requests, and what it knows of the engine, for whoever monitors it.

generation.py tells of each request through a `Timing`; the engine's numbers are read from its latest load when somebody
asks, so that a step costs nothing. Knows no Prometheus: exposition.py names all this. Used by one thread.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jaxsgl.frontend.histogram import Histogram, one_two_five
from jaxsgl.frontend.throughput import Rates, Throughput
from jaxsgl.messages import EngineInfo, Load
from jaxsgl.request import FinishReason
from jaxsgl.text.sample import End


@dataclass(frozen=True)
class Snapshot:
    """The engine at one moment. `pool_tokens` is the size of its KV pool, 0 until it is ready."""

    load: Load
    rates: Rates
    pool_tokens: int

    @property
    def token_usage(self) -> float:
        """Share of the KV pool that running samples need, 0 to 1."""
        return self.load.used_tokens / self.pool_tokens if self.pool_tokens else 0.0


class Metrics:
    """All that is measured. A request with n samples counts as n: that is what the engine runs.

    Attributes:
      finished: samples that ended, by the reason; those that the client left count as aborted.
      errors: requests that ended with an error, by its name.
      first_token_s: from submission to a sample's first token.
      inter_token_s: between tokens of a sample.
      request_s: from submission to a sample's end, aborted ones left out, as in the following.
      prompt_tokens, output_tokens: lengths.
      clock: gives seconds.
    """

    def __init__(
        self, load: Callable[[], Load], throughput: Throughput, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._load = load
        self.clock = clock
        self._throughput = throughput
        self._pool_tokens = 0
        self.finished: Counter[str] = Counter({reason.value: 0 for reason in FinishReason})
        self.errors: Counter[str] = Counter()
        self.first_token_s = Histogram(one_two_five(1e-3, 500))
        self.inter_token_s = Histogram(one_two_five(5e-4, 10))
        self.request_s = Histogram(one_two_five(1e-2, 5000))
        self.prompt_tokens = Histogram(one_two_five(1, 1e6))
        self.output_tokens = Histogram(one_two_five(1, 1e6))

    def serve(self, info: EngineInfo) -> None:
        """The engine is ready."""
        self._pool_tokens = info.limits.pool_tokens

    def snapshot(self) -> Snapshot:
        """The engine now."""
        return Snapshot(self._load(), self._throughput.rates(), self._pool_tokens)

    def failed(self, error: Exception) -> None:
        """A request ended with `error`."""
        self.errors[type(error).__name__] += 1

    @contextlib.contextmanager
    def counting_errors(self) -> Iterator[None]:
        """Whatever ends this block with an error ends a request so."""
        try:
            yield
        except Exception as error:
            self.failed(error)
            raise


class Timing:
    """The clock of one request, which runs in its `with` block. It starts when made.

    Attributes:
      first_token_s: seconds until the first token of any sample, None until it comes.
    """

    def __init__(self, metrics: Metrics, num_samples: int) -> None:
        self._metrics = metrics
        self._start_s = metrics.clock()
        self._last_s: list[float | None] = [None] * num_samples
        self._num_running = num_samples
        self.first_token_s: float | None = None

    @property
    def total_s(self) -> float:
        """Seconds since the start."""
        return self._metrics.clock() - self._start_s

    def tokens(self, index: int, count: int) -> None:
        """Sample `index` got `count` tokens at once, which count as if they had come at equal distances.

        Tokens that come together with the first one have no distance that could be told, and are not counted.
        """
        now_s = self._metrics.clock()
        last_s = self._last_s[index]
        self._last_s[index] = now_s
        if last_s is not None:
            self._metrics.inter_token_s.observe((now_s - last_s) / count, count)
            return
        self._metrics.first_token_s.observe(now_s - self._start_s)
        if self.first_token_s is None:
            self.first_token_s = now_s - self._start_s

    def sample_ended(self, end: End) -> None:
        """A sample came to its end."""
        self._num_running -= 1
        metrics = self._metrics
        metrics.finished[end.reason.value] += 1
        if end.reason is not FinishReason.ABORT:
            metrics.request_s.observe(self.total_s)
            metrics.prompt_tokens.observe(end.prompt_tokens)
            metrics.output_tokens.observe(end.completion_tokens)

    def __enter__(self) -> Timing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """The request is over, by an error or not; samples that the client left count as aborted."""
        if isinstance(error, Exception):
            self._metrics.failed(error)
        else:
            self._metrics.finished[FinishReason.ABORT.value] += self._num_running
