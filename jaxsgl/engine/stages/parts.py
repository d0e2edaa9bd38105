"""The parts of a step on its way through the stages of this host. Each has a thread and takes what the last one yields.

    [FromHost] -> Stage -> Stage -> .. -> [ToHost]

A stage launches its programs, and never waits for devices. Where other hosts have the stages before or after,
`FromHost` waits for the stream that comes from there, and `ToHost` for the device, to pass it on. `engine` puts them
together.
"""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.outputs import NO_OUTPUTS, HostOutputs
from jaxsgl.engine.launcher import Launcher
from jaxsgl.engine.stages.programs import PassingRunner
from jaxsgl.engine.step_runner import StepRunner
from jaxsgl.hosts.group import After, Before
from jaxsgl.weights.sharding import replicated


class Part(Protocol):
    """What is done for each step in a thread of its own, step after step.

    Attributes:
      launcher: the thread.
    """

    launcher: Launcher

    def launch(self, inputs: StepInputs, before: Future[Any] | None) -> Future[Any]:
        """Has it done for a step once the part `before` has done its own; returns at once.

        The result is what the next part takes, or a `StepHandle` of the last one.
        """
        ...

    def close(self) -> None:
        """Ends the thread."""
        ...


class Stage:
    """A stage that runs.

    Args:
      runner: launches its programs.
      mesh: its devices.
      params: leaves of its parameters.

    Attributes:
      launcher: the thread in which it launches them, in order.
    """

    def __init__(self, runner: PassingRunner | StepRunner, mesh: Mesh, params: list[jax.Array]) -> None:
        self.runner, self.params = runner, params
        self.launcher = Launcher()
        self._place = replicated(mesh)

    def launch(self, inputs: StepInputs, before: Future[jax.Array] | None) -> Future[Any]:
        """Has its part of a step launched once the stage `before` has launched its own; returns at once.

        The result is what it passes on, or the `DeviceHandle` of the last stage.
        """
        return self.launcher.put(partial(self._launch, inputs, before))

    def _launch(self, inputs: StepInputs, before: Future[jax.Array] | None) -> Any:
        stream = () if before is None else (jax.device_put(before.result(), self._place),)
        return self.runner.launch(inputs, stream)

    def close(self) -> None:
        """See `Part`."""
        self.launcher.close()


class FromHost:
    """Takes the stream of each step from the host with the stages before.

    Args:
      host: that one.
      hidden_size, activations: D and dtype of the stream.
    """

    def __init__(self, host: Before, hidden_size: int, activations: jnp.dtype) -> None:
        self.launcher = Launcher()
        self._host, self._hidden_size, self._activations = host, hidden_size, activations

    def launch(self, inputs: StepInputs, before: Future[Any] | None) -> Future[npt.NDArray[Any]]:
        """See `Part`; the result is `[T, D]`, on the host."""
        shape = (inputs.bucket.num_tokens, self._hidden_size)
        return self.launcher.put(partial(self._host.receive, shape, self._activations))

    def close(self) -> None:
        """See `Part`."""
        self._host.close()
        self.launcher.close()


class ToHost:
    """Passes the stream of each step on to the host with the stages after.

    Args:
      host: that one.
    """

    def __init__(self, host: After) -> None:
        self.launcher = Launcher()
        self._host = host

    def launch(self, inputs: StepInputs, before: Future[Any] | None) -> Future[PassedOn]:
        """See `Part`."""
        assert before is not None, "there are stages here"
        return self.launcher.put(partial(self._pass_on, before))

    def _pass_on(self, before: Future[jax.Array]) -> PassedOn:
        self._host.send(np.asarray(before.result()))  # waits for the device
        return PassedOn()

    def close(self) -> None:
        """See `Part`."""
        self._host.close()
        self.launcher.close()


class PassedOn:
    """A step that another host ends; a `StepHandle` without tokens."""

    def tokens(self) -> npt.NDArray[np.int32]:
        """None are known here."""
        return np.zeros(0, np.int32)

    def outputs(self) -> HostOutputs:
        """None are known here."""
        return NO_OUTPUTS

    def drafts(self) -> npt.NDArray[np.int32]:
        """None are known here."""
        return np.zeros((0, 0), np.int32)
