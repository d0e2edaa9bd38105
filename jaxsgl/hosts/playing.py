"""Both ends of the stream of calls: `LeadEngine`, which the loop of host 0 drives, and `play` on the other hosts.

On one host the loop drives the engine itself, so the stream costs nothing there. Knows no sockets and no JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from jaxsgl.batch.engine_api import MaskedHandle, StepEngine, StepHandle
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.outputs import HostOutputs
from jaxsgl.hosts.calls import Call, Choose, Step

Send: TypeAlias = Callable[[Call], None]


class LeadEngine:
    """The engine of host 0, as the serving loop has it: a `StepEngine` whose calls go to the other hosts, too.

    Args:
      engine: that of this host.
      send: sends a call to all other hosts, in order.
    """

    def __init__(self, engine: StepEngine, send: Send) -> None:
        self._engine = engine
        self._send = send

    def submit(self, inputs: StepInputs) -> StepHandle:
        """See `StepEngine`. The call leaves first, so that all hosts launch at about the same time."""
        self._send(Step.of(inputs))
        handle = self._engine.submit(inputs)
        return _ChosenEverywhere(handle, self._send) if inputs.masked else handle

    @property
    def recompiles(self) -> int:
        """Of this host; see `StepEngine`."""
        return self._engine.recompiles

    def start_profile(self, folder: str) -> None:
        """Records this host alone; see `StepEngine`."""
        self._engine.start_profile(folder)

    def stop_profile(self) -> None:
        """See `StepEngine`."""
        self._engine.stop_profile()


class LeadStages(LeadEngine):
    """The same for pipeline stages, of which host 0 has the last one: others choose no tokens, so they get no more of a
    step than what their layers take.
    """

    def submit(self, inputs: StepInputs) -> StepHandle:
        """See `StepEngine`."""
        self._send(Step.of(replace(inputs, features=None, masked=False)))
        return self._engine.submit(inputs)


class _ChosenEverywhere:
    """A masked step of all hosts; a `MaskedHandle`."""

    def __init__(self, handle: StepHandle, send: Send) -> None:
        self._handle = handle
        self._send = send

    def choose(self, masks: npt.NDArray[np.uint32]) -> None:
        """See `MaskedHandle`."""
        self._send(Choose(masks))
        cast(MaskedHandle, self._handle).choose(masks)

    def tokens(self) -> npt.NDArray[np.int32]:
        """See `StepHandle`."""
        return self._handle.tokens()

    def outputs(self) -> HostOutputs:
        """See `StepHandle`."""
        return self._handle.outputs()

    def drafts(self) -> npt.NDArray[np.int32]:
        """See `StepHandle`."""
        return self._handle.drafts()


def play(calls: Iterable[Call], engine: StepEngine, launched: Callable[[StepHandle], None]) -> None:
    """Makes `calls` of `engine`, in order, until they end. Gives each step to `launched` once its tokens will come."""
    masked: StepHandle | None = None
    for call in calls:
        match call:
            case Step():
                handle = engine.submit(call.inputs)
                if call.masked:
                    masked = handle
                else:
                    launched(handle)
            case Choose(masks):
                assert masked is not None, "masks came without a step that waits for them"
                cast(MaskedHandle, masked).choose(masks)
                launched(masked)
                masked = None
