"""One case through all contenders: correct first, then timed, as rows of a table.

Owns what a row holds. A contender that can't run is a row with a note; one that fails is too, so that a table never
ends early.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from kernel_bench import ours
from kernel_bench.baselines import Prepare, baselines_for
from kernel_bench.cases import STORE, KernelCase
from kernel_bench.inputs import Inputs, layers_for, make_inputs
from kernel_bench.ours import Unsupported
from kernel_bench.reference import attention_error, store_error
from kernel_bench.runners import JaxRunner, Runner, Timing, time_all
from kernel_bench.torch_baselines import torch_baselines
from kernel_bench.work import Roofline, work_of

BASELINES = "baselines"


@dataclasses.dataclass(frozen=True)
class Row:
    """A contender on a case. Times in seconds per call; None where it could not run, and `note` says why."""

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
    error: float | None = None
    compile_s: float | None = None
    note: str = ""

    @property
    def bytes_per_s(self) -> float | None:
        """Useful bytes over time."""
        return self.num_bytes / self.seconds if self.seconds else None

    @property
    def flops_per_s(self) -> float | None:
        """Useful FLOPs over time."""
        return self.flops / self.seconds if self.seconds else None

    @property
    def fraction(self) -> float | None:
        """Of the measured roofline: 1 is the floor."""
        return self.floor_s / self.seconds if self.seconds else None

    @property
    def is_right(self) -> bool:
        """The error is what rounding explains. NaN isn't."""
        return self.error is not None and self.error < MAX_ERROR

    def as_json(self) -> dict[str, Any]:
        """All of it, what is computed included."""
        computed = ("bytes_per_s", "flops_per_s", "fraction", "is_right")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in computed}


# Relative to the output's norm. bfloat16 inputs give 1e-3 to 1e-2, float8 caches no more, since both sides read them.
MAX_ERROR = 2e-2


def contenders_for(case: KernelCase, platform: str, wanted: list[str]) -> dict[str, Callable[[Inputs], Runner]]:
    """Those among `wanted` (names of our backends, "baselines" for all others) that do what the case's op does."""
    chosen: dict[str, Callable[[Inputs], Runner]] = {}
    for backend in ours.backends_for(platform):
        if backend in wanted:
            chosen[backend] = functools.partial(_run_ours, backend)
    if BASELINES in wanted:
        for name, prepare in baselines_for(case.op, platform).items():
            chosen[name] = functools.partial(_run_prepared, prepare)
        chosen |= torch_baselines(case.op, platform)
    return chosen


def measure_case(case: KernelCase, platform: str, wanted: list[str], roofline: Roofline, repeats: int) -> Iterator[Row]:
    """A row for each contender. On a CPU they take turns; elsewhere one is freed before the next is made."""
    inputs = make_inputs(case, layers_for(case, platform))
    work = work_of(case)
    contenders = contenders_for(case, platform, wanted)
    groups = [list(contenders)] if platform == "cpu" else [[name] for name in contenders]
    own_names = ours.backends_for(platform)
    for names in groups:
        rows, runners = {}, {}
        for name in names:
            rows[name] = functools.partial(
                Row, case.label, case.op, name, name in own_names, work.num_bytes, work.flops,
                roofline.floor_s(work), roofline.bound(work),
            )  # fmt: skip
            runner, found = _checked(contenders[name], inputs)
            rows[name] = functools.partial(rows[name], **found)
            if runner is not None:
                runners[name] = runner
        try:
            timings = time_all(runners, platform, repeats)
        except Exception as error:
            timings = {}
            rows = {name: functools.partial(row, note=_first_line(error)) for name, row in rows.items()}
        for name in names:
            yield rows[name](**_times(timings.get(name)))
        del runners


def _run_ours(backend: str, inputs: Inputs) -> Runner:
    return JaxRunner(ours.prepare(backend, inputs))


def _run_prepared(prepare: Prepare, inputs: Inputs) -> Runner:
    return JaxRunner(prepare(inputs))


def check_error(inputs: Inputs, runner: Runner) -> float:
    """The error of the first layer's output, or of its cache for a store."""
    check = store_error if inputs.case.op == STORE else attention_error
    return check(inputs, inputs.layers[0], runner.check())


def _checked(make: Callable[[Inputs], Runner], inputs: Inputs) -> tuple[Runner | None, dict[str, Any]]:
    try:
        runner = make(inputs)
        found = {"error": check_error(inputs, runner), "compile_s": getattr(runner, "compile_s", None)}
    except Unsupported as error:
        return None, {"note": str(error)}
    except Exception as error:  # a baseline's own limits, a kernel that doesn't compile: the others still count
        return None, {"note": _first_line(error)}
    return runner, found


def _times(timing: Timing | None) -> dict[str, Any]:
    return {} if timing is None else dataclasses.asdict(timing)


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:200]}"
