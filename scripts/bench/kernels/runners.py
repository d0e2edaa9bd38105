"""Runs and times contenders: programs with one call for each layer of a case, enqueued many times and awaited once.

A program calls its contender once per layer, so that the gaps between launches are those of a model's step and not
those of Python. Never knows what it runs: a contender is a `Prepared`.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

# Passes over the layers in one program: a small store is done sooner than a program is started.
_STORE_ROUNDS = 4


class Runner(Protocol):
    """A contender that is ready to run on a case."""

    calls: int
    """Number of calls of the op in one pass."""

    def check(self) -> Any:
        """The output of one call for the first layer, as JAX arrays; elements that the call doesn't write are NaN."""

    def run(self, passes: int) -> None:
        """Runs `passes` passes and waits for the last one."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A contender as a function: `call(state, *own, *shared) -> (state, out)`, with a state and arrays for each layer.

    The state is donated: the KV cache for a store, None for attention. `shared` are the arrays that all layers use.
    """

    call: Callable[..., tuple[Any, Any]]
    states: Sequence[Any]
    own: Sequence[tuple[jax.Array, ...]]
    shared: tuple[jax.Array, ...] = ()
    finish: Callable[[Any], Any] = lambda result: result
    """Turns the out, or the state if there is no out, into what the op returns. Not timed."""

    @classmethod
    def of(cls, function: Callable[..., Any], own: Sequence[tuple[jax.Array, ...]]) -> Prepared:
        """A contender without a state: `function(*own)` is the out of each layer."""
        return cls(lambda _, *operands: (None, function(*operands)), [None] * len(own), own)


class JaxRunner:
    """A `Prepared` as one compiled program over all layers; states and outputs live in donated buffers."""

    def __init__(self, prepared: Prepared) -> None:
        """Traces the program; errors of tracing are passed on."""
        # Stores depend on each other through their state; repeated calls of attention would be compiled into one.
        self._rounds = 1 if prepared.states[0] is None else _STORE_ROUNDS
        self.calls = self._rounds * len(prepared.own)
        self.compile_s = 0.0
        self._call, self._finish = prepared.call, prepared.finish
        self._inputs = (list(prepared.own), prepared.shared)
        # Copies: the program donates its states, but the inputs belong to all contenders.
        self._states = jax.tree.map(jnp.copy, list(prepared.states))
        _, shapes = jax.eval_shape(self._all_layers, self._states, None, *self._inputs)
        self._outs = jax.tree.map(lambda shape: jnp.full(shape.shape, jnp.nan, shape.dtype), shapes)
        jitted = jax.jit(self._all_layers, donate_argnums=(0, 1), keep_unused=True)
        self._lowered = jitted.lower(self._states, self._outs, *self._inputs)

    @functools.cached_property
    def program(self) -> Any:
        """The compiled program; compiles at the first use, which may be in another thread."""
        begin = time.perf_counter()
        program = self._lowered.compile()
        self.compile_s = time.perf_counter() - begin
        return program

    def _all_layers(
        self, states: list[Any], _outs: Any, own: list[tuple[Any, ...]], shared: tuple[Any, ...]
    ) -> tuple[Any, Any]:
        outs: list[Any] = []
        for _ in range(self._rounds):
            pairs = [self._call(state, *arrays, *shared) for state, arrays in zip(states, own, strict=True)]
            states, outs = [state for state, _ in pairs], [out for _, out in pairs]
        return states, outs

    def check(self) -> Any:
        """See `Runner`. JAX writes outputs into donated buffers of their shape, which are filled with NaN before."""
        self._outs = jax.tree.map(lambda out: jnp.full(out.shape, jnp.nan, out.dtype), self._outs)
        self.run(1)
        return self._finish(jax.tree.map(jnp.copy, self._states[0] if self._outs[0] is None else self._outs[0]))

    def run(self, passes: int) -> None:
        """See `Runner`."""
        for _ in range(passes):
            self._states, self._outs = self.program(self._states, self._outs, *self._inputs)
        jax.block_until_ready((self._states, self._outs))


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call: the figure that counts, and the fastest and slowest of the repeats.

    `cpu_seconds` is the least CPU time of all threads of one call, on a CPU only; other processes change it less.
    """

    seconds: float
    fastest: float
    slowest: float
    cpu_seconds: float = 0.0


def time_alone(runner: Runner, repeats: int, target_s: float = 0.03) -> Timing:
    """Times a runner on an accelerator: each repeat enqueues passes for about `target_s`; the median counts."""
    runner.run(2)
    begin = time.perf_counter()
    runner.run(1)
    passes = max(2, min(400, int(target_s / (time.perf_counter() - begin))))
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        runner.run(passes)
        seconds.append((time.perf_counter() - begin) / (passes * runner.calls))
    return Timing(statistics.median(seconds), min(seconds), max(seconds))


def time_in_turns(runners: Mapping[str, Runner], repeats: int) -> dict[str, Timing]:
    """Times runners on a CPU: they take turns, other memory is written before each, and the fastest repeat counts.

    The KV is then as cold as between the layers of a model, and the load of other processes slows down all runners
    equally.
    """
    other_memory = np.zeros(1 << 24)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runners}
    for _ in range(repeats + 1):
        for name, runner in runners.items():
            other_memory += 1
            begin, cpu_begin = time.perf_counter(), time.process_time()
            runner.run(1)
            wall, cpu = time.perf_counter() - begin, time.process_time() - cpu_begin
            seconds[name].append((wall / runner.calls, cpu / runner.calls))
    timings = {}
    for name, times in seconds.items():
        walls, cpus = zip(*times[1:], strict=True)
        timings[name] = Timing(min(walls), min(walls), max(walls), min(cpus))
    return timings


def time_all(runners: Mapping[str, Runner], platform: str, repeats: int) -> dict[str, Timing]:
    """Times all runners by the method for the platform."""
    if platform == "cpu":
        return time_in_turns(runners, repeats)
    return {name: time_alone(runner, repeats) for name, runner in runners.items()}
