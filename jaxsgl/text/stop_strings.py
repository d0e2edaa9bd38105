"""Finds stop strings in text that comes in pieces, however it is cut. Knows no tokens and no requests.

Text that may turn out to be the beginning of a stop string is held back; all other text flows on at once. The first
stop string to be complete ends the text, as if it were read character by character.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Reads one text up to the first of `strings`.

    Attributes:
      matched: the stop string that was found; the text has ended with it.
    """

    def __init__(self, strings: Sequence[str], keep: bool) -> None:
        """`keep`: the stop string is part of the text that comes out."""
        self._strings = strings
        self._keep = keep
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Returns what can be said for certain to belong to the text. Nothing may be fed after a match."""
        if not self._strings:
            return text
        pending = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._strings if (start := pending.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)  # complete first; of several, the longest
            self._held = ""
            return pending[: end if self._keep else start]
        split = len(pending) - self._hold_len(pending)
        self._held = pending[split:]
        return pending[:split]

    def finish(self) -> str:
        """Returns what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _hold_len(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = min(len(text), max(map(len, self._strings), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._strings):
                return length
        return 0
