"""Environments of the clients, made by pip and npm in .cache/clients, and what surrounds a client that runs.

None of the clients' requirements is ours. An environment is made once for all that it is made of: the lock, and the
interpreter's version. run.py and programs.py call this.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MADE = ROOT / ".cache" / "clients"
# Clients that report what they do, and servers of proxies and of models, stay out of it.
_QUIET = {
    "DO_NOT_TRACK": "1", "HAYSTACK_TELEMETRY_ENABLED": "False", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HF_HUB_OFFLINE": "1", "PROMPTFOO_DISABLE_TELEMETRY": "1", "PROMPTFOO_DISABLE_UPDATE": "1",
    "PROMPTFOO_DISABLE_REMOTE_GENERATION": "true",
}  # fmt: skip


def python_programs(lock: Path) -> Path:
    """The folder of programs (`python` too) of an environment with all that `lock` pins; makes it if it is missing."""
    with _made_once(lock, sys.version) as (folder, is_made):
        programs = folder / "bin"
        if not is_made:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
            install = [str(programs / "python"), "-m", "pip", "install", "-q", "--no-deps", "-r", str(lock)]
            subprocess.run(install, check=True)
    return programs


def node_folder(source: Path) -> Path:
    """A copy of `source` with the packages that its package-lock.json pins; makes it if it is missing."""
    with _made_once(*sorted(source.iterdir())) as (folder, is_made):
        if not is_made:
            shutil.copytree(source, folder, dirs_exist_ok=True)
            subprocess.run(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=folder, check=True)
    return folder


def node_programs(source: Path) -> Path:
    """The folder of programs of `node_folder`."""
    return node_folder(source) / "node_modules" / ".bin"


def surroundings(home: Path) -> Mapping[str, str]:
    """The environment's variables of a client whose home is `home`; it sees no proxy."""
    proxyless = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    return proxyless | _QUIET | {"HOME": str(home), "NO_COLOR": "1"}


@contextlib.contextmanager
def _made_once(*depends_on: Path | str) -> Iterator[tuple[Path, bool]]:
    """The folder of an environment, and whether it is complete: it is once the block ends. Other processes wait."""
    parts = (each.read_bytes() if isinstance(each, Path) else each.encode() for each in depends_on)
    folder = MADE / hashlib.sha256(b"".join(parts)).hexdigest()[:16]
    MADE.mkdir(parents=True, exist_ok=True)
    with (MADE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder, (folder / "complete").exists()
        (folder / "complete").touch()
