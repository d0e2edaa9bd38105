"""Run client libraries, as they are published, against a server of the bundled model, and print a row for each.

    python -m tests.clients.run                  # all of them
    python -m tests.clients.run openai litellm   # some
    python -m tests.clients.run openai --python clients/bin/python    # in an environment that has it; installs nothing

The clients get environments of their own in .cache/clients, made by pip with the versions of requirements.lock and
evaluators.lock, and by npm with those of npm/*/package-lock.json, so that none of their requirements is ours. Returns 1
if a case fails.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.clients import programs
from tests.clients.environments import HERE, ROOT, node_folder, python_programs, surroundings
from tests.clients.programs import PROGRAMS

CASES = HERE / "client_cases.py"
LOCK = HERE / "requirements.lock"
VERCEL_AI = HERE / "npm" / "vercel-ai"
# As client_cases.py names them; that file is not imported here, since it needs the clients' packages.
LIBRARIES = (
    "openai", "anthropic", "litellm", "langchain-openai", "instructor", "pydantic-ai", "openai-agents", "llama-index",
    "smolagents", "haystack", "dspy", "guidance", "ollama", "langchain-ollama", "smg",
)  # fmt: skip
NAMES = (*LIBRARIES, "vercel-ai", *PROGRAMS)
OF_NODE = ("vercel-ai", *programs.OF_NODE)
START_S, CLIENT_S = 600.0, 600.0


@dataclasses.dataclass(frozen=True)
class Server:
    """A server that is ready: the URL of HTTP without a path, and the address of gRPC."""

    url: str
    grpc: str


def main(arguments: Sequence[str]) -> int:
    """Prints the rows; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *NAMES], help="clients (default: all)")
    parser.add_argument("--python", help="that of an environment which has the libraries (default: one is made)")
    options = parser.parse_args(arguments)
    failed = False
    with server() as at:
        for name in options.names or NAMES:
            found = outcomes(name, at, options.python)
            print(row(name, found), flush=True)
            failed |= any(found.values())
    return int(failed)


def outcomes(name: str, at: Server, python: str | None = None) -> Mapping[str, str | None]:
    """What came of each case of a client: an error, or None. Makes the client's environment if it is missing."""
    if name in PROGRAMS:
        return programs.outcomes(name, at.url)
    if name == "vercel-ai":
        command = ["node", str(node_folder(VERCEL_AI) / "cases.mjs")]
    else:
        command = [python or str(python_programs(LOCK) / "python"), str(CASES), name]
    with tempfile.TemporaryDirectory() as home:
        variables = {**surroundings(Path(home)), "GRPC_ADDRESS": at.grpc}
        ended = subprocess.run([*command, at.url], capture_output=True, text=True, timeout=CLIENT_S, env=variables)
    lines = ended.stdout.splitlines()
    if lines and lines[-1].startswith("{"):
        if ended.returncode:
            print(ended.stderr[-3000:], file=sys.stderr)
        return json.loads(lines[-1])
    return {"start": (ended.stderr.strip().splitlines() or ["no output"])[-1]}


def row(name: str, found: Mapping[str, str | None]) -> str:
    """A line of the table."""
    return f"{name:18}" + "  ".join(f"{case}: {'ok' if error is None else error:.200}" for case, error in found.items())


@contextlib.contextmanager
def server(flags: Sequence[str] = ()) -> Iterator[Server]:
    """A server of the bundled model, until the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        common = ("--port", "0", "--grpc-port", "0", "--tool-call-parser", "hermes")
        command = [sys.executable, "-m", "jaxsgl.serve", *common, *flags]
        with log.open("wb") as out:
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)
        try:
            deadline_s = time.monotonic() + START_S
            while "ready: " not in log.read_text():
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"the server did not start:\n{log.read_text()}")
                time.sleep(0.1)
            found = re.search(r"listening on (\S+) \(gRPC\) and (\S+) \(HTTP\)", log.read_text())
            assert found is not None
            yield Server(f"http://{found[2]}", found[1])
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
