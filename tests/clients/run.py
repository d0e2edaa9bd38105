"""Run client libraries, as they are published, against a server of the bundled model, and print a row for each.

    python tests/clients/run.py                  # all of requirements.lock
    python tests/clients/run.py openai litellm   # some
    python tests/clients/run.py --python clients/bin/python    # in an environment that has them; installs nothing

The clients get environments of their own in .cache/clients, made by pip with the versions of requirements.lock and by
npm with those of javascript/package-lock.json, so that none of their requirements is ours. Returns 1 if a case fails.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LOCK = HERE / "requirements.lock"
CASES = HERE / "client_cases.py"
ENVIRONMENTS = ROOT / ".cache" / "clients"
JAVASCRIPT = HERE / "javascript"
NODE_CASES = {"vercel-ai": "vercel_ai_cases.mjs"}  # clients that run in Node, and their cases
# As client_cases.py names them; that file is not imported here, since it needs the clients' packages.
NAMES = (
    "openai", "anthropic", "litellm", "langchain-openai", "instructor", "pydantic-ai", "openai-agents", "llama-index",
    "smolagents", "haystack", "dspy", *NODE_CASES,
)  # fmt: skip
START_S, CLIENT_S = 600.0, 600.0
# Clients that report what they do, and servers of proxies, stay out of it.
QUIET = {"DO_NOT_TRACK": "1", "HAYSTACK_TELEMETRY_ENABLED": "False", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def main(arguments: Sequence[str]) -> int:
    """Prints the rows; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *NAMES], help="clients (default: all)")
    parser.add_argument("--python", help="that of an environment which has the clients (default: one is made)")
    options = parser.parse_args(arguments)
    failed = False
    with server() as url:
        for name in options.names or NAMES:
            found = run(command_of(name, options.python), url)
            print(row(name, found), flush=True)
            failed |= any(found.values())
    return int(failed)


def command_of(name: str, python: str | None = None) -> list[str]:
    """What runs a client's cases, once it has the server's URL too; makes the client's environment if it is missing."""
    if name in NODE_CASES:
        return ["node", str(node_environment() / NODE_CASES[name])]
    return [python or environment(), str(CASES), name]


def run(command: Sequence[str], url: str) -> Mapping[str, str | None]:
    """What came of each case of a client: an error, or None."""
    with tempfile.TemporaryDirectory() as home:
        proxyless = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        ended = subprocess.run(
            [*command, url], capture_output=True, text=True, timeout=CLIENT_S, env=proxyless | QUIET | {"HOME": home}
        )
    lines = ended.stdout.splitlines()
    if lines and lines[-1].startswith("{"):
        if ended.returncode:
            print(ended.stderr[-3000:], file=sys.stderr)
        return json.loads(lines[-1])
    return {"start": (ended.stderr.strip().splitlines() or ["no output"])[-1]}


def row(name: str, found: Mapping[str, str | None]) -> str:
    """A line of the table."""
    return f"{name:18}" + "  ".join(f"{case}: {'ok' if error is None else error:.200}" for case, error in found.items())


def environment() -> str:
    """The Python of the clients' environment, which is made if it is missing."""
    with made_once(LOCK, sys.version) as (folder, is_made):
        python = str(folder / "bin" / "python")
        if not is_made:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "-r", str(LOCK)], check=True)
    return python


def node_environment() -> Path:
    """A copy of javascript/ with the packages that it names, which is made if it is missing."""
    with made_once(*sorted(JAVASCRIPT.iterdir())) as (folder, is_made):
        if not is_made:
            shutil.copytree(JAVASCRIPT, folder, dirs_exist_ok=True)
            subprocess.run(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=folder, check=True)
    return folder


@contextlib.contextmanager
def made_once(*depends_on: Path | str) -> Iterator[tuple[Path, bool]]:
    """The folder of an environment, and whether it is complete: it is once the block ends. Other processes wait."""
    parts = (each.read_bytes() if isinstance(each, Path) else each.encode() for each in depends_on)
    folder = ENVIRONMENTS / hashlib.sha256(b"".join(parts)).hexdigest()[:16]
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    with (ENVIRONMENTS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder, (folder / "complete").exists()
        (folder / "complete").touch()


@contextlib.contextmanager
def server(flags: Sequence[str] = ()) -> Iterator[str]:
    """A server of the bundled model, until the block ends; gives its URL."""
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
            found = re.search(r"listening on .* and (\S+) \(HTTP\)", log.read_text())
            assert found is not None
            yield f"http://{found[1]}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
