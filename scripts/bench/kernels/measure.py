"""Measures one case with all contenders: each is checked, then timed, and becomes a row of a table.

Owns what a row holds. A contender that can't run, or that fails, becomes a row with a note, so that a table never ends
early.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bench.kernels.cases import STORE, KernelCase, work_of
from bench.kernels.contenders import Prepare, Unsupported, backends_for, baselines_for, prepare_backend
from bench.kernels.inputs import Inputs, layers_for, make_inputs
from bench.kernels.reference import attention_error, store_error
from bench.kernels.runners import JaxRunner, Runner, time_all
from bench.kernels.torch_baselines import torch_baselines
from bench.roofline import Roofline

BASELINES = "baselines"
# The names of contenders that need no pages end so.
UNPAGED = "(unpaged)"


@dataclasses.dataclass(frozen=True)
class Row:
    """A contender on a case. Times are seconds per call; None if it could not run, and `note` says why."""

    case: str
    op: str
    contender: str
    is_ours: bool
    num_bytes: int
    flops: int
    floor_s: float
    bound: str
    seconds: float | None = None
    fastest: float | None = None
    slowest: float | None = None
    cpu_seconds: float | None = None
    error: float | None = None
    compile_s: float | None = None
    note: str = ""

    @property
    def bytes_per_s(self) -> float | None:
        """Useful bytes per second."""
        return self.num_bytes / self.seconds if self.seconds else None

    @property
    def flops_per_s(self) -> float | None:
        """Useful FLOPs per second."""
        return self.flops / self.seconds if self.seconds else None

    @property
    def fraction(self) -> float | None:
        """Share of the measured roofline; 1 is the floor."""
        return self.floor_s / self.seconds if self.seconds else None

    @property
    def is_right(self) -> bool:
        """Whether rounding explains the error; false for NaN."""
        return self.error is not None and self.error < MAX_ERROR

    def as_json(self) -> dict[str, Any]:
        """All fields and properties as JSON."""
        computed = ("bytes_per_s", "flops_per_s", "fraction", "is_right")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in computed}


# Relative to the norm of the output. bfloat16 inputs give 1e-3 to 1e-2; float8 caches give no more, since the reference
# reads the same cache.
MAX_ERROR = 2e-2


def contenders_for(case: KernelCase, platform: str, wanted: list[str]) -> dict[str, Callable[[Inputs], Runner]]:
    """The contenders for the op of the case, among `wanted`: names of backends, or "baselines" for all baselines."""
    chosen: dict[str, Callable[[Inputs], Runner]] = {}
    for backend in backends_for(platform):
        if backend in wanted:
            chosen[backend] = functools.partial(_run_ours, backend)
    if BASELINES in wanted:
        for name, prepare in baselines_for(case.op, platform).items():
            chosen[name] = functools.partial(_run_prepared, prepare)
        chosen |= torch_baselines(case.op, platform)
    return chosen


def measure_case(
    case: KernelCase, platform: str, wanted: list[str], roofline: Roofline, repeats: int, known: Mapping[str, Row]
) -> Iterator[Row]:
    """Yields a row for each contender. On a CPU they take turns; elsewhere one is freed before the next is made.

    `known` holds rows of the same batch at another page size: unpaged contenders are not measured again.
    """
    inputs = make_inputs(case, layers_for(case, platform))
    work = work_of(case)
    own_names = backends_for(platform)
    contenders = contenders_for(case, platform, wanted)
    for name in [name for name in contenders if name.endswith(UNPAGED) and name in known]:
        yield dataclasses.replace(known[name], case=case.label)
        del contenders[name]

    def row(name: str, **found: Any) -> Row:
        floor_s, bound = roofline.floor_s(work), roofline.bound(work)
        is_ours = name in own_names
        return Row(case.label, case.op, name, is_ours, work.num_bytes, work.flops, floor_s, bound, **found)

    for names in [list(contenders)] if platform == "cpu" else [[name] for name in contenders]:
        measured = _measure(inputs, {name: contenders[name] for name in names}, platform, repeats)
        yield from (row(name, **measured[name]) for name in names)


def _measure(
    inputs: Inputs, contenders: Mapping[str, Callable[[Inputs], Runner]], platform: str, repeats: int
) -> dict[str, dict[str, Any]]:
    """The measured fields of `Row` for each contender."""
    found: dict[str, dict[str, Any]] = {}
    runners: dict[str, Runner] = {}
    for name, make in contenders.items():
        try:
            runner = make(inputs)
            found[name] = {"error": check_error(inputs, runner), "compile_s": getattr(runner, "compile_s", None)}
            runners[name] = runner
        except Unsupported as error:
            found[name] = {"note": str(error)}
        except (
            Exception
        ) as error:  # limits of a baseline, or a kernel that doesn't compile: the other contenders still count
            found[name] = {"note": first_line(error)}
    try:
        for name, timing in time_all(runners, platform, repeats).items():
            found[name] |= dataclasses.asdict(timing)
    except Exception as error:  # the device is lost: keep the errors that were measured before
        for name in runners:
            found[name]["note"] = first_line(error)
    return found


def _run_ours(backend: str, inputs: Inputs) -> Runner:
    return JaxRunner(prepare_backend(backend, inputs))


def _run_prepared(prepare: Prepare, inputs: Inputs) -> Runner:
    return JaxRunner(prepare(inputs))


def check_error(inputs: Inputs, runner: Runner) -> float:
    """The error of the first layer's output; for a store, of its cache."""
    check = store_error if inputs.case.op == STORE else attention_error
    return check(inputs, inputs.layers[0], runner.check())


def first_line(error: Exception) -> str:
    """The class of an error and the beginning of its message."""
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:200]}"
