"""A value that changes with anything in a graph of Python objects."""

from __future__ import annotations

import pickle
from io import BytesIO
from typing import Any

from jaxsgl.requests.grammar_work import GrammarWork


class _Pickler(pickle.Pickler):
    """Pickles functions, such as a test's clock, by identity, and what measures processor time: to ask takes some."""

    def persistent_id(self, obj: Any) -> int | None:
        is_function = callable(obj) and not isinstance(obj, type)
        return id(obj) if is_function or isinstance(obj, GrammarWork) else None


def fingerprint(state: Any) -> bytes:
    """All that `state` holds, objects that it shares with others included."""
    buffer = BytesIO()
    _Pickler(buffer).dump(state)
    return buffer.getvalue()
