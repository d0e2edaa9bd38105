"""The process of one contender: a JSON line for each command on standard input, one for each answer on standard output.

Started by `process.py`. What libraries print goes to standard error, so that the answers stay readable.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import traceback
from typing import IO, Any

import msgspec

from bench.peers.contender import CannotRun, Contender, Setup
from bench.workloads.jobs import Job


def serve(where: str, options: dict[str, Any], commands: IO[str], answers: IO[str]) -> None:
    """Obeys until the commands end; the first one imports and makes the contender, module:class with `options`."""
    contender: Contender | None = None

    def answer(**told: Any) -> None:
        answers.write(msgspec.json.encode(told).decode() + "\n")
        answers.flush()

    for line in commands:
        command = msgspec.json.decode(line)
        try:
            match command["do"]:
                case "start":
                    module, _, name = where.partition(":")
                    contender = getattr(importlib.import_module(module), name)(**options)
                    contender.start(msgspec.convert(command["setup"], Setup))
                    answer(versions=contender.versions())
                case "run":
                    assert contender is not None, "it runs once it was started"
                    jobs = msgspec.convert(command["jobs"], list[Job])
                    contender.reset()
                    begin_s = time.perf_counter()
                    outputs = contender.run(jobs)
                    answer(seconds=time.perf_counter() - begin_s, outputs=outputs)
        except (CannotRun, ImportError) as reason:
            answer(cannot=str(reason))
        except Exception as error:  # whatever goes wrong in an engine must not end the others' runs
            traceback.print_exc()
            answer(cannot=f"{type(error).__name__}: {error}")
    if contender is not None:
        contender.close()


def main() -> None:
    """Takes module:class and its options as JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.argv[1], msgspec.json.decode(sys.argv[2]), sys.stdin, answers)


if __name__ == "__main__":
    main()
