"""Finds the oldest items that a conversation of the Responses API must lose so that its prompt fits the context.

`truncation: "auto"` asks for it. Knows items, and nothing of prompts: whether one fits is asked. responses.py calls it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.request import TOO_LONG

PreparedT = TypeVar("PreparedT")
Item = dict[str, Any]


async def fitting(items: Sequence[Item], prepare: Callable[[Sequence[Item]], Awaitable[PreparedT]]) -> PreparedT:
    """Returns what `prepare` makes of the most items that fit, the newest. Raises what it raises for the fewest.

    It is called for about log2(len(items)) conversations.
    """
    try:
        return await prepare(items)
    except InvalidRequest as error:
        if error.code != TOO_LONG:
            raise
        reason = error
    places = cuts(items)
    best: PreparedT | None = None
    low, high = 0, len(places) - 1
    while low <= high:
        middle = (low + high) // 2
        try:
            best = await prepare(_after(items, places[middle]))
            high = middle - 1
        except InvalidRequest as error:
            if error.code != TOO_LONG:
                raise
            reason, low = error, middle + 1
    if best is None:
        raise reason
    return best


def cuts(items: Sequence[Item]) -> list[int]:
    """Returns where a conversation may begin instead: at a user's turn, or after the last one, with a new round.

    A call's output is never kept without the call.
    """
    places = [place for place, item in enumerate(items) if _is_message(item) and item.get("role") == "user"]
    last = places[-1] if places else 0
    is_output = [item.get("type") == "function_call_output" for item in items]
    places += [place for place in range(last + 1, len(items)) if is_output[place - 1] and not is_output[place]]
    return [place for place in places if place > 0]


def _after(items: Sequence[Item], place: int) -> list[Item]:
    """Returns the items from `place` on, and the instructions among those before."""
    kept = [item for item in items[:place] if _is_message(item) and item.get("role") in ("system", "developer")]
    return [*kept, *items[place:]]


def _is_message(item: Item) -> bool:
    return item.get("type", "message") == "message"
