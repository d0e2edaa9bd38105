"""A scheduler for pipeline stages, with a fake engine that takes no step which such an engine could not run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.messages.orders import ToEngine
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.request_table import InTurns
from jaxsgl.testing.engine import FakeEngine, FakeHandle, ScriptedMailbox
from tests.checked import CheckedScheduler


class StagedFake(FakeEngine):
    """Refuses tokens that only its last stage would know.

    Attributes:
      steps: all, in order.
    """

    def __init__(self, capacity: Capacity, step_s: float = 0.0) -> None:
        super().__init__(capacity, step_s)
        self.steps: list[StepInputs] = []

    def submit(self, inputs: StepInputs) -> FakeHandle:
        assert (inputs.arrays.token_ids >= 0).all(), "the first stage does not know the tokens of the last one"
        self.steps.append(inputs)
        return super().submit(inputs)

    def rows(self, kind: str) -> list[list[int]]:
        """The rows of each step of that kind."""
        return [step.arrays.rows[: step.num_seqs].tolist() for step in self.steps if step.bucket.kind == kind]


class TimedStages(StagedFake):
    """Stages that take a second each for their part of any step; the host takes no time.

    Attributes:
      now_s: when the host has read what it has read so far.
      ends_s: when each step was read.
    """

    def __init__(self, capacity: Capacity, num_stages: int) -> None:
        super().__init__(capacity)
        self.now_s = 0.0
        self.ends_s: list[float] = []
        self._free_s = [0.0] * num_stages

    def submit(self, inputs: StepInputs) -> FakeHandle:
        handle, done_s = super().submit(inputs), self.now_s
        for stage, free_s in enumerate(self._free_s):
            done_s = self._free_s[stage] = max(free_s, done_s) + 1.0
        read = handle.tokens

        def tokens() -> npt.NDArray[np.int32]:
            self.now_s = max(self.now_s, done_s)
            self.ends_s.append(self.now_s)
            return read()

        handle.tokens = tokens  # type: ignore[method-assign]
        return handle


class OneAtATime(CheckedScheduler):
    """Checks that no request is in two steps in flight that sample a token for it."""

    def launch(self) -> StepInputs | None:
        inputs = super().launch()
        sampling = [
            req.key
            for step in self._applier._in_flight
            for req, number in zip(step.reqs, step.lease_numbers, strict=True)
            if req.lease_number == number and req not in step.silent
        ]
        assert len(sampling) == len(set(sampling)), "a request decodes in two steps at once"
        return inputs


def serve_staged(
    sizes: Capacity,
    script: Sequence[Sequence[ToEngine]],
    num_stages: int,
    depth: int = 0,
    config: SchedulingConfig = SchedulingConfig(),
) -> tuple[ScriptedMailbox, TimedStages]:
    """Runs the loop over `script` until all is served, as an engine of `num_stages` is driven."""
    scheduler = OneAtATime(sizes, BucketSet.derive(sizes), (), config, turns=InTurns(num_stages + depth))
    mailbox, engine = ScriptedMailbox(script), TimedStages(sizes, num_stages)
    run_loop(scheduler, engine, mailbox, num_stages - 1 + depth, check_every_step=True)
    assert scheduler.is_idle and scheduler.cache.num_available == sizes.num_pages - 1
    return mailbox, engine
