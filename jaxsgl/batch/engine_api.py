"""What the serving loop asks of an engine. The real one is `engine.Engine`, the fake one `testing.FakeEngine`."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from jaxsgl.batch.inputs import StepInputs


class StepHandle(Protocol):
    """A step that was launched."""

    def tokens(self) -> npt.NDArray[np.int32]:
        """Waits for the step; sampled token ids `[num_seqs]`, in the order of the batch."""
        ...


class StepEngine(Protocol):
    """Runs steps in the order in which they are submitted."""

    def submit(self, inputs: StepInputs) -> StepHandle:
        """Launches one step and returns at once; never waits for an earlier one."""
        ...
