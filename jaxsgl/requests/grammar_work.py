"""`GrammarWork`: the processor time that a grammar takes for one output, its limit, and the mark of whose it is.

Following a grammar is native code on a client's data, and in the engine all others wait meanwhile. So each call of a
sample's matcher (scheduler/grammars/constraint.py) stands inside of its `GrammarWork`, and the trial of a grammar
(constraints/trial.py) is held to the same limit. Knows no grammar.
"""

from __future__ import annotations

import time
from typing import Protocol

from jaxsgl.errors import InvalidRequest
from jaxsgl.mask_mark import NoMark

CPU_S, CPU_S_PER_TOKEN = 0.5, 0.005


class Mark(Protocol):
    """Notes whose grammar is worked on, where it is found if this process dies meanwhile."""

    def begin(self, request_id: str) -> None:
        """Work on the grammar of that request begins."""
        ...

    def end(self) -> None:
        """It is done."""
        ...


class GrammarWork:
    """Measures what runs inside of it, as a context manager, and marks it; four microseconds each time.

    Args:
      mark: notes whose work runs.
      request_id: whose it is.

    Attributes:
      cpu_s: what it has taken so far, in seconds of processor time.
    """

    __slots__ = ("_mark", "_request_id", "_start_s", "cpu_s")

    def __init__(self, mark: Mark = NoMark(), request_id: str = "") -> None:
        self._mark, self._request_id = mark, request_id
        self.cpu_s = self._start_s = 0.0

    def __enter__(self) -> None:
        self._mark.begin(self._request_id)
        self._start_s = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.cpu_s += time.thread_time() - self._start_s
        self._mark.end()

    def check(self, num_tokens: int, num_ahead: int = 0) -> None:
        """Raises `InvalidRequest` if it took more than it may for an output of `num_tokens`, and `num_ahead` drafts."""
        if self.cpu_s > CPU_S + CPU_S_PER_TOKEN * (num_tokens + num_ahead):
            raise InvalidRequest(
                f"the grammar took {self.cpu_s:.1f} s for {num_tokens} tokens, for which others wait, but "
                f"{CPU_S:g} s and {1000 * CPU_S_PER_TOKEN:g} ms a token are the most: simplify it"
            )
