"""A variant of the engine in a process of its own, which times steps when it is asked to. Called by `bench_step.py`."""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing as mp
import os
import shlex
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np
from workloads.steps import GREEDY, Seq, build_step, parse_step

from jaxsgl.batch.inputs import StepInputs
from jaxsgl.cache.pages import pages_for
from jaxsgl.config import EngineConfig, add_flags, from_flags
from jaxsgl.engine.engine import Engine
from jaxsgl.errors import ConfigError, JaxsglError


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of a step: from submission to tokens, and the CPU's over all threads; medians of some runs."""

    wall_ms: float
    cpu_ms: float


class Variant:
    """The parent's end. Raises `JaxsglError` with what the engine said if it doesn't start.

    Args:
      text: NAME=VALUE for the environment, then flags of the engine.
      common: flags that hold for all variants.
      steps: what it is to measure, as `parse_step` takes it.
    """

    def __init__(self, text: str, common: Sequence[str], steps: Sequence[str]) -> None:
        self.text = text
        words = shlex.split(text)
        settings = [word for word in words if "=" in word and not word.startswith("-")]
        flags = [*common, *(word for word in words if word not in settings)]
        self._connection, child = mp.Pipe()
        self._process = mp.get_context("spawn").Process(target=_serve, args=(child, flags, list(steps)), daemon=True)
        before = dict(os.environ)
        os.environ.update(dict(setting.split("=", 1) for setting in settings))
        try:
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        child.close()
        self._receive()

    def measure(self, runs: int) -> list[Timing]:
        """Each step `runs` times."""
        self._connection.send(runs)
        timings: list[Timing] = self._receive()
        return timings

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join()

    def _receive(self) -> list[Timing]:
        try:
            told: list[Timing] | str = self._connection.recv()
        except EOFError:
            raise JaxsglError(f"the process of variant {self.text!r} ended: what it printed says why") from None
        if isinstance(told, str):
            raise JaxsglError(f"variant {self.text!r}: {told}")
        return told


def _serve(connection: Connection, flags: list[str], steps: list[str]) -> None:
    """The process: starts an engine, and measures until the parent hangs up."""
    try:
        parsed = [parse_step(text) for text in steps]
        engine = Engine(_config(flags, parsed), progress=False)
        made = [_made(engine, seqs) for seqs in parsed]
        connection.send([])
        while True:
            runs = connection.recv()
            connection.send([_timed(engine, inputs, runs) for inputs in made])
    except JaxsglError as error:
        connection.send(str(error))
    except EOFError:
        return


def _config(flags: list[str], steps: list[list[Seq]]) -> EngineConfig:
    """The flags', with programs and a pool for these steps and no more."""
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig)
    config = from_flags(EngineConfig, parser.parse_args(flags))
    decodes = {len(seqs) for seqs in steps if _decodes(seqs)}
    extends = {sum(seq.new for seq in seqs) for seqs in steps if not _decodes(seqs)} or {1}
    rows = max(map(len, steps))
    pages = max(sum(pages_for(seq.length, config.page_size) for seq in seqs) for seqs in steps)
    return dataclasses.replace(
        config,
        max_running_requests=rows,
        decode_buckets=tuple(decodes | {rows}),
        extend_buckets=tuple(extends),
        chunked_prefill_size=max(extends),
        max_total_tokens=config.max_total_tokens or (pages + 1) * config.page_size,
    )


def _made(engine: Engine, seqs: list[Seq]) -> StepInputs:
    longest = max(seq.length for seq in seqs)
    if longest > engine.capacity.context_length:
        raise ConfigError(
            f"a sequence has {longest} tokens, but the context holds {engine.capacity.context_length}: shorten it"
        )
    return build_step(engine, seqs, GREEDY, np.random.default_rng(0), decode=_decodes(seqs))


def _decodes(seqs: Sequence[Seq]) -> bool:
    return all(seq.new == 1 and seq.cached for seq in seqs)


def _timed(engine: Engine, inputs: StepInputs, runs: int) -> Timing:
    """Medians of `runs`, each on an idle device, after one to warm up: meanwhile another process had the caches."""
    walls, cpus = [], []
    for _ in range(1 + runs):
        wall, cpu = time.perf_counter(), time.process_time()
        engine.submit(inputs).tokens()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return Timing(1e3 * float(np.median(walls[1:])), 1e3 * float(np.median(cpus[1:])))
