"""`EngineOps`: what the engine is to do between steps, in step order, and who takes what that brings to the host.

Adapters, pages and rows of images all go through the one queue of the scheduler's state. The loop takes it once a turn,
after a step is decided and before it is submitted: the step may write to pages that an operation frees, and read what
one writes. An operation on what the decided step itself writes goes `after_step`: it waits for the next turn, and is
then before all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy.typing as npt

from jaxsgl.batch.engine_api import EngineOp

HostArray: TypeAlias = npt.NDArray[Any]


class EngineOps:
    """Numbers operations, and keeps them until the engine has them or what they bring has come.

    Attributes:
      queued: operations that the engine does not have yet. `take` is to be called if there are any.
      waiting: operations whose results have not come.
    """

    def __init__(self) -> None:
        self.queued = 0
        self.waiting = 0
        self._queue: list[tuple[int, EngineOp]] = []
        self._after_step: list[tuple[int, EngineOp]] = []
        self._done: dict[int, Callable[[HostArray], None]] = {}
        self._num_ops = 0

    def submit(
        self, op: EngineOp, done: Callable[[HostArray], None] | None = None, *, after_step: bool = False
    ) -> None:
        """Queues `op`; one that brings something to the host has a `done`, which gets it.

        With `after_step` the engine does it after the step that is being decided, not before.
        """
        self._num_ops += 1
        (self._after_step if after_step else self._queue).append((self._num_ops, op))
        self.queued += 1
        if done is not None:
            self.waiting += 1
            self._done[self._num_ops] = done

    def take(self) -> list[tuple[int, EngineOp]]:
        """The operations to apply now, in order, each with its number."""
        taken, self._queue, self._after_step = self._queue, self._after_step, []
        self.queued -= len(taken)
        return taken

    def finished(self, results: Iterable[tuple[int, HostArray]]) -> None:
        """Hands over what operations of these numbers have brought."""
        for number, array in results:
            self.waiting -= 1
            self._done.pop(number)(array)
