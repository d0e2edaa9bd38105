"""What the testing process is asked, and what it says: one JSON object a line, before each case and after an operation.

Imports no JAX. Written by `__main__`, read by whoever started that.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

PASSED, WRONG, RAISED = "passed", "wrong", "raised"  # said by the process
CRASHED, HUNG = "crashed", "hung"  # said by who watches it
UNTESTED = "untested"  # XLA, or nothing can be said
FAILURES = (WRONG, RAISED, CRASHED, HUNG)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is known of an operation on a backend.

    Attributes:
        op, backend: names.
        verdict: one of those above.
        note: what happened, in words.
        us: microseconds of a call of each size, where they were measured.
    """

    op: str
    backend: str
    verdict: str
    note: str = ""
    us: tuple[float, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether the operation must not run on the backend."""
        return self.verdict in FAILURES

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Verdict:
        """The verdict of its JSON. Raises `TypeError` for anything else."""
        return cls(**{**values, "us": tuple(values.get("us", ()))})


@dataclasses.dataclass(frozen=True)
class Request:
    """What a process is to test.

    Attributes:
        platform: that its device must have: "gpu", "tpu" or "cpu".
        shapes: `KernelShapes` as JSON.
        choice: the backend of each operation, or "auto".
        known: verdicts of processes before: operations that are done, and backends that are not to be tried again.
        interpret: run Pallas's kernels in interpreters.
    """

    platform: str
    shapes: Mapping[str, Any]
    choice: Mapping[str, str]
    known: tuple[Verdict, ...] = ()
    interpret: bool = False

    def line(self) -> str:
        """For the process's standard input."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, line: str) -> Request:
        """The request of a `line`."""
        values = json.loads(line)
        return cls(**{**values, "known": tuple(map(Verdict.of, values["known"]))})


@dataclasses.dataclass(frozen=True)
class Begun:
    """The process is about to compile and run one case of an operation on a backend."""

    op: str
    backend: str
    case: str


@dataclasses.dataclass(frozen=True)
class Ended:
    """The process ends by itself; `problem` is empty if it is done with all operations."""

    problem: str = ""


News = Begun | Verdict | Ended
_KINDS: dict[str, type[News]] = {kind.__name__: kind for kind in (Begun, Verdict, Ended)}


def news_line(news: News) -> str:
    """For the process's output."""
    return json.dumps({"kind": type(news).__name__} | dataclasses.asdict(news)) + "\n"


def parse_news(line: str) -> News:
    """The news of a `line`. Raises `ValueError` for anything else."""
    values = json.loads(line)
    if not isinstance(values, dict) or values.get("kind") not in _KINDS:
        raise ValueError(f"no news: {line[:200]!r}")
    kind = _KINDS[values.pop("kind")]
    return kind.of(values) if issubclass(kind, Verdict) else kind(**values)
