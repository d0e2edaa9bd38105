"""`ServedEngine`: an engine with all parts that the serving loop uses. `StepsOnly` makes one of a `StepEngine`.

    StepEngine    runs steps                     PageEngine    does what is to be done between them
    weight_store  weights and the KV pool        adapters      LoRA adapters

`engine.engine.Engine` has all of them.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt

from jaxsgl.batch.engine_api import EngineOp, PageEngine, PageLayout, StepEngine
from jaxsgl.config.engine import DEFAULT_WEIGHT_VERSION
from jaxsgl.errors import ConfigError
from jaxsgl.messages.orders import MemoryTag
from jaxsgl.scheduler.orders.adapters import AdapterStore
from jaxsgl.scheduler.orders.weights import WeightStore


class ServedEngine(StepEngine, PageEngine, Protocol):
    """An engine with all its parts."""

    @property
    def weight_store(self) -> WeightStore:
        """Its weights and its KV pool, as far as operators may exchange or release them."""
        ...

    @property
    def adapters(self) -> AdapterStore | None:
        """Where it holds LoRA adapters; None: it takes none."""
        ...


class FixedWeights:
    """Weights that stay as they were loaded; a `WeightStore`.

    Args:
      why: why they stay, and the way out, in words.
      weight_version: what they are called.
    """

    def __init__(self, why: str, weight_version: str = DEFAULT_WEIGHT_VERSION) -> None:
        self.weight_version = weight_version
        self.released: frozenset[MemoryTag] = frozenset()
        self._why = why

    def stage_weights(self, folder: str | None) -> object:
        """Raises `ConfigError`."""
        raise ConfigError(f"weights can't be exchanged {self._why}")

    def swap_weights(self, staged: object, version: str | None) -> None:
        """Is never called: nothing is staged."""
        raise AssertionError("nothing was staged")

    def release_memory(self, tag: MemoryTag) -> None:
        """Raises `ConfigError`."""
        raise ConfigError(f"memory can't be released {self._why}")

    def resume_memory(self, tag: MemoryTag, staged: object) -> None:
        """Does nothing: nothing is released."""


NO_WEIGHTS = FixedWeights("of an engine that keeps neither weights nor a KV pool: start another one")


class StepsOnly:
    """A `ServedEngine` that only runs steps: no flag asks for operations between them.

    Args:
      steps: runs them.
      weight_store: of its weights.
    """

    adapters: AdapterStore | None = None

    def __init__(self, steps: StepEngine, weight_store: WeightStore = NO_WEIGHTS) -> None:
        self.weight_store = weight_store
        self._steps = steps
        self.submit = steps.submit

    @property
    def recompiles(self) -> int:
        """See `StepEngine`."""
        return self._steps.recompiles

    def start_profile(self, folder: str) -> None:
        """See `StepEngine`."""
        self._steps.start_profile(folder)

    def stop_profile(self) -> None:
        """See `StepEngine`."""
        self._steps.stop_profile()

    @property
    def page_layout(self) -> PageLayout:
        """Is never called: pages stay on the device."""
        raise AssertionError("pages stay on the device")

    def apply(self, op: EngineOp, number: int) -> None:
        """Is never called: no flag asks for operations."""
        raise AssertionError(f"an engine that only runs steps can't do {op}")

    def poll(self, wait: bool = False) -> list[tuple[int, npt.NDArray[Any]]]:
        """Nothing is gathered."""
        return []
