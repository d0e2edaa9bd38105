"""Checks one op on one backend with one spec: the result is right, complete, and the same in every run.

Owns what "correct on this device" means: a small error of sampled tokens against float64, agreement of all elements
with the XLA backend at full precision, outputs and caches filled with NaN before, and equal results over many runs,
since a race shows in results that differ. Called by `check kernels`.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.cases import DECODE, EXTEND, STORE, KernelCase
from bench.kernels.contenders import Unsupported, prepare_backend
from bench.kernels.inputs import Inputs, make_inputs
from bench.kernels.measure import check_error
from bench.kernels.runners import JaxRunner, Runner
from pallas_kernels.specs import ArgSpec

# Relative to the norm (float64), or to the largest element (against XLA, and between runs).
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
PASSED, FAILED, REFUSED, CRASHED = "passed", "failed", "refused", "crashed"


@dataclasses.dataclass(frozen=True)
class Check:
    """The outcome of a check. Figures are None where they were not measured."""

    op: str
    backend: str
    spec: str
    verdict: str
    error: float | None = None
    """Error against float64."""
    disagreement: float | None = None
    """Largest difference of an element to the XLA backend."""
    moved: float | None = None
    """Largest difference of an element between runs; 0 for equal bits."""
    note: str = ""


def ragged_case(op: str, spec: ArgSpec, seed: int) -> KernelCase:
    """A batch with every kind of sequence that the spec allows: padding, one token, full pages, the longest."""
    rng = np.random.default_rng(seed)
    longest = spec.pages_per_seq * spec.page_size
    lengths = rng.integers(0, longest + 1, spec.num_seqs)
    special = [longest, 0, 1, spec.page_size * max(1, spec.pages_per_seq // 2)]
    lengths[: len(special)] = special[: spec.num_seqs]
    new = np.minimum(lengths, 1)
    if op != DECODE:
        room = spec.num_tokens - spec.num_tokens // 16 - int(new.sum())  # the rest is padding
        for s in rng.permutation(spec.num_seqs):
            more = int(rng.integers(0, max(1, min(int(lengths[s]), max(room, 1)))))
            new[s] += more if s else max(0, min(longest - 1, room // 2))  # sequence 0 has many new tokens
            room = spec.num_tokens - spec.num_tokens // 16 - int(new.sum())
    return KernelCase(
        name=spec.name,
        op=op,
        cached=tuple(int(n) for n in lengths - new),
        new=tuple(int(n) for n in new),
        page_size=spec.page_size,
        num_kv_heads=spec.num_kv_heads,
        num_groups=spec.num_groups,
        head_dim=spec.width,
        dtype=jnp.dtype(spec.dtype).name,
        float8_cache=spec.float8_cache,
        sliding_window=None if op == STORE else spec.sliding_window,
        logit_soft_cap=None if op == STORE else spec.logit_soft_cap,
        sm_scale=None if op == STORE else spec.options.sm_scale,
        has_sinks=op != STORE and spec.has_sinks,
        value_dim=spec.value_dim,
        index_size=spec.index_size,
        padding_tokens=0 if op == DECODE else spec.num_tokens - int(new.sum()),
    )


def check_spec(spec: ArgSpec, backend: str, *, runs: int, interpret: bool = False) -> list[Check]:
    """Checks all three ops with one spec, of a latent those of attention; they are compiled in parallel."""
    ops = (STORE, DECODE, EXTEND) if spec.value_dim is None else (DECODE, EXTEND)
    batches = {op: make_inputs(ragged_case(op, spec, seed=1), seed=2, adverse=True) for op in ops}
    checks, runners = [], {}
    for op, inputs in batches.items():
        try:
            runners[op] = JaxRunner(prepare_backend(backend, inputs, interpret=interpret))
        except Unsupported as error:
            checks.append(Check(op, backend, spec.name, REFUSED, note=str(error)))
        except Exception as error:
            checks.append(Check(op, backend, spec.name, CRASHED, note=_short(error)))
    others = {}
    with jax.default_matmul_precision("highest"):
        if backend != "xla":
            others = {op: JaxRunner(prepare_backend("xla", batches[op])) for op in runners if op != STORE}
    with ThreadPoolExecutor(max_workers=6) as pool:
        for future in [pool.submit(getattr, runner, "program") for runner in (*runners.values(), *others.values())]:
            future.exception()  # an error is raised again where the program is used
    for op, runner in runners.items():
        try:
            checks.append(judge_runs(batches[op], backend, runner, others.get(op), runs))
        except Exception as error:
            checks.append(Check(op, backend, spec.name, CRASHED, note=_short(error)))
    return checks


def judge_runs(inputs: Inputs, backend: str, runner: Runner, other: Runner | None, runs: int) -> Check:
    """Compares the results of `runs` runs; `other` is the XLA backend's runner on the same inputs, for attention."""
    case = inputs.case
    tolerance = TOLERANCE[case.dtype]
    error = check_error(inputs, runner)
    first = runner.check()
    disagreement = None if other is None else _distance(first, other.check())
    moved = max((_distance(first, runner.check()) for _ in range(runs - 1)), default=0.0)
    figures = (error, 0.0 if disagreement is None else disagreement, moved)
    problems = [
        f"{what} {figure:.1e}, allowed {tolerance:.0e}"
        for what, figure in zip(("error", "disagreement with xla", "moved between runs"), figures, strict=True)
        if not figure <= tolerance  # NaN fails
    ]
    verdict = FAILED if problems else PASSED
    return Check(case.op, backend, case.name, verdict, error, disagreement, moved, "; ".join(problems))


def _distance(first: jax.Array, second: jax.Array) -> float:
    """Largest difference over the largest element, without the dummy page; NaN equals NaN."""
    return max(float(each) for each in jax.tree.leaves(jax.tree.map(_array_distance, first, second)))


@jax.jit
def _array_distance(first: jax.Array, second: jax.Array) -> jax.Array:
    first, second = (a[1:] if a.ndim == 4 else a for a in (first.astype(jnp.float32), second.astype(jnp.float32)))
    same = (first == second) | (jnp.isnan(first) & jnp.isnan(second))
    largest = jnp.max(jnp.where(jnp.isnan(second), 0, jnp.abs(second)))
    return jnp.max(jnp.where(same, 0, jnp.abs(first - second))) / jnp.maximum(largest, 1e-30)


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
