"""Bounds of numbers that clients send, and the checks of types and values that raise `InvalidRequest`.

Used by everything that checks a request before it reaches the engine: sampling.py, request.py, the schemas.
"""

from __future__ import annotations

from numbers import Real
from typing import NamedTuple

from jaxsgl.errors import InvalidRequest


class Bounds(NamedTuple):
    """The values that a number may have: `low` to `high`, without `low` itself if `above_low`.

    `words` say so in errors; an `optional` number may be None.
    """

    low: float
    high: float
    words: str
    above_low: bool = False
    optional: bool = False

    def hold(self, value: float | None) -> bool:
        """Returns whether `value` is inside; NaN never is."""
        if value is None:
            return self.optional
        return (self.low < value if self.above_low else self.low <= value) and value <= self.high


def check_integer(name: str, value: object, optional: bool = True) -> None:
    """Raises `InvalidRequest` unless `value` is an integer, or None where it is optional; True and False are none."""
    if not (value is None and optional) and (not isinstance(value, int) or isinstance(value, bool)):
        raise InvalidRequest(f"{name} is {value!r:.100}, but must be an integer")


def check_number(name: str, value: object) -> None:
    """Raises `InvalidRequest` unless `value` is a real number; True and False are none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InvalidRequest(f"{name} is {value!r:.100}, but must be a number")


def check_bounds(name: str, value: float | None, bounds: Bounds) -> None:
    """Raises `InvalidRequest` unless `value` is within `bounds`."""
    check(bounds.hold(value), name, value, bounds.words)


def check(ok: bool, name: str, value: float | None, allowed: str) -> None:
    """Raises `InvalidRequest` with the value and what is `allowed`, unless `ok`."""
    if not ok:
        raise InvalidRequest(f"{name} is {value}, but must be {allowed}")
