"""A value that changes with anything in a graph of Python objects."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from io import BytesIO
from types import FunctionType, MethodType
from typing import Any


class _Pickler(pickle.Pickler):
    """Pickles functions, such as a test's clock, by identity."""

    def persistent_id(self, obj: Any) -> int | None:
        return id(obj) if isinstance(obj, FunctionType | MethodType | Callable) and not isinstance(obj, type) else None


def fingerprint(state: Any) -> bytes:
    """All that `state` holds, objects that it shares with others included."""
    buffer = BytesIO()
    _Pickler(buffer).dump(state)
    return buffer.getvalue()
