"""Times and sizes of an engine's programs, and times of the steps that run them.

The sequences of a step are as long as those of the workload are while it runs. Called by `bench_buckets.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bench.steps import GREEDY, Seq, build_step, first_run
from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.inputs import Bucket, StepInputs
from jaxsgl.bench.requests import Job
from jaxsgl.cache.pages import IntArray, tokens_in
from jaxsgl.engine.engine import Engine
from jaxsgl.engine.programs import ProgramKey, ProgramSet
from jaxsgl.engine.step_programs import all_keys, keys_of
from jaxsgl.requests.request import SamplingParams

SAMPLING = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=0.8),
    "filtered": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "featured": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, presence_penalty=1.0),
}
MEMORY = ("argument", "output", "temp", "alias", "generated_code")


def programs(buckets: BucketSet, cold: ProgramSet, cached: ProgramSet) -> list[dict[str, Any]]:
    """A row for each program: its sizes in bytes, and seconds to lower, to compile and to take it from the cache.

    Lowering and compiling are those of the first start, with an empty compilation cache; taking the program from the
    cache is that of the second start. Other threads compile meanwhile.
    """
    rows = []
    for key in all_keys(buckets):
        made = cold.compilations[key]
        seconds = {"lower_s": made.lower_s, "compile_s": made.compile_s, "cached_s": cached.compilations[key].compile_s}
        memory = made.compiled.memory_analysis()
        sizes = {f"{name}_bytes": getattr(memory, f"{name}_size_in_bytes", None) for name in MEMORY}
        rows.append(named(key) | seconds | sizes)
    return rows


def named(key: ProgramKey) -> dict[str, Any]:
    """The kind, tokens and seqs of a program."""
    if isinstance(key.shape, Bucket):
        return {"kind": key.shape.kind, "tokens": key.shape.num_tokens, "seqs": key.shape.num_seqs}
    return {"kind": key.kind, "tokens": key.shape, "seqs": key.shape}


def steps(engine: Engine, jobs: Sequence[Job], repeats: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yields the times of one full step of every program.

    A sampling program runs behind a decode step, if there is one of its size. Times are milliseconds from submission to
    tokens, and microseconds until `submit` returns.
    """
    maker, timed = StepMaker(engine, jobs, seed), set[ProgramKey]()
    for bucket in sorted(engine.buckets.all(), key=lambda bucket: (bucket.kind, bucket)):
        keys = keys_of(bucket)
        if keys[-1] in timed or bucket.kind == "score":
            continue
        timed.add(keys[-1])
        yield {
            "kind": bucket.kind,
            "tokens": bucket.num_tokens,
            "seqs": bucket.num_seqs,
            "sampling": bucket.sampling,
            **timings(engine, maker.step(bucket, bucket.sampling), repeats),
        }


def timings(engine: Engine, inputs: StepInputs, repeats: int) -> dict[str, float]:
    """Runs one step again and again, each time on an idle device; the first run is a warm-up and does not count."""
    step_s, launch_s = [], []
    inputs = first_run(engine, inputs)
    for _ in range(repeats):
        start_s = time.perf_counter()
        handle = engine.submit(inputs)
        launch_s.append(time.perf_counter() - start_s)
        handle.tokens()
        step_s.append(time.perf_counter() - start_s)
    return {
        "median_ms": 1e3 * statistics.median(step_s),
        "min_ms": 1e3 * min(step_s),
        "launch_us": 1e6 * statistics.median(launch_s),
    }


class StepMaker:
    """Makes full steps of any bucket of an engine."""

    def __init__(self, engine: Engine, jobs: Sequence[Job], seed: int) -> None:
        self._engine, self._jobs = engine, jobs
        self._rng = np.random.default_rng(seed)

    def step(self, bucket: Bucket, variant: str) -> StepInputs:
        """A decode step of all rows, or an extend step: of one sequence in programs for few, else of as many as fit."""
        seqs, decode = min(bucket.num_seqs, self._engine.capacity.num_rows), bucket.kind == "decode"
        if not decode and bucket.num_seqs == self._engine.buckets.extend_seqs[0]:
            seqs = 1
        counts = np.full(seqs, bucket.num_tokens // seqs, dtype=np.int32)
        counts[0] += bucket.num_tokens - counts.sum() if not decode else 0
        cached = np.maximum(self._lengths(seqs) - counts, 0)
        step = [Seq(*pair) for pair in zip(counts.tolist(), cached.tolist(), strict=True)]
        return build_step(self._engine, step, SAMPLING[variant], self._rng, decode=decode)

    def _lengths(self, seqs: int) -> IntArray:
        """Lengths of `seqs` sequences somewhere between the end of their prompt and the end of their output."""
        capacity = self._engine.capacity
        most = min(capacity.context_length, tokens_in((capacity.num_pages - 1) // seqs, capacity.page_size))
        jobs = [self._jobs[i] for i in self._rng.integers(len(self._jobs), size=seqs)]
        lengths = [len(job.prompt_ids) + self._rng.integers(1, job.output_len, endpoint=True) for job in jobs]
        return np.minimum(np.array(lengths, dtype=np.int32), most)
