"""A thread that launches steps in order, so that the serving loop doesn't wait for JAX on several devices.

A launch hands every array over once per device, which on eight devices takes twice as long as on one, and longer than
planning the step. Owns the thread and the order; never knows what a step is. Called by `engine` on a mesh of several
devices; on one device the serving loop launches by itself.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from jaxsgl.batch.engine_api import MaskedHandle, StepHandle, StepScores

T = TypeVar("T")


class Launcher:
    """Launches steps one after another, in order. After a launch that failed, each other one fails with its error."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="launcher", daemon=True)
        self._thread.start()

    def launch(self, launch: Callable[[], StepHandle]) -> LaunchedHandle:
        """Has a step launched behind all others; returns at once."""
        return LaunchedHandle(self._put(launch))

    def settle(self) -> None:
        """Waits until all steps are launched. Raises the error of one that failed."""
        self._put(lambda: None).result()

    def close(self) -> None:
        """Ends the thread, behind the steps that wait for it."""
        self._calls.put(None)
        self._thread.join()

    def _put(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def _run(self) -> None:
        failure: BaseException | None = None
        while (item := self._calls.get()) is not None:
            future, call = item
            if failure is None:
                try:
                    future.set_result(call())
                    continue
                except BaseException as error:  # the one who asks for the result gets it
                    failure = error
            future.set_exception(failure)


class LaunchedHandle:
    """A step that is being launched. All methods wait for the launch and raise its error if it failed."""

    def __init__(self, launched: Future[StepHandle]) -> None:
        self._launched = launched

    def choose(self, masks: npt.NDArray[np.uint32]) -> None:
        """See `MaskedHandle`."""
        cast(MaskedHandle, self._launched.result()).choose(masks)

    def tokens(self) -> npt.NDArray[np.int32]:
        """See `StepHandle`."""
        return self._launched.result().tokens()

    def scores(self) -> StepScores:
        """See `StepHandle`."""
        return self._launched.result().scores()
