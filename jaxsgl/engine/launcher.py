"""Steps in flight: what the host reads of one, and a thread that launches them in order on several devices.

A launch hands every array over once per device, which on eight devices takes twice as long as on one, and longer than
planning the step. So on a mesh of several devices a thread launches, and the serving loop doesn't wait for JAX; on one
device the serving loop launches by itself. One thread launches all that a step runs, the choice by masks too: XLA runs
programs of two threads side by side on a CPU, and hosts whose devices exchange something in two programs at a time may
do so in different orders. Knows no program; made and called by `engine` and `stages`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import jax
import numpy as np
import numpy.typing as npt

from jaxsgl.batch.engine_api import MaskedHandle, StepHandle
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.outputs import NO_OUTPUTS, HostOutputs, StepOutputs, on_host

T = TypeVar("T")


class Chosen(NamedTuple):
    """What is known once the tokens of a step are chosen.

    Attributes:
      tokens: `[C]` or `[num_steps, S]`.
      outputs: what the program that chose them yields if it is wanted.
      drafts: `[S, k]` what is drafted after them; None: nothing is.
    """

    tokens: jax.Array
    outputs: StepOutputs[jax.Array] = NO_OUTPUTS
    drafts: jax.Array | None = None


Choose: TypeAlias = Callable[[npt.NDArray[np.uint32]], Chosen]


class DeviceHandle:
    """A step in flight: the device computes it, and copies to the host what the host will read.

    Args:
      inputs: of the step.
      chosen: its tokens; None: `choose` says them once there are masks.
      outputs: what its forward program yields besides.
      choose: launches the choice of tokens by masks.
    """

    def __init__(
        self,
        inputs: StepInputs,
        chosen: Chosen | None,
        outputs: StepOutputs[jax.Array] = NO_OUTPUTS,
        choose: Choose | None = None,
    ) -> None:
        self._inputs = inputs
        self._chosen = chosen
        self._outputs = outputs
        self._choose = choose
        for array in jax.tree.leaves((chosen, outputs)):
            array.copy_to_host_async()

    def choose(self, masks: npt.NDArray[np.uint32]) -> None:
        """Launches the choice of a `masked` step's tokens; never waits for the device. See `MaskedHandle`."""
        assert self._choose is not None and self._chosen is None, "the step needs no masks, or has got them"
        self._chosen = self._choose(masks)
        for array in jax.tree.leaves(self._chosen):
            array.copy_to_host_async()

    def tokens(self) -> npt.NDArray[np.int32]:
        """Waits for the step; sampled ids `[num_choices]`, of several steps `[num_steps, num_seqs]`.

        Raises what the device raised, if the step failed.
        """
        assert self._chosen is not None, "the step waits for masks"
        tokens = np.asarray(self._chosen.tokens)
        return tokens[..., : self._inputs.num_choices] if tokens.ndim > 1 else self._inputs.without_padding(tokens, "C")

    def outputs(self) -> HostOutputs:
        """Waits for the step; what the batch asked for besides tokens."""
        assert self._chosen is not None, "the step waits for masks"
        parts = self._outputs, self._chosen.outputs
        if not jax.tree.leaves(parts):
            return NO_OUTPUTS
        return on_host(parts, self._inputs)

    def drafts(self) -> npt.NDArray[np.int32]:
        """See `StepHandle`."""
        assert self._chosen is not None and self._chosen.drafts is not None, "nothing is drafted after the step"
        return np.asarray(self._chosen.drafts)[: self._inputs.num_seqs]


class InLoop:
    """Launches steps by the thread that calls it, in place of a `Launcher`."""

    def launch(self, launch: Callable[[], T]) -> T:
        """Launches a step."""
        return launch()

    def settle(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """There is no thread."""


class Launcher:
    """Launches steps one after another, in order. After a launch that failed, each other one fails with its error."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="launcher", daemon=True)
        self._thread.start()

    def launch(self, launch: Callable[[], StepHandle]) -> LaunchedHandle:
        """Has a step launched after all others; returns at once."""
        return LaunchedHandle(self.put(launch), self)

    def settle(self) -> None:
        """Waits until all steps are launched. Raises the error of one that failed."""
        self.put(lambda: None).result()

    def close(self) -> None:
        """Ends the thread, after the steps that wait for it."""
        self._calls.put(None)
        self._thread.join()

    def put(self, call: Callable[[], T]) -> Future[T]:
        """Has something called after all before; returns at once."""
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
    """A step that is being launched. What reads it waits for the launch and raises its error if it failed.

    Args:
      launched: the handle of the step, once it is.
      launcher: whose thread launches it.
    """

    def __init__(self, launched: Future[Any], launcher: Launcher) -> None:
        self._launched = launched
        self._launcher = launcher

    def choose(self, masks: npt.NDArray[np.uint32]) -> None:
        """See `MaskedHandle`; the same thread launches it, after all that it was given before. Returns at once."""
        launched = self._launched

        def choose() -> StepHandle:
            handle: StepHandle = launched.result()
            cast(MaskedHandle, handle).choose(masks)
            return handle

        self._launched = self._launcher.put(choose)

    def tokens(self) -> npt.NDArray[np.int32]:
        """See `StepHandle`."""
        return self._handle.tokens()

    def outputs(self) -> HostOutputs:
        """See `StepHandle`."""
        return self._handle.outputs()

    def drafts(self) -> npt.NDArray[np.int32]:
        """See `StepHandle`."""
        return self._handle.drafts()

    @property
    def _handle(self) -> StepHandle:
        handle: StepHandle = self._launched.result()
        return handle
