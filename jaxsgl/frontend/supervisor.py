"""The engine process's life: start it, learn when it is ready, notice its death at once, end it.

Owns the process, the line to it (ipc.py) and the pipe by which it notices our death. Knows nothing of requests: what
the engine says of them goes to a callback. Used inside one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from jaxsgl.config import EngineConfig
from jaxsgl.errors import EngineUnavailable, StartupError
from jaxsgl.ipc import Endpoints, EngineLaunch, EngineLine
from jaxsgl.logs import LogStyle
from jaxsgl.messages import EngineFailed, EngineInfo, EngineReady, FromEngine, News, Shutdown, ToEngine

ENGINE_COMMAND = (sys.executable, "-m", "jaxsgl.engine_process")
LAST_WORDS_S = 0.2  # a dead process's last messages may still be on their way
STOP_S = 5.0  # for the engine to leave its loop; then it is killed

logger = logging.getLogger(__name__)


class EngineSupervisor:
    """Runs one engine process, from `start` to `stop`."""

    def __init__(self, config: EngineConfig, log_style: LogStyle, command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._config = config
        self._log_style = log_style
        self._command = command
        self._endpoints: Endpoints | None = None
        self._line: EngineLine | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._tell: Callable[[News], None] = lambda news: None
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineInfo] = loop.create_future()
        self._death: asyncio.Future[str] = loop.create_future()

    async def start(self, tell: Callable[[News], None]) -> None:
        """Starts the process; from now on what it says goes to `tell`. Returns before it is ready."""
        self._tell = tell
        self._endpoints = Endpoints.create()
        self._line = EngineLine(self._endpoints)
        self._line.listen(self._receive)
        launch = EngineLaunch(self._config, self._endpoints, self._log_style)
        # A session of its own: Ctrl-C in the terminal is for us alone. (uvloop knows no process_group.)
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        self._watcher = asyncio.create_task(self._watch(self._process))
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it died at once: the watcher tells
            self._process.stdin.write(msgspec.json.encode(launch) + b"\n")
            await self._process.stdin.drain()

    @property
    def pid(self) -> int | None:
        """Process id of the engine, None before `start`."""
        return self._process.pid if self._process is not None else None

    async def ready(self) -> EngineInfo:
        """Waits until requests may be sent. Raises `StartupError` if the process ends before."""
        either: set[asyncio.Future[Any]] = {self._ready, self._death}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._death.done():
            raise StartupError(self._death.result())
        return self._ready.result()

    async def death(self) -> str:
        """Waits until the process has failed or ended; returns why."""
        return await asyncio.shield(self._death)

    def send(self, message: ToEngine) -> None:
        """Sends a message without waiting. Raises `EngineUnavailable` if the process doesn't listen."""
        if self._line is None:
            raise EngineUnavailable("the engine process is not running: try again later")
        self._line.send(message)

    async def stop(self) -> None:
        """Ends the process, by asking if it can hear, and clears up. May be called in any state."""
        if self._process is not None and self._watcher is not None:
            await self._end(self._process, self._watcher)
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._endpoints is not None:
            self._endpoints.remove()

    def kill(self) -> None:
        """Ends the process at once; for when there is no time for `stop`."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._endpoints is not None:
            self._endpoints.remove()

    async def _end(self, process: asyncio.subprocess.Process, watcher: asyncio.Task[None]) -> None:
        if self._ready.done() and not self._death.done():
            with contextlib.suppress(EngineUnavailable):
                self.send(Shutdown())
                await asyncio.wait({watcher}, timeout=STOP_S)
        elif self._death.done():
            await asyncio.wait({watcher}, timeout=STOP_S)
        if process.returncode is None:
            if self._ready.done():
                logger.warning("the engine process %d did not end within %.0f s: killing it", process.pid, STOP_S)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await watcher
        assert process.stdin is not None
        process.stdin.close()

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, EngineReady):
            self._ready.set_result(message.info)
        elif isinstance(message, EngineFailed):
            self._die(message.message)
        else:
            self._tell(message)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        if not self._death.done():
            await asyncio.sleep(LAST_WORDS_S)
        reason = f"the engine process {process.pid} {_how_it_ended(status)}"
        if self._death.done() and self._ready.done():  # its last words came before
            logger.error("%s", reason)
        self._die(reason)

    def _die(self, reason: str) -> None:
        if not self._death.done():
            self._death.set_result(reason)


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    name = {number.value: number.name for number in signal.Signals}.get(-status, "unnamed")
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was killed by signal {-status}, {name}{hint}"
