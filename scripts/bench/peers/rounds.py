"""Runs contenders in turns, checks what they return, and compares their speeds. Knows no engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.peers.contender import UNTOLD, CannotRun, Kind, Setup
from bench.peers.process import Process
from bench.processes import cpu_s
from jaxsgl.bench.requests import Job

OURS = "jaxsgl"  # names of our own contenders begin so
# Contenders are compared with the fastest jaxsgl of their class: of those with weights of as many bits, by their names.
CLASSES = {"int8": ("int8", "q8_0"), "int4": ("int4", "q4_0")}
WHOLE = "16 and 32 bits"
EXACT = "float32"  # in the name of the jaxsgl whose tokens are the reference for all contenders
WARM_UP_TOKENS = 8
IDLE_SHARE = 0.03  # share of a core that idle processes may take


class WrongOutput(Exception):
    """A contender returned the wrong number of tokens, so its speed means nothing."""


@dataclass
class Entry:
    """A contender that runs.

    Attributes:
      process: its process.
      versions: versions and settings that it reported.
      start_s: seconds to load and to warm up.
      seconds: seconds of each round.
      cpu_seconds: processor time of its process in each round.
      idle_cpu_share: cores that all other contenders took while this one ran, for each round.
      outputs: outputs of the last round.
    """

    process: Process
    versions: dict[str, str]
    start_s: float
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    idle_cpu_share: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)


class Match:
    """Starts contenders and runs them in turns.

    Args:
      setup: what every contender knows before it loads.
      jobs: requests of a round.
      logs: folder for what contenders print.
      say: takes a line about each event.
    """

    def __init__(self, setup: Setup, jobs: list[Job], logs: Path, say: Callable[[str], None]) -> None:
        self._setup, self._jobs, self._logs, self._say = setup, jobs, logs, say
        self.entries: dict[str, Entry] = {}
        self.absent: dict[str, str] = {}

    def enter(self, name: str, kind: Kind) -> None:
        """Starts a contender and warms it up with all prompts and short outputs. If it can't run, notes why.

        Raises:
          WrongOutput: it returned the wrong number of tokens.
        """
        begin_s = time.monotonic()
        try:
            process = Process(kind, self._logs / f"{len(self.entries) + len(self.absent)}.log", self._setup.device)
        except CannotRun as reason:
            self._absent(name, reason)
            return
        try:
            versions = process.start(self._setup)
            warm_up = [replace(job, output_len=min(job.output_len, WARM_UP_TOKENS)) for job in self._jobs]
            check(name, warm_up, process.run(warm_up).outputs)
        except CannotRun as reason:
            self._leave(name, process, reason)
        except BaseException:
            process.close()
            raise
        else:
            self.entries[name] = Entry(process, versions, time.monotonic() - begin_s)
            self._say(f"{name} is ready after {self.entries[name].start_s:.1f} s")

    def round(self) -> None:
        """Runs each contender once, in turns. Raises `WrongOutput`."""
        for name, entry in list(self.entries.items()):
            others = [other.process.pid for other in self.entries.values() if other is not entry]
            before_s, begin_s = sum(map(cpu_s, others)), time.monotonic()
            try:
                run = entry.process.run(self._jobs)
            except CannotRun as reason:
                del self.entries[name]
                self._leave(name, entry.process, reason)
                continue
            check(name, self._jobs, run.outputs)
            entry.outputs = run.outputs
            entry.seconds.append(run.seconds)
            entry.cpu_seconds.append(run.cpu_seconds)
            entry.idle_cpu_share.append((sum(map(cpu_s, others)) - before_s) / (time.monotonic() - begin_s))
            busy = entry.idle_cpu_share[-1] > IDLE_SHARE
            disturbed = f"; others took {entry.idle_cpu_share[-1]:.0%} of a core" if busy else ""
            by_cpu = f"{self._num_tokens / run.cpu_seconds:.1f} a CPU second"
            self._say(f"{name}: {self._num_tokens / run.seconds:.1f} output tokens/s, {by_cpu}{disturbed}")

    def close(self) -> None:
        """Ends all processes."""
        for entry in self.entries.values():
            entry.process.close()

    def figures(self) -> dict[str, Any]:
        """Speeds of all contenders, and the ratio of the fastest jaxsgl of their class to each, round by round.

        "best_jaxsgl" is the fastest of 16 and 32 bits, else of all that ran.
        """
        speeds = {name: [self._num_tokens / s for s in entry.seconds] for name, entry in self.entries.items()}
        by_cpu = {name: [self._num_tokens / s for s in entry.cpu_seconds] for name, entry in self.entries.items()}
        ours = [name for name in speeds if name.startswith(OURS)]
        reference = next((self.entries[name] for name in ours if EXACT in name), None)
        told = {}
        for name, entry in self.entries.items():
            best, best_by_cpu = (fastest(figures, class_of(name)) for figures in (speeds, by_cpu))
            told[name] = {
                "class": class_of(name),
                "output_tokens_per_s": spread(speeds[name]),
                "output_tokens_per_cpu_s": spread(by_cpu[name]),
                "ratio_of_best_jaxsgl": ratios(speeds, best, name),
                "cpu_ratio_of_best_jaxsgl": ratios(by_cpu, best_by_cpu, name),
                "same_tokens": same_tokens(entry.outputs, reference.outputs) if reference else None,
                "idle_cpu_share": entry.idle_cpu_share,
                "start_s": entry.start_s,
                "versions": entry.versions,
            }
        found = (fastest(speeds, class_name) for class_name in (WHOLE, *CLASSES))
        return {"best_jaxsgl": next(filter(None, found), None), "contenders": told, "could_not_run": self.absent}

    @property
    def _num_tokens(self) -> int:
        """Output tokens of a round."""
        return sum(job.output_len for job in self._jobs)

    def _leave(self, name: str, process: Process, reason: CannotRun) -> None:
        process.close()
        self._absent(name, reason)

    def _absent(self, name: str, reason: CannotRun) -> None:
        self.absent[name] = str(reason)
        self._say(f"{name} can't run: {reason}")


def check(name: str, jobs: list[Job], outputs: list[list[int]]) -> None:
    """Raises `WrongOutput` unless each job got exactly its number of tokens."""
    if len(outputs) != len(jobs):
        raise WrongOutput(f"{name} returned {len(outputs)} outputs for {len(jobs)} requests")
    for i, (job, output) in enumerate(zip(jobs, outputs, strict=True)):
        if len(output) != job.output_len:
            raise WrongOutput(f"{name} returned {len(output)} tokens for request {i}, which asked for {job.output_len}")


def class_of(name: str) -> str:
    """The class that a contender's name says: int8, int4, else of 16 and 32 bits."""
    return next((kind for kind, marks in CLASSES.items() if any(mark in name for mark in marks)), WHOLE)


