"""Keeps compiled programs, and environments of other JAX versions, for the next run of the tests, in `.cache/tests`.

Compiled programs are kept per version of jaxlib and kind of processor. Each process of a run, such as a worker of a
parallel run, has its own cache folder for XLA's and exchanges programs with the kept ones between test files: JAX
writes its cache in place, so another process could read half a program, and a killed server leaves half of one behind.
All share one folder of native libraries, whose users wait for each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from importlib import metadata
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".cache" / "tests"
MOST_BYTES = 2 << 30
_DAY_S = 24 * 3600.0


class Programs:
    """The cache folder of this process and of those that it starts; XDG_CACHE_HOME and JAX's variables name it."""

    def __init__(self) -> None:
        runs = FOLDER / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        for left in runs.iterdir():  # left by a run that was killed
            with contextlib.suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > _DAY_S:
                    shutil.rmtree(left, ignore_errors=True)
        self._home = tempfile.TemporaryDirectory(dir=runs)
        self._kept = FOLDER / f"jaxlib-{metadata.version('jaxlib')}-{_processor()}"
        os.environ |= {
            "XDG_CACHE_HOME": self._home.name,
            "JAX_COMPILATION_CACHE_DIR": str(self._folder("xla")),  # where jaxsgl would look too
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            # XLA's own caches put the folder's path into the key of every program, and each run has another folder.
            "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
        }
        native = self._kept / "native"
        for folder in (self._folder("xla"), self._kept / "xla", native):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder("native").symlink_to(native)
        self._shrink()
        self.exchange()

    def exchange(self) -> None:
        """Keeps programs compiled here, and takes those that other processes kept. Files are linked, not copied."""
        folders = self._folder("xla"), self._kept / "xla"
        mine, kept = ({path.name: path for path in folder.iterdir()} for folder in folders)
        for name in mine.keys() - kept.keys():
            if _is_whole(mine[name]):
                _link(mine[name], folders[1] / name)
        for name in kept.keys() - mine.keys():
            _link(kept[name], folders[0] / name)

    def close(self) -> None:
        """Keeps the programs compiled since the last exchange."""
        self.exchange()
        self._home.cleanup()

    def _folder(self, kind: str) -> Path:
        return Path(self._home.name) / "jaxsgl" / kind

    def _shrink(self) -> None:
        """If there is too much, removes the programs unread for longest until half is left."""
        files = []
        for path in (self._kept / "xla").iterdir():
            with contextlib.suppress(FileNotFoundError):  # another run does the same
                files.append((path.stat().st_atime, path.stat().st_size, path))
        total = sum(size for _, size, _ in files)
        if total > MOST_BYTES:
            for _, size, path in sorted(files):
                path.unlink(missing_ok=True)
                total -= size
                if total < MOST_BYTES / 2:
                    break


def environment(python: str, *requirements: str) -> Path:
    """A Python in a virtual environment with just these requirements; made unless an earlier run made it.

    Raises:
      subprocess.CalledProcessError: an installation failed.
    """
    version = subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256("\0".join((version, *requirements)).encode()).hexdigest()[:16]
    home = FOLDER / "environments" / key
    home.mkdir(parents=True, exist_ok=True)
    with (home.parent / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        mine = home / "bin/python"
        if not (home / "complete").exists():
            subprocess.run([python, "-m", "venv", "--clear", str(home)], check=True)
            subprocess.run([mine, "-m", "pip", "install", "-q", "--no-compile", *requirements], check=True)
            (home / "complete").write_text("\n".join(requirements))
    return mine


def _processor() -> str:
    """A name for this processor's set of instructions, for which programs are compiled."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
        return hashlib.sha256(flags.encode()).hexdigest()[:8]
    return "any"


def _is_whole(path: Path) -> bool:
    """Whether a program was written to its end."""
    if not path.name.endswith("-cache"):
        return False
    from jax._src.compilation_cache import decompress_executable

    try:
        decompress_executable(path.read_bytes())
    except Exception:  # depends on the library that compresses
        return False
    return True


def _link(source: Path, to: Path) -> None:
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        os.link(source, to)
