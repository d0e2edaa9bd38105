"""How long the parts of a start take: logged at level debug, on the clock and of the processor.

The clock alone misleads where other programs run: a part that waited for a processor looks slow.
"""

from __future__ import annotations

import resource
import time


class StartParts:
    """Counts the parts of a start that follow one another, from when it is made."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, float, float]] = []
        self._since = _now()

    def end(self, name: str) -> None:
        """Notes that a part has ended here, and the next one begins."""
        now = _now()
        self._parts.append((name, now[0] - self._since[0], now[1] - self._since[1]))
        self._since = now

    def __str__(self) -> str:
        """All parts, as `weights 0.1 s (0.1 of the processor)`; children that have ended, such as compilers, count."""
        return ", ".join(
            f"{name} {clock_s:.1f} s ({cpu_s:.1f} of the processor)" for name, clock_s, cpu_s in self._parts
        )


def _now() -> tuple[float, float]:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic(), own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
