"""`Profiles`: what operators may order of the profiler, and where its traces go: new folders below --profile-dir.

A client names at most a folder there, which must not exist yet: it is made with mode 0700, so nothing that others have
put there, links least of all, is followed or written over. Owns the bounds of an order, which the
scheduler keeps (orders/profiling.py). Knows no protocol; the endpoints of HTTP and gRPC call it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import stat
import time
from pathlib import Path

from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import Forbidden, InvalidRequest, StartupError
from jaxsgl.frontend.engines.link import ANSWER_LIMIT_S
from jaxsgl.frontend.engines.replicas import Replicas
from jaxsgl.messages.orders import Answer, StartProfile, StopProfile

MAX_STEPS = 1000
WRITE_LIMIT_S = 600.0  # a trace of many steps takes minutes to write

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Profiles:
    """Starts and stops profiles of the engine. Raises `StartupError` if --profile-dir can't be used."""

    def __init__(self, config: ServerConfig, engine: Replicas) -> None:
        self._max_s = config.profile_max_s
        self._max_mb = config.profile_max_mb
        self._engine = engine
        self._root = None if config.profile_dir is None else _usable(config.profile_dir)

    async def start(self, name: str | None, num_steps: int | None, by_stage: bool) -> Answer:
        """Starts one in the new folder `name`, or in one of a name of its own; `Answer.text` is its path, or why not.

        Raises:
          Forbidden: the operator has named no folder.
          InvalidRequest: the name or the number of steps is wrong, or --profile-dir holds as much as it may.
        """
        if self._root is None:
            raise Forbidden("no profile may be recorded: start the server with --profile-dir FOLDER")
        if num_steps is not None and not 1 <= num_steps <= MAX_STEPS:
            raise InvalidRequest(f"num_steps is {num_steps}, but must be 1 to {MAX_STEPS}")
        if by_stage and num_steps is None:
            raise InvalidRequest("profile_by_stage is set, but needs num_steps: send it")
        if name and _NAME.fullmatch(name) is None:
            raise InvalidRequest(
                f"output_dir is {name!r}, but must be the name of a new folder below the server's --profile-dir, of up "
                "to 64 letters, digits, dots, dashes and underscores: leave it out, or send such a name"
            )
        folder = await asyncio.to_thread(self._new_folder, self._root, name or f"profile-{time.time_ns()}")
        started = False
        try:
            several = len(self._engine.links) > 1
            answers = await self._engine.ask_each(
                lambda rank, number: StartProfile(
                    number,
                    str(folder / f"replica{rank}" if several else folder),
                    num_steps,
                    by_stage,
                    self._max_s,
                    self._max_mb,
                ),
                ANSWER_LIMIT_S,
            )
            answer = self._engine.together(answers)
            started = answer.ok
            return answer
        finally:
            if not started:
                with contextlib.suppress(OSError):
                    folder.rmdir()

    async def stop(self) -> Answer:
        """Ends the profile and waits until it is written; `Answer.text` is its path, or why there is none."""
        return await self._engine.ask(StopProfile, WRITE_LIMIT_S)

    def _new_folder(self, root: Path, name: str) -> Path:
        held_mb = _bytes_below(root) // 10**6
        if held_mb >= self._max_mb:
            raise InvalidRequest(
                f"--profile-dir holds {held_mb} MB, but may hold {self._max_mb} (--profile-max-mb): remove old profiles"
            )
        folder = root / name
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            raise InvalidRequest(f"output_dir is {name!r}, which exists already: choose another name") from None
        except OSError as error:
            raise InvalidRequest(f"the folder {name!r} can't be made in --profile-dir: {error.strerror}") from None
        return folder


def _usable(path: str) -> Path:
    """Returns the folder, made if need be. Raises `StartupError` if it can't be written, or all others can write it."""
    try:
        folder = Path(path).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        mode = folder.stat().st_mode
    except OSError as error:
        raise StartupError(f"--profile-dir {path} can't be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StartupError(f"--profile-dir {path} can't be written: choose another folder")
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise StartupError(f"--profile-dir {path} can be written by every user: take that right away (chmod o-w)")
    return folder


def _bytes_below(folder: Path) -> int:
    """Sizes of all files below `folder`; links are not followed, and what vanishes meanwhile doesn't count."""
    total = 0
    for top, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(top) / name).lstat().st_size
    return total
