"""How fast the engine works now: rates over the last seconds, from differences of its loads.

Owns the recent loads, taken once a second (status.py does so), so that a step costs nothing. Knows no protocol; the
metrics, the status line and the answers about load read it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from jaxsgl.messages import Load

WINDOW_S = 10.0
BUSY_SAMPLES = 10


@dataclass(frozen=True)
class Rates:
    """Over the last `WINDOW_S` seconds, or since the first sample if that is less long ago.

    Attributes:
      output_tokens_per_s: read from the device.
      busy_tokens_per_s: the same over the last samples between which the engine had work, however long ago: its speed.
        Gateways estimate waits by it, so it must not fall while nobody asks. 0: not known yet.
      prompt_tokens_per_s: of admitted samples, cached or not.
      steps_per_s: launched.
      cache_hit_rate: share of prompt tokens that the prefix cache had; if none came, that of the last ones that did.
    """

    output_tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    steps_per_s: float = 0.0
    cache_hit_rate: float = 0.0
    busy_tokens_per_s: float = 0.0


class Throughput:
    """Rates over a sliding window. `load` gives the latest load, `clock` seconds."""

    def __init__(self, load: Callable[[], Load], clock: Callable[[], float] = time.monotonic) -> None:
        self._load = load
        self._clock = clock
        self._loads = deque([(clock(), load())])
        self._busy: deque[tuple[float, int]] = deque(maxlen=BUSY_SAMPLES)  # seconds and output tokens between samples
        self._cache_hit_rate = 0.0

    def sample(self) -> None:
        """Remembers the latest load; to be called regularly, several times in `WINDOW_S`."""
        now_s, load = self._clock(), self._load()
        before_s, before = self._loads[-1]
        if before.num_running and load.num_running and now_s > before_s:
            self._busy.append((now_s - before_s, load.output_tokens_total - before.output_tokens_total))
        self._loads.append((now_s, load))
        while self._loads[0][0] < now_s - WINDOW_S:
            self._loads.popleft()

    def rates(self) -> Rates:
        """From the oldest load in the window to the latest."""
        since_s, old = self._loads[0]
        new = self._load()
        seconds = max(self._clock() - since_s, 1e-9)
        prompt_tokens = new.prompt_tokens_total - old.prompt_tokens_total
        if prompt_tokens:
            cached_tokens = new.cached_prompt_tokens_total - old.cached_prompt_tokens_total
            self._cache_hit_rate = cached_tokens / prompt_tokens
        return Rates(
            output_tokens_per_s=(new.output_tokens_total - old.output_tokens_total) / seconds,
            prompt_tokens_per_s=prompt_tokens / seconds,
            steps_per_s=(new.steps_total - old.steps_total) / seconds,
            cache_hit_rate=self._cache_hit_rate,
            busy_tokens_per_s=sum(tokens for _, tokens in self._busy) / (sum(s for s, _ in self._busy) or 1.0),
        )
