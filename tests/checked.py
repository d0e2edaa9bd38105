"""A scheduler that checks itself after every event and keeps what it launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxsgl.batch.engine_api import StepScores
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.scheduler.scheduler import NO_SCORES, Scheduler


class CheckedScheduler(Scheduler):
    """Integrity after every launch and collect."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.launched: list[StepInputs] = []

    def launch(self) -> StepInputs | None:
        inputs = super().launch()
        if inputs is not None:
            self.launched.append(inputs)
        self.check()
        return inputs

    def collect(self, tokens: Sequence[int] | np.ndarray, scores: StepScores = NO_SCORES) -> None:
        super().collect(tokens, scores)
        self.check()
