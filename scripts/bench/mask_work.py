"""What masks take of a step, and whether anything waits for them. bench grammars runs the serving loop on these.

`TimedEngine` notes for each masked step when its masks were there and when its logits were. `WorkBeside` does what a
step with constrained rows does for masks, on matchers and logits of its own and for nothing: beside a free batch it
takes the processors' time, and no row's choice waits for it.
"""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from functools import partial

    from jaxsgl.batch.inputs import StepInputs
    from jaxsgl.engine.engine import Engine
    from jaxsgl.engine.launcher import Chosen, DeviceHandle
    from jaxsgl.scheduler.grammars.constraint import Constraint


@dataclass
class Moments:
    """When the masks of a step were handed over, and when its forward program was done (seconds of one clock)."""

    masks_s: float = 0.0
    logits_s: float = 0.0


class WorkBeside:
    """The masks of some rows of each step, made and applied for nothing.

    Args:
      constraints: by row, of samples that follow `outputs` (token ids by row).
      num_rows: of the steps; rows without a constraint are free.

    Attributes:
      advance_s, masks_s: processor time of the thread for matchers that took tokens, and for masks.
      num_steps: with work.
    """

    def __init__(
        self, engine: Engine, constraints: dict[int, Constraint], outputs: Sequence[Sequence[int]], num_rows: int
    ) -> None:
        import jax.numpy as jnp

        from jaxsgl.engine.step import SAMPLING_ROWS

        _, self._mask, _ = engine.programs.masking(num_rows)
        self._constraints, self._outputs = constraints, outputs
        vocab_size = engine.arch.vocab_size
        self._logits = jnp.zeros((num_rows, vocab_size), jnp.float32)
        self._packed = jnp.zeros((SAMPLING_ROWS, num_rows), jnp.int32)
        self._shape = num_rows, -(-vocab_size // 32)
        self.advance_s = self.masks_s = 0.0
        self.num_steps = 0

    def run(self) -> None:
        """Does the work of the next step, until the outputs end; returns before its program has run."""
        if self.num_steps == min(len(self._outputs[row]) for row in self._constraints):
            return
        times_s = [time.thread_time()]
        if self.num_steps:
            for row, constraint in self._constraints.items():
                constraint.advance(self._outputs[row][self.num_steps - 1])
        times_s.append(time.thread_time())
        words = np.full(self._shape, 0xFFFFFFFF, dtype=np.uint32)
        for row, constraint in self._constraints.items():
            constraint.mask_into(words[row])
        times_s.append(time.thread_time())
        self.apply(words)
        self.advance_s += times_s[1] - times_s[0]
        self.masks_s += times_s[2] - times_s[1]
        self.num_steps += 1

    def apply(self, words: npt.NDArray[np.uint32]) -> None:
        """Launches the program that applies masks `[num_rows, V / 32]`."""
        self._logits, _ = self._mask(self._logits, self._packed, words)

    def program_cpu_s(self, num_times: int = 10) -> float:
        """Processor time of the process for one mask program and its transfers, with nothing beside it."""
        words = np.full(self._shape, 0xFFFFFFFF, dtype=np.uint32)
        self._logits.block_until_ready()
        start_s = time.process_time()
        for _ in range(num_times):
            self.apply(words)
            self._logits.block_until_ready()
        return (time.process_time() - start_s) / num_times


def prepare_cpu_s(engine: Engine, sizes: Sequence[int]) -> float:
    """Processor time to compile the programs for masks for these numbers of rows, of which none is kept anywhere."""
    import jax

    from jaxsgl.engine.start.warmup import use_compilation_cache

    kept: str | None = jax.config.values["jax_compilation_cache_dir"]
    with tempfile.TemporaryDirectory() as folder:
        use_compilation_cache(folder)
        start_s = time.process_time()
        for num_seqs in sizes:
            for program in engine.programs.spec.masking(num_seqs):
                program.trace().lower().compile()
        seconds = time.process_time() - start_s
    use_compilation_cache(kept or "")
    return seconds


class TimedEngine:
    """An engine whose masked steps are timed, and which does `work` with each step that needs no masks."""

    def __init__(self, engine: Engine, work: WorkBeside | None = None) -> None:
        self._engine, self._work = engine, work
        self._launched: queue.SimpleQueue[tuple[Moments, Any] | None] = queue.SimpleQueue()
        self._moments: list[Moments] = []
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, inputs: StepInputs) -> DeviceHandle:
        """See `Engine.submit`; of one device."""
        handle = cast("DeviceHandle", self._engine.submit(inputs))
        if inputs.masked:
            moments = Moments()
            choose = cast("partial[Chosen]", handle._choose)
            self._launched.put((moments, choose.args[1].tokens))  # what the forward program has made

            def timed(masks: npt.NDArray[np.uint32]) -> Chosen:
                moments.masks_s = time.perf_counter()
                return choose(masks)

            handle._choose = timed
        elif self._work is not None:
            self._work.run()
        return handle

    def moments(self) -> list[Moments]:
        """Those of all masked steps. Nothing may be submitted afterwards."""
        self._launched.put(None)
        self._watcher.join()
        return self._moments

    def _watch(self) -> None:
        while (launched := self._launched.get()) is not None:
            moments, tokens = launched
            tokens.block_until_ready()
            moments.logits_s = time.perf_counter()
            self._moments.append(moments)
