"""Starting a child process of the server: the engine, or a front-end worker; and its end in words.

A child gets a process group of its own, so that Ctrl-C in the terminal reaches the server alone, no keys in its
environment, and a pipe into our log as its standard error. owned_engine.py and workers.py own the processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

from jaxsgl import logs


async def start_child(
    name: str, command: Sequence[str], stdin: int, pass_fds: Sequence[int] = ()
) -> asyncio.subprocess.Process:
    """Starts `command`; log lines that it doesn't format itself appear as lines of the process `name`."""
    # It doesn't need the keys, and might show them in a crash report.
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_API_KEY")}
    stderr = logs.child_stderr(name)
    try:
        return await asyncio.create_subprocess_exec(
            *command, stdin=stdin, stderr=stderr, env=environment, pass_fds=pass_fds, process_group=0
        )
    finally:
        if stderr is not None:
            os.close(stderr)


def how_it_ended(status: int) -> str:
    """Returns a process's end in words, from its exit status; a negative one is a signal's number."""
    if status >= 0:
        return f"ended with exit status {status}"
    name = {number.value: number.name for number in signal.Signals}.get(-status, "unnamed")
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was killed by signal {-status}, {name}{hint}"
