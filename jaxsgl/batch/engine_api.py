"""What the serving loop needs of an engine: the protocols `StepEngine`, `PageEngine` and `StepHandle`.

`engine.Engine` implements it on a device, `testing.engine.FakeEngine` without one.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from jaxsgl.batch.engine_ops import EngineOp, PageLayout
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.outputs import HostOutputs


class StepHandle(Protocol):
    """A step that was launched."""

    def tokens(self) -> npt.NDArray[np.int32]:
        """Waits for the step; sampled token ids `[num_seqs]`, in the order of the batch.

        A program of several steps yields `[num_steps, num_seqs]`; tokens after a sequence's own steps are undefined.
        """
        ...

    def outputs(self) -> HostOutputs:
        """Waits like `tokens`; what the batch asked for besides tokens."""
        ...


class MaskedHandle(StepHandle, Protocol):
    """A `masked` step that was launched: its tokens are chosen later."""

    def choose(self, masks: npt.NDArray[np.uint32]) -> None:
        """Launches what chooses the tokens of a `masked` step, and returns at once. Called before the next `submit`.

        `masks [S, ceil(V / 32)]`, with the padded S: bit i % 32 of word i // 32 says whether token i may be chosen. The
        caller doesn't change them any more.
        """
        ...


class StepEngine(Protocol):
    """Runs steps in the order in which they are submitted."""

    def submit(self, inputs: StepInputs) -> StepHandle:
        """Launches one step and returns at once; never waits for an earlier one."""
        ...

    @property
    def recompiles(self) -> int:
        """Programs compiled since the engine was ready; more than 0 is a bug."""
        ...

    def start_profile(self, folder: str) -> None:
        """Starts to record what device and host do.

        Raises OSError or ValueError if `folder` can't be made or written, RuntimeError if the profiler can't start.
        """
        ...

    def stop_profile(self) -> None:
        """Stops recording and writes the trace, which takes seconds; may be called from a thread beside `submit`.

        Raises the profiler's error if the trace can't be written. It is dropped then, and another may be started.
        """
        ...


class PageEngine(Protocol):
    """The operations of a `StepEngine` between steps, for which flags ask."""

    @property
    def page_layout(self) -> PageLayout:
        """What a page is in its host form."""
        ...

    def apply(self, op: EngineOp, number: int) -> None:
        """Submits an operation after the steps before, and returns at once; never waits for the device."""
        ...

    def poll(self, wait: bool = False) -> list[tuple[int, npt.NDArray[Any]]]:
        """What gathers have brought since the last call, with their numbers: pages in their host form, rows' bytes.

        Those of pages come in their order, and so do those of rows. With `wait`, waits for one if none has ended, and
        nothing but the device may be in the way of its end.
        """
        ...
