"""Entry point of a front-end worker, one of several processes that serve both ports of one server.

Runs a `Server` on the ports that its parent has taken, and talks to the engine over a line of its own: nothing of a
request passes through the parent or another worker. Follows the parent's orders (worker_channel.py) and leaves signals
to it. Started by workers.py as `python -m jaxsgl.frontend.workers.process FD_OF_CHANNEL FD_OF_HTTP_PORT`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections import deque

from jaxsgl import logs, stacks
from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import EngineUnavailable, StartupError
from jaxsgl.frontend.access import keys_in_file
from jaxsgl.frontend.engines.link import EngineLink
from jaxsgl.frontend.engines.replicas import Replicas
from jaxsgl.frontend.server import Server, Share, live
from jaxsgl.frontend.workers.channel import (
    AskCounts,
    AskTotal,
    Channel,
    Counts,
    Drain,
    EngineDied,
    EngineStuck,
    StartFailed,
    Total,
    ToWorker,
    WorkerLaunch,
    WorkerReady,
    counts_of,
    workers_end,
)
from jaxsgl.ipc import Endpoints
from jaxsgl.logs import LogStyle
from jaxsgl.parent import be_killed_with_parent

TOTAL_S = 5.0  # for the parent to answer


class WorkerLink(EngineLink):
    """The link of a process that does not own the engine process: its parent does, and reports its death."""

    def __init__(self, endpoints: Endpoints) -> None:
        super().__init__(endpoints.line)
        self._engine_endpoints = endpoints

    async def start(self) -> None:
        """Connects to the engine, which may be still to start."""
        self._connect(self._engine_endpoints)


class Worker:
    """A `Server` under its parent's orders. It is the `Peers` of its own front end."""

    def __init__(self, launch: WorkerLaunch, channel: Channel[ToWorker], http: socket.socket) -> None:
        config = launch.config
        self._channel = channel
        self._engine = Replicas([WorkerLink(endpoints) for endpoints in launch.endpoints])
        for rank, reason in launch.dead.items():
            self._engine.links[rank].died(reason)
        for rank, reason in launch.stuck.items():
            self._engine.links[rank].stuck = reason
        self._server = Server(config, share=Share(self._engine, self, http, launch.is_late))
        self._totals: deque[asyncio.Future[Counts]] = deque()
        self._drains = asyncio.Event()

    async def live(self) -> int:
        """Serves until the parent says otherwise or the engine dies; returns the exit status."""
        readiness, following = asyncio.create_task(self._tell_readiness()), asyncio.create_task(self._follow())
        following.add_done_callback(lambda _: self._drains.set())  # it ends by a bug only
        try:
            return await live(self._server, self._drains.wait())
        except StartupError as error:
            self._channel.send(StartFailed(str(error)))
            return 1
        finally:
            readiness.cancel()
            following.cancel()

    async def counts(self) -> Counts:
        """See `Peers`."""
        total: asyncio.Future[Counts] = asyncio.get_running_loop().create_future()
        self._totals.append(total)
        self._channel.send(AskTotal(self._own_counts()))
        try:
            async with asyncio.timeout(TOTAL_S):
                return await total
        except TimeoutError:
            raise EngineUnavailable(f"the parent process has not answered within {TOTAL_S:g} s: try again") from None

    async def _tell_readiness(self) -> None:
        await self._server.serving.wait()
        self._channel.send(WorkerReady())

    async def _follow(self) -> None:
        """Follows orders to the end, while it drains too. Ends the process at once when the parent has died."""
        while True:
            match await self._channel.receive():
                case None:
                    os._exit(1)
                case Drain():
                    self._drains.set()
                case EngineDied(rank, reason):
                    self._engine.links[rank].died(reason)
                    await self._server.report_health()
                case EngineStuck(rank, reason):
                    self._engine.links[rank].stuck = reason
                    await self._server.report_health()
                case AskCounts():
                    self._channel.send(self._own_counts())
                case Total(counts):
                    total = self._totals.popleft()
                    if not total.done():
                        total.set_result(counts)

    def _own_counts(self) -> Counts:
        return counts_of(self._server.metrics, self._engine.num_open)


async def work(channel_end: socket.socket, http: socket.socket) -> int:
    """Takes the launch from the parent and serves; returns the exit status."""
    channel = await workers_end(channel_end)
    launch = await channel.receive()
    if launch is None:
        return 1
    assert isinstance(launch, WorkerLaunch)
    style = LogStyle(launch.config.log_level, launch.config.log_format)
    secrets = [*logs.secrets_of(ServerConfig, launch.config), *keys_in_file(launch.config.api_key_file)]
    logs.configure(style, f"worker {launch.number}", secrets)
    return await Worker(launch, channel, http).live()


def main() -> None:
    """Runs the worker and ends the process with its status, without joining threads."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # service managers signal all processes; the parent says when to end
    stacks.dump_at_signals()
    be_killed_with_parent()
    ends = [socket.socket(fileno=int(fd)) for fd in sys.argv[1:]]
    status = asyncio.run(work(*ends))
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
