"""Random histories that are cheap to draw and that Hypothesis can still shrink: a history is a string of bytes.

A rule-based state machine draws some hundred values for a history, and that takes longer than to play it with fakes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ValueT = TypeVar("ValueT")


class Choices:
    """Decisions, a byte for each. When the bytes are used up, the first of the values is taken."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._next = 0

    @property
    def are_over(self) -> bool:
        return self._next >= len(self._data)

    def one_of(self, values: Sequence[ValueT]) -> ValueT:
        """One of at most 256 values. Put simple ones first: examples shrink towards them."""
        byte = 0 if self.are_over else self._data[self._next]
        self._next += 1
        return values[byte % len(values)]


def check_histories(play: Callable[[Choices], None], num_histories: int, num_bytes: int) -> None:
    """Plays so many histories, each of so many bytes; a failure names the bytes of a simple one that fails."""

    @settings(max_examples=num_histories, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.binary(min_size=num_bytes, max_size=num_bytes))
    def check(data: bytes) -> None:
        play(Choices(data))

    check()