def fastest(speeds: dict[str, list[float]], class_name: str) -> str | None:
    """Our contender of the class with the greatest median."""
    ours = [name for name in speeds if name.startswith(OURS) and class_of(name) == class_name]
    return max(ours, key=lambda name: statistics.median(speeds[name]), default=None)


def ratios(speeds: dict[str, list[float]], best: str | None, name: str) -> dict[str, Any] | None:
    """How many times as fast as `name` the contender `best` was, round by round."""
    return spread([a / b for a, b in zip(speeds[best], speeds[name], strict=True)]) if best else None


def spread(values: list[float]) -> dict[str, Any]:
    """Median, least, greatest, and all values."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": values}


def same_tokens(outputs: list[list[int]], reference: list[list[int]]) -> dict[str, float] | None:
    """Shares of requests whose first token, and whose whole output, equals the reference; None if ids are not known.

    "leading" is how many tokens of an output are the reference's before the first that isn't, on average.
    With random weights the two best tokens are often nearly equal, and rounding may choose either.
    """
    pairs = list(zip(outputs, reference, strict=True))
    if any(UNTOLD in output for output in outputs):
        return None
    return {
        "first": sum(ours[0] == theirs[0] for ours, theirs in pairs) / len(pairs),
        "whole": sum(ours == theirs for ours, theirs in pairs) / len(pairs),
        "leading": statistics.mean(num_leading(ours, theirs) for ours, theirs in pairs),
    }


def num_leading(ours: list[int], theirs: list[int]) -> int:
    """Tokens of `ours` that equal those of `theirs` before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
