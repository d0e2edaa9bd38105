"""Compiles many programs at start-up: in parallel, showing how far it is, from the persistent cache where it can.

Knows nothing about steps or buckets. Tracing holds Python's lock, so it stays in the calling thread and feeds threads
in which XLA compiles. Called by `programs` and `engine`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax
from jax.experimental.compilation_cache import compilation_cache
from tqdm import tqdm

from jaxsgl.errors import ConfigError
from jaxsgl.hosts.group import processors
from pallas_kernels.own_folder import own_folder

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
REPORT_S = 10.0  # between two lines of the log about programs that are being compiled

KeyT = TypeVar("KeyT", bound=Hashable)

logger = logging.getLogger(__name__)


class Compilation(NamedTuple):
    """A program, and the time that it took, in seconds on the clock: other programs are lowered and compiled meanwhile.

    Attributes:
      compiled: the program, ready to run.
      lower_s: time of tracing and lowering.
      compile_s: time of XLA, or of reading the persistent cache.
    """

    compiled: jax.stages.Compiled
    lower_s: float
    compile_s: float


def use_compilation_cache(directory: str | None, compilers: str = "") -> None:
    """Keeps every compiled program in `directory` between starts; None: in the default directory; "": nowhere.

    compilers: a name of what else compiles programs, of which JAX's key of a program knows nothing. Programs are kept
    in a folder of that name in the directory, so that those of another version are not taken.

    This sets JAX's configuration, and so holds for the whole process. Raises `ConfigError` as `cache_folder` does.
    """
    folder = cache_folder(directory, compilers)
    if folder is None:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # JAX decides once per process whether it has a cache: without this, a program compiled earlier would decide it.
    compilation_cache.reset_cache()


def cache_folder(directory: str | None, compilers: str) -> Path | None:
    """The folder of `use_compilation_cache`, made if it is missing; None: nothing is to be kept.

    What is kept there runs as it is, so only this user may be able to write to it. A default directory that is not so
    is not used.

    Raises:
      ConfigError: `directory` is named, and can't be made or other users can write to it.
    """
    if directory == "":
        return None
    folder = (_default_cache_dir() if directory is None else Path(directory)).expanduser()
    try:
        own_folder(folder, tighten=directory is None)
        return own_folder(folder / compilers) if compilers else folder
    except OSError as error:
        if directory is not None:
            raise ConfigError(
                f"--compilation-cache-dir {directory}: {error}; name a directory of your own, or '' for none"
            ) from None
        logger.warning("compiled programs are not kept between starts: %s", error)
        return None


def _default_cache_dir() -> Path:
    """A folder in the user's cache folder, which XDG_CACHE_HOME may move."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "jaxsgl" / "xla"


def compile_all(
    lowerings: Mapping[KeyT, Callable[[], jax.stages.Lowered]], *, progress: bool, threads: int | None = None
) -> dict[KeyT, Compilation]:
    """Lowers each program here, and compiles them in so many `threads`; None: as many as there are processors."""
    shown = _showing(len(lowerings)) if progress and lowerings else nullcontext(lambda: None)
    with shown as count, ThreadPoolExecutor(threads or processors(), thread_name_prefix="compile") as pool:
        futures: dict[KeyT, Future[Compilation]] = {}
        for key, lower in lowerings.items():
            start_s = time.monotonic()
            lowered = lower()
            futures[key] = pool.submit(_compile, lowered, time.monotonic() - start_s)
            futures[key].add_done_callback(lambda _: count())
        if wait(futures.values(), return_when=FIRST_EXCEPTION).not_done:
            pool.shutdown(cancel_futures=True)
        return {key: future.result() for key, future in futures.items()}


@contextmanager
def _showing(total: int) -> Iterator[Callable[[], object]]:
    """Gives what counts a program, in any thread: by a progress bar, or by lines of the log where bars are off."""
    if not os.environ.get("TQDM_DISABLE"):
        with tqdm(total=total, desc="compiling", unit="program", file=sys.stderr) as bar:
            yield bar.update
        return
    lock, done, reported_s = threading.Lock(), 0, time.monotonic()

    def count() -> None:
        nonlocal done, reported_s
        with lock:
            done += 1
            now_s = time.monotonic()
            if now_s - reported_s < REPORT_S:
                return
            reported_s = now_s
            logger.info("compiling: %d of %d programs", done, total)

    yield count


def _compile(lowered: jax.stages.Lowered, lower_s: float) -> Compilation:
    start_s = time.monotonic()
    compiled = lowered.compile()
    return Compilation(compiled, lower_s, time.monotonic() - start_s)


class CompileCounter:
    """Counts the programs that XLA compiles in this process, in any thread, including those taken from the cache."""

    def __init__(self) -> None:
        self.count = 0
        self._paused = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def close(self) -> None:
        """Stops counting."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    @contextmanager
    def not_counting(self) -> Iterator[None]:
        """Leaves out what this thread compiles inside: programs that load weights, not those that serve."""
        self._paused.now = True
        try:
            yield
        finally:
            self._paused.now = False

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILE_EVENT and not getattr(self._paused, "now", False):
            self.count += 1
