"""A step of a fake engine that was launched. `FakeEngine` makes it, and runs it as late as possible."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from jaxsgl.batch.engine_api import StepScores
from jaxsgl.batch.inputs import StepInputs


class FakeHandle:
    """A launched fake step."""

    def __init__(self, run_oldest: Callable[[], None], inputs: StepInputs, ready_at: float) -> None:
        self.inputs = inputs
        self._run_oldest = run_oldest
        self._ready_at = ready_at
        self.result: tuple[npt.NDArray[np.int32], StepScores] | None = None
        self.masks: npt.NDArray[np.uint32] | None = None

    def choose(self, masks: npt.NDArray[np.uint32]) -> None:
        """Keeps the masks for the time when the step runs."""
        assert self.inputs.masked and self.masks is None
        assert len(masks) == self.inputs.bucket.num_seqs
        self.masks = masks

    def tokens(self) -> npt.NDArray[np.int32]:
        """Runs all steps up to this one, in order; waits until the fake device would be done."""
        return self._wait()[0]

    def scores(self) -> StepScores:
        """Likewise."""
        return self._wait()[1]

    def _wait(self) -> tuple[npt.NDArray[np.int32], StepScores]:
        while self.result is None:
            self._run_oldest()
        delay = self._ready_at - time.perf_counter()
        if delay > 0:
            time.sleep(delay)
        return self.result
