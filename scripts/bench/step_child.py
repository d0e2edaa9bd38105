"""The process of a variant of `bench step`: measures steps on an engine of its own.

A JSON line `[runs, folder]` on standard input is answered by the timings of all steps on standard output; a folder
(else null) gets a trace of each step, in a folder of its number. The
flags of the engine are arguments; the steps stand in the environment. The process may be given another tree's jaxsgl,
so it uses of it only what times a step.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence

import jax
import numpy as np

from bench.processes import answers_only
from bench.steps import GREEDY, STEPS, Seq, build_step, first_run, parse_step
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.cache.pages import pages_for
from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.flags import add_flags, from_flags
from jaxsgl.engine.engine import Engine
from jaxsgl.errors import ConfigError, JaxsglError

LARGEST_AUTO_PAGE = 128  # --page-size auto takes no larger one; a pool that holds the steps in these holds them in any


def main() -> None:
    """Starts an engine and measures until the commands end. What libraries print goes to standard error."""
    answers = answers_only()
    try:
        steps = [parse_step(text) for text in json.loads(os.environ[STEPS])]
        engine = Engine(_config(sys.argv[1:], steps), progress=False)
        made = [_made(engine, seqs) for seqs in steps]
    except JaxsglError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return
    print(json.dumps({"timings": []}), file=answers, flush=True)
    for line in sys.stdin:
        runs, folder = json.loads(line)
        timings = [
            _timed(engine, inputs, runs, None if folder is None else f"{folder}/{i}") for i, inputs in enumerate(made)
        ]
        print(json.dumps({"timings": timings}), file=answers, flush=True)


def _config(flags: list[str], steps: list[list[Seq]]) -> EngineConfig:
    """The config of the flags, with programs and a pool for these steps only."""
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig)
    config = from_flags(EngineConfig, parser.parse_args(flags))
    decodes = {len(seqs) for seqs in steps if _decodes(seqs)}
    extends = {sum(seq.new for seq in seqs) for seqs in steps if not _decodes(seqs)} or {1}
    rows = max(map(len, steps))
    page_size = config.page_size if isinstance(config.page_size, int) else LARGEST_AUTO_PAGE
    pages = max(sum(pages_for(seq.length, page_size) for seq in seqs) for seqs in steps)
    return dataclasses.replace(
        config,
        max_running_requests=rows,
        decode_buckets=tuple(decodes | {rows}),
        extend_buckets=tuple(extends),
        chunked_prefill_size=max(extends),
        max_total_tokens=config.max_total_tokens or (pages + 1) * page_size,
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


def _timed(engine: Engine, inputs: StepInputs, runs: int, trace: str | None) -> dict[str, float]:
    """The fields of `Timing` in bench step: medians of `runs` runs, traced into a folder or not.

    One run before them warms up, since another process used the caches of the processor.
    """
    walls, cpus, submits = [], [], []
    inputs = first_run(engine, inputs)
    with contextlib.nullcontext() if trace is None else jax.profiler.trace(trace):
        for _ in range(runs):
            wall, cpu = time.perf_counter(), time.process_time()
            engine.submit(inputs).tokens()
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
        begin, before = time.perf_counter(), engine.submit(inputs)
        for _ in range(runs):
            submit = time.perf_counter()
            after = engine.submit(inputs)
            submits.append(time.perf_counter() - submit)
            before.tokens()
            before = after
        before.tokens()
        queued_s = (time.perf_counter() - begin) / (runs + 1)
    medians = {"wall_ms": np.median(walls), "cpu_ms": np.median(cpus), "submit_ms": np.median(submits)}
    return {name: 1e3 * float(of) for name, of in (medians | {"queued_ms": queued_s}).items()}


if __name__ == "__main__":
    main()
