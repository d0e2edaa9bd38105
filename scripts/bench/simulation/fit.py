"""Step times of the real engine, measured on this machine's device, and the coefficients of `cost.py` fitted to them.

Every compiled size is measured at several lengths, in batches of whole prompts or of their ends, each with its own
pages and with any token ids.

The formula is linear once it is known which steps are bound by memory and which by compute: products switch at a number
of tokens, attention at a number of pairs per KV token. All switches between measured values are tried. For each, the
linear problem is solved without negative coefficients, and the best fit of the whole formula is taken.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from bench.simulation.cost import StepCost, equal_pairs
from bench.steps import first_run, unsent_table
from jaxsgl.batch.buckets import Capacity
from jaxsgl.batch.build import BatchBuilder, Work
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.sampling import SamplingRows
from jaxsgl.cache.pages import pages_for, tokens_in
from jaxsgl.engine.engine import Engine

MAX_SWITCHES = 12  # switches of each kind that are tried
Floats = npt.NDArray[np.float64]


def fit(steps: Sequence[Mapping[str, Any]]) -> tuple[dict[str, StepCost], dict[str, float]]:
    """Costs by kind, and the mean relative error of the fit by kind (0.05: predictions are off by 5% on average).

    Raises:
      ValueError: there are no steps of kind "decode", or none of kind "extend".
    """
    costs, errors = {}, {}
    for kind in ("decode", "extend"):
        mine = [step for step in steps if step["kind"] == kind]
        if not mine:
            raise ValueError(f"no measured step is of kind {kind!r}, but costs of both decode and extend are needed")
        tokens, kv, seconds = (np.array([float(s[key]) for s in mine]) for key in ("tokens", "kv_tokens", "seconds"))
        pairs = np.array([s.get("pairs") or equal_pairs(s["tokens"], s["seqs"], s["kv_tokens"]) for s in mine])
        costs[kind], errors[kind] = _fit_kind(tokens, kv, pairs if kind == "extend" else np.zeros_like(kv), seconds)
    return costs, errors


def _fit_kind(tokens: Floats, kv: Floats, pairs: Floats, seconds: Floats) -> tuple[StepCost, float]:
    per_kv = pairs / np.maximum(kv, 1)
    best: tuple[float, StepCost, float] | None = None
    for tokens_switch in _switches(tokens):
        computing = tokens >= tokens_switch
        for pairs_switch in _switches(per_kv):
            attending = per_kv >= pairs_switch
            columns = (np.ones_like(kv), ~computing, computing * tokens, ~attending * kv, attending * pairs)
            cost = StepCost(*_least_squares(np.stack(columns, axis=1), seconds))
            predicted = np.array([cost.seconds(*step) for step in zip(tokens, kv, pairs, strict=True)])
            error = float(np.square(predicted / seconds - 1).mean())
            if best is None or error < best[0]:
                best = error, cost, float(np.abs(predicted / seconds - 1).mean())
    assert best is not None
    return best[1:]


def _switches(values: Floats) -> list[float]:
    """Values from which on compute may be the bound; the last one stands for never."""
    distinct = np.unique(values)
    if len(distinct) > MAX_SWITCHES:
        distinct = np.quantile(distinct, np.linspace(0, 1, MAX_SWITCHES), method="nearest")
    return [*distinct.tolist(), np.inf]


def _least_squares(columns: Floats, seconds: Floats) -> list[float]:
    """Minimizes the squares of relative errors, so that short steps count as much as long ones.

    No result is below 0.
    """
    weighted = columns / seconds[:, None]
    scale = np.maximum(np.linalg.norm(weighted, axis=0), 1e-300)
    solution, _ = nnls(weighted / scale, np.ones(len(seconds)))
    coefficients: list[float] = (solution / scale).tolist()
    return coefficients


LENGTHS = (1, 1 / 4, 1 / 16)  # lengths of sequences, as shares of the longest that fit
SEQS = (1, 8)  # sequences of extend steps


def record(engine: Engine, repeats: int = 5) -> Iterator[dict[str, Any]]:
    """Runs each step `repeats` times and yields the fastest time: other programs can only add to it."""
    capacity = engine.capacity
    pages = np.arange(1, capacity.num_pages, dtype=np.int32)
    for kind, seqs, count, length in dict.fromkeys(_cases(engine)):
        tables = np.zeros((capacity.num_rows, capacity.max_pages_per_seq), dtype=np.int32)
        each = pages_for(length, capacity.page_size)
        tables[:seqs, :each] = pages[: seqs * each].reshape(seqs, each)
        table, sampling = unsent_table(tables), SamplingRows(capacity.num_rows)
        builder = BatchBuilder(engine.buckets, table, sampling, capacity.page_size)
        if kind == "decode":
            inputs = builder.decode(np.arange(seqs, dtype=np.int32), np.full(seqs, length - 1, dtype=np.int32))
        else:
            ids = np.ones(count, dtype=np.int32)
            inputs = builder.extend([Work(row, ids, length - count, True) for row in range(seqs)])
        yield {
            "kind": kind,
            "tokens": inputs.bucket.num_tokens,
            "seqs": seqs,
            "kv_tokens": seqs * length,
            "pairs": equal_pairs(seqs * count, seqs, seqs * length),
            "seconds": _fastest(engine, inputs, repeats),
        }


def _cases(engine: Engine) -> Iterator[tuple[str, int, int, int]]:
    """Yields kind, number of sequences, and new tokens and length of each sequence."""
    capacity = engine.capacity
    for share in LENGTHS:
        wanted = max(1, int(share * capacity.context_length))
        for size in engine.buckets.decode_sizes:
            yield "decode", size, 1, min(wanted, _most(capacity, size))
        for size in engine.buckets.extend_sizes:
            for seqs in (min(seqs, size, capacity.num_rows) for seqs in SEQS):
                count, most = size // seqs, _most(capacity, seqs)
                if count <= most:
                    yield "extend", seqs, count, min(max(wanted, count), most)


def _most(capacity: Capacity, seqs: int) -> int:
    """The longest length that `seqs` sequences can all have at once."""
    return min(capacity.context_length, tokens_in((capacity.num_pages - 1) // seqs, capacity.page_size))


def _fastest(engine: Engine, inputs: StepInputs, repeats: int) -> float:
    """Seconds of the fastest run, after one run to warm up."""
    seconds = []
    inputs = first_run(engine, inputs)
    for _ in range(repeats):
        start_s = time.perf_counter()
        engine.submit(inputs).tokens()
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)
