"""Contenders that answer at once. Each notes the calls to it in a file."""

from __future__ import annotations

from pathlib import Path

from bench.peers.contender import CannotRun, Setup

from jaxsgl.bench.requests import Job


class Echo:
    """Returns the prompt's first token again and again; fails in the run with number `fails_at`."""

    def __init__(self, name: str, notes: str, fails_at: int = 0) -> None:
        self._name, self._notes, self._fails_at = name, Path(notes), fails_at
        self._runs = 0

    def _note(self, what: str) -> None:
        with self._notes.open("a") as file:
            file.write(f"{self._name} {what}\n")

    def start(self, setup: Setup) -> None:
        print("standard output is not for contenders")
        self._note("start")

    def versions(self) -> dict[str, str]:
        return {"echo": "1"}

    def reset(self) -> None:
        self._note("reset")

    def run(self, jobs: list[Job]) -> list[list[int]]:
        self._runs += 1
        if self._runs == self._fails_at:
            raise ValueError("out of tokens")
        self._note(f"run {len(jobs)}")
        return [[job.prompt_ids[0]] * job.output_len for job in jobs]

    def close(self) -> None:
        self._note("close")


class Refuses(Echo):
    def start(self, setup: Setup) -> None:
        raise CannotRun("needs another machine")


class Dies(Echo):
    def start(self, setup: Setup) -> None:
        raise SystemExit("no memory left")
