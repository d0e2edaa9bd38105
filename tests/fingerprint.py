"""A value that changes with anything in a graph of Python objects."""

from __future__ import annotations

import pickle
from io import BytesIO
from typing import Any


class _Pickler(pickle.Pickler):
    """Pickles functions, such as a test's clock, by identity."""

    def persistent_id(self, obj: Any) -> int | None:
        return id(obj) if callable(obj) and not isinstance(obj, type) else None


def fingerprint(state: Any) -> bytes:
    """All that `state` holds, objects that it shares with others included."""
    buffer = BytesIO()
    _Pickler(buffer).dump(state)
    return buffer.getvalue()
