"""The engine process: how the server starts and ends it, and the link to it that the starting process has.

Owns the process, its standard input (which closes when this process dies) and the folder of the sockets. Never knows a
request: calls and commands are the link's (engine_link.py). server.py makes one for each replica, and workers.py does
so if there are several front-end processes, which it starts with `start_child` too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence

import msgspec

from jaxsgl import logs
from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import EngineUnavailable
from jaxsgl.frontend.engines.link import EngineLink
from jaxsgl.ipc import Endpoints, EngineLaunch
from jaxsgl.logs import LogStyle
from jaxsgl.messages.orders import Shutdown
from jaxsgl.stacks import DUMP_SIGNAL, LAST_DUMP_SIGNAL

ENGINE_COMMAND = (sys.executable, "-m", "jaxsgl.engine_process")
FINAL_MESSAGE_S = 0.2  # the final message of a process that has ended may still be on its way
STOP_S = 5.0  # for the engine to leave its loop; then it is killed

logger = logging.getLogger(__name__)


async def start_child(
    name: str, command: Sequence[str], stdin: int, pass_fds: Sequence[int] = ()
) -> asyncio.subprocess.Process:
    """Starts a child of the server, an engine or a front-end worker; lines that it logs bear the `name`.

    It gets a process group of its own, so that Ctrl-C in the terminal reaches the server alone, no keys in its
    environment, and a pipe into our log as its standard error.
    """
    # It doesn't need the keys, and might show them in a crash report.
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_API_KEY")}
    if not logs.are_read_on_terminal():
        environment.setdefault("TQDM_DISABLE", "1")  # a file would keep each state of a progress bar, all in one line
    stderr = logs.child_stderr(name)
    try:
        return await asyncio.create_subprocess_exec(
            *command, stdin=stdin, stderr=stderr, env=environment, pass_fds=pass_fds, process_group=0
        )
    finally:
        if stderr is not None:
            os.close(stderr)


def how_it_ended(status: int, killed: bool) -> str:
    """Returns a process's end in words, from its exit status; a negative one is a signal's number.

    `killed`: by this server, so that there is nothing to guess.
    """
    if status >= 0:
        return f"ended with exit status {status}"
    name = {number.value: number.name for number in signal.Signals}.get(-status, "unnamed")
    hint = " (out of memory?)" if name == "SIGKILL" and not killed else ""
    return f"was killed by signal {-status}, {name}{hint}"


def owned_engines(config: ServerConfig, command: Sequence[str], line: int | None = None) -> list[OwnedEngine]:
    """Returns a link for each replica, by rank; `command` starts its process. `line` as in `OwnedEngine`."""
    log_style = LogStyle(config.log_level, config.log_format)
    names = ["engine"] if config.num_replicas == 1 else [f"engine {rank}" for rank in range(config.num_replicas)]
    return [OwnedEngine(config.engine_of(rank), log_style, command, line, name) for rank, name in enumerate(names)]


class OwnedEngine(EngineLink):
    """An engine process and the link to it. Its end, however it comes, is the link's death.

    `line` is None if this is the only front-end process, else this one's number.
    """

    def __init__(
        self,
        config: EngineConfig,
        log_style: LogStyle,
        command: Sequence[str] = ENGINE_COMMAND,
        line: int | None = None,
        name: str = "engine",
    ) -> None:
        """`name` is what log lines call the process."""
        super().__init__(line)
        self._config = config
        self._log_style = log_style
        self._command = command
        self._name = name
        self._endpoints: Endpoints | None = None
        self._hold: int | None = None  # on the folder of the sockets
        self._process: asyncio.subprocess.Process | None = None
        self._killed = False
        self._watcher: asyncio.Task[None] | None = None

    @property
    def endpoints(self) -> Endpoints:
        """Where the engine process is spoken to, once `start` was called."""
        assert self._endpoints is not None
        return self._endpoints

    @property
    def exit_status(self) -> int | None:
        """Of the process, once it has ended."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Starts the process; returns before it is ready. Raises `StartupError` if there is no place for sockets."""
        self._endpoints = Endpoints.create(self._line_number)
        self._hold = self._endpoints.hold()
        self._connect(self._endpoints)
        launch = EngineLaunch(self._config, self._endpoints, self._log_style, self._name)
        self._process = await start_child(self._name, self._command, asyncio.subprocess.PIPE)
        logger.debug("%s is process %d", self._name, self._process.pid)
        self._watcher = asyncio.create_task(self._watch(self._process))
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # the process ended at once: `_watch` reports it
            self._process.stdin.write(msgspec.json.encode(launch) + b"\n")
            await self._process.stdin.drain()

    async def stop(self) -> None:
        """Ends the process, politely if it still listens, and removes the sockets. May be called in any state."""
        self._stopping = True
        if self._process is not None and self._watcher is not None:
            await self._end(self._process, self._watcher)
        await super().stop()
        if self._endpoints is not None and self._hold is not None:
            self._endpoints.remove()
            os.close(self._hold)
            self._hold = None

    def kill(self) -> None:
        """Ends the process at once, when there is no time for `stop` or the engine would not hear it."""
        if self._process is not None:
            self._kill(self._process)
        if self._endpoints is not None:
            self._endpoints.remove()

    def dump_stacks(self, last: bool = False) -> None:
        """Has the process log the stacks of its threads."""
        if self._process is not None:
            logger.error("the engine process %d writes its stacks", self._process.pid)
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(LAST_DUMP_SIGNAL if last else DUMP_SIGNAL)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Waits for the process's end, which is the engine's death unless the engine has reported it before."""
        ended, dead = asyncio.create_task(process.wait()), asyncio.create_task(self._dead.wait())
        await asyncio.wait({ended, dead}, return_when=asyncio.FIRST_COMPLETED)
        dead.cancel()
        if not ended.done():  # it has said why it ends
            await asyncio.wait({ended}, timeout=STOP_S)
            if not ended.done():
                if self._info is not None:
                    logger.warning("the engine process %d has failed, but has not ended: killing it", process.pid)
                self._kill(process)
        status = await ended
        if self._death is None:
            if self._info is not None:
                self.refuse(f"the engine process {process.pid} has ended")  # other replicas may take requests
            await asyncio.sleep(FINAL_MESSAGE_S)
        reason = f"the engine process {process.pid} {how_it_ended(status, self._killed)}"
        if self._config.hosts.rank and status == 0:  # host 0 has ended it
            self._stopping = True
        if self._death is not None and self._info is not None:  # the final message said why; this says how
            logger.error("%s", reason)
        self.died(reason)

    def _kill(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
            self._killed = True

    async def _end(self, process: asyncio.subprocess.Process, watcher: asyncio.Task[None]) -> None:
        """Waits up to `STOP_S` for a process that listens or is about to end, longer for one that writes a file of
        prefixes; kills any other."""
        stop_s = STOP_S + self._config.host_kv.keep_s
        if self._death is not None:
            await asyncio.wait({watcher}, timeout=STOP_S)
        elif self._info is not None:
            with contextlib.suppress(EngineUnavailable):
                self.send(Shutdown())
                await asyncio.wait({watcher}, timeout=stop_s)
        if process.returncode is None:
            if self._info is not None:
                logger.warning("the engine process %d did not end within %.0f s: killing it", process.pid, stop_s)
            self._kill(process)
        await watcher
        assert process.stdin is not None
        process.stdin.close()
