"""Answers of /v1/responses by their ids, with the conversations that led to them, within `--responses-store` MiB.

Owns what is kept, and lets go of what was used least lately. An answer is found by callers of the tenant that got it
alone. Knows no format: responses.py puts bytes in. One front-end process's; several would each know other answers.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from jaxsgl.errors import InvalidRequest, NotFound
from jaxsgl.frontend.access import cache_namespace


class Stored(NamedTuple):
    """An answer, and the items of the whole conversation up to and with it, both as JSON."""

    answer: bytes
    items: bytes


class ResponseStore:
    """Keeps answers in at most `max_bytes`; 0: none."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._stored: OrderedDict[tuple[str, str], Stored] = OrderedDict()  # by tenant and id; used last comes last

    @property
    def is_on(self) -> bool:
        """Whether any answer is kept."""
        return self._max_bytes > 0

    def put(self, response_id: str, stored: Stored) -> None:
        """Keeps an answer of the running caller; one that is larger than the whole store is not kept."""
        size = _size(stored)
        if size > self._max_bytes:
            return
        key = (cache_namespace(""), response_id)
        self._num_bytes += size - (_size(self._stored.pop(key)) if key in self._stored else 0)
        self._stored[key] = stored
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= _size(self._stored.popitem(last=False)[1])

    def get(self, response_id: str) -> Stored:
        """Returns an answer. Raises `NotFound` if it isn't kept, or not the running caller's."""
        key = (cache_namespace(""), response_id)
        if key not in self._stored:
            raise NotFound(f"no answer {response_id:.100} is stored here{self._way_out()}")
        self._stored.move_to_end(key)
        return self._stored[key]

    def delete(self, response_id: str) -> None:
        """Forgets an answer. Raises as `get`."""
        self.get(response_id)
        self._num_bytes -= _size(self._stored.pop((cache_namespace(""), response_id)))

    def items_of(self, response_id: str | None) -> bytes:
        """Returns the items of the conversation that a request continues. Raises `InvalidRequest` as OpenAI does."""
        if response_id is None:
            return b"[]"
        try:
            return self.get(response_id).items
        except NotFound as missing:
            error = InvalidRequest(f"previous_response_id: {missing}, or send the whole conversation in input")
            error.param, error.code = "previous_response_id", "previous_response_not_found"
            raise error from None

    def _way_out(self) -> str:
        if self.is_on:
            return ": it may have made room for others: raise --responses-store"
        return ": start the server with --responses-store MIB"


def _size(stored: Stored) -> int:
    return len(stored.answer) + len(stored.items) + 200  # and its entry
