"""The parent of several front-end processes: what there must be once per server, not once per process.

Takes the ports, owns the engine processes, starts the workers and replaces one that dies, runs the watchdog and the
status line, adds up counts, and passes on the end: a signal, or the engine's death. Never sees a request: each worker
(worker.py) accepts its own connections and has lines of its own to the engines. server.py runs it in the place of a
`Server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from jaxsgl import logs
from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import EngineUnavailable, StartupError
from jaxsgl.frontend.engines.owned import ENGINE_COMMAND, how_it_ended, owned_engines, start_child
from jaxsgl.frontend.engines.replicas import Replicas
from jaxsgl.frontend.engines.watchdog import MAX_TICK_S, TICKS, watch
from jaxsgl.frontend.listen import Addresses, address_of, log_listening, log_ready, reserve_port
from jaxsgl.frontend.metrics.exposition import StatusLine
from jaxsgl.frontend.metrics.measurements import Metrics
from jaxsgl.frontend.workers.channel import (
    AskCounts,
    AskTotal,
    Channel,
    Counts,
    Drain,
    EngineDied,
    EngineStuck,
    FromWorker,
    StartFailed,
    Total,
    ToWorker,
    WorkerLaunch,
    WorkerReady,
    counts_of,
    parents_end,
    summed,
)
from jaxsgl.messages.orders import PARENT_LINE, CloseLine, OpenLine
from jaxsgl.messages.replies import EngineInfo

WORKER_COMMAND = (sys.executable, "-m", "jaxsgl.frontend.workers.process")
MAX_DEATHS = 3  # of workers that served, within DEATHS_S; one more ends the server
DEATHS_S = 60.0
RETRY_S = 5.0  # until another worker is started after one that could not start, while others serve
COUNTS_S = 1.0  # for a worker to send its counts; then those that it sent last are taken
END_S = 5.0  # for workers to close their connections

logger = logging.getLogger(__name__)


class WorkerProcess:
    """One worker, from its start to its end.

    Attributes:
      number: 1, 2, ...; a worker that takes a dead one's place has its number.
      line: its line to each engine, which no other worker ever has.
      ready: set when it takes requests.
      answered: set while all that was asked of it is answered.
      counts: those that it sent last.
      unanswered_ticks: how many ticks of the watchdog it has left a question unanswered.
      failure: why it could not start, if it said so.
      is_late: it takes the place of one that died.
    """

    def __init__(self, number: int, line: int, is_late: bool = False) -> None:
        self.number = number
        self.line = line
        self.is_late = is_late
        self.ready = asyncio.Event()
        self.answered = asyncio.Event()
        self.counts = Counts()
        self.unanswered_ticks = 0
        self.failure: str | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._killed = False
        self._channel: Channel[FromWorker] | None = None

    async def start(self, command: Sequence[str], launch: WorkerLaunch, http: int) -> None:
        """Starts the process, which inherits the file `http`: a socket that listens on the HTTP port.

        Raises `OSError`, as when there are no files or no processes left.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                files = (theirs.fileno(), http)
                self._process = await start_child(
                    f"worker {self.number}", [*command, *map(str, files)], asyncio.subprocess.DEVNULL, files
                )
        except BaseException:
            ours.close()
            raise
        logger.info("worker %d is process %d", self.number, self._process.pid)
        self._channel = await parents_end(ours)
        self.send(launch)

    async def receive(self) -> FromWorker | None:
        """Returns its next message, None once it has ended."""
        assert self._channel is not None
        return await self._channel.receive()

    async def end(self) -> str:
        """Waits for the end of the process; returns how it ended, in words."""
        assert self._process is not None and self._channel is not None
        status = await self._process.wait()
        self._channel.close()
        return f"worker {self.number}, process {self._process.pid}, {how_it_ended(status, self._killed)}"

    def send(self, message: ToWorker) -> None:
        """Sends an order without waiting."""
        if self._channel is not None:
            self._channel.send(message)

    def ask_counts(self) -> None:
        """Asks it for its counts; `answered` is set when they are here."""
        self.answered.clear()
        self.send(AskCounts())

    def take_counts(self, counts: Counts) -> None:
        """Takes counts that it has sent."""
        self.counts = counts
        self.unanswered_ticks = 0
        self.answered.set()

    def kill(self) -> None:
        """Ends it at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
                self._killed = True


class Workers:
    """The engine processes and all workers, as one server. Must be made inside the event loop that runs it.

    Attributes:
      engine: the links to the engine processes; no call is ever open on them.
    """

    def __init__(
        self,
        config: ServerConfig,
        engine_command: Sequence[str] = ENGINE_COMMAND,
        worker_command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        self._start_s = time.monotonic()
        self._config = config
        self._worker_command = worker_command
        self._engines = owned_engines(config, engine_command, PARENT_LINE)
        self.engine = Replicas(self._engines)
        self._metrics = Metrics(
            lambda: self.engine.load, log_lines=logs.line_counts(), replicas=lambda: self.engine.each
        )
        self._status = StatusLine(self._metrics)
        self._sockets: list[socket.socket] = []  # one per worker, of the HTTP port, which outlives them; one of gRPC
        self._workers: list[WorkerProcess] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_line = PARENT_LINE
        self._past = Counts()  # of workers that have died
        self._deaths_s: deque[float] = deque()
        self._ends = asyncio.Event()
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Starts, and serves until the engine or too many workers die; returns exit status 1. Raises `StartupError`."""
        await self._start()
        death = asyncio.create_task(self.engine.death())
        duties = [
            asyncio.create_task(duty)
            for duty in (watch(self.engine, self._config, self._report), self._status.run(), self._watch_workers())
        ]
        try:
            any_end: list[asyncio.Future[Any]] = [death, self._broken, *duties]
            await asyncio.wait(any_end, return_when=asyncio.FIRST_COMPLETED)
            # The watchdog ends with the reason of a death, other duties by a bug only.
            reason = next((duty.result() for duty in duties if duty.done()), None)
            reason = reason or (death.result() if death.done() else self._broken.result())
        finally:
            for task in (death, *duties):
                task.cancel()
        await self._end([EngineDied(rank, reason) for rank in range(self._config.num_replicas)], END_S)
        return 1

    async def drain(self) -> None:
        """Has every worker drain its calls and end."""
        logger.info("stopping: %d workers give their open calls %.0f s", len(self._workers), self._config.drain_s)
        await self._end([Drain()], self._config.drain_s + END_S)

    async def close(self) -> None:
        """Ends what still runs."""
        self._ends.set()
        for worker in self._workers:
            worker.kill()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for taken in self._sockets:
            taken.close()
        await self.engine.stop()
        logger.info("stopped")

    def kill(self) -> None:
        """Ends all processes at once."""
        for worker in self._workers:
            worker.kill()
        self.engine.kill()

    # Start.

    async def _start(self) -> None:
        at = self._take_ports()
        log_listening(self._config, at)
        await self.engine.start()
        for number in range(1, self._config.tokenizer_worker_num + 1):
            try:
                await self._start_worker(number)
            except OSError as error:
                raise StartupError(f"worker {number} can't be started: {error}") from None
        ready = asyncio.create_task(self._ready())
        try:
            first: set[asyncio.Future[Any]] = {ready, self._broken}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise StartupError(self._broken.result())
            ready.result()
        finally:
            ready.cancel()
        log_ready(self._config, at, time.monotonic() - self._start_s)

    async def _ready(self) -> EngineInfo:
        """Waits until the engine and all workers are ready. Raises `StartupError` if the engine ends first."""
        info = await self.engine.ready()
        for worker in self._workers:
            await worker.ready.wait()
        return info

    def _take_ports(self) -> Addresses:
        """Takes both ports. gRPC opens sockets of its own in the workers; one that never listens keeps their port."""
        config = self._config
        count = config.tokenizer_worker_num
        self._sockets = reserve_port(config.host, config.port, "--port", count, listens=True)
        (grpc,) = reserve_port(config.host, config.grpc_port, "--grpc-port", 1, listens=False)
        self._sockets.append(grpc)
        ports = [taken.getsockname()[1] for taken in (self._sockets[0], grpc)]
        self._config = replace(config, port=ports[0], grpc_port=ports[1])
        return Addresses(address_of(config.host, ports[1]), address_of(config.host, ports[0]))

    async def _start_worker(self, number: int, is_late: bool = False) -> None:
        """Starts a worker on a line that no worker had before. Raises `OSError`."""
        self._last_line += 1
        worker = WorkerProcess(number, self._last_line, is_late)
        self._workers.append(worker)
        for link in self._engines:
            with contextlib.suppress(EngineUnavailable):  # it is dead
                link.send(OpenLine(worker.line))
        http = self._sockets[number - 1].fileno()
        endpoints = tuple(link.endpoints.at(worker.line) for link in self._engines)
        dead = {rank: str(link.refusal) for rank, link in enumerate(self._engines) if link.is_dead}
        stuck = {rank: link.stuck for rank, link in enumerate(self._engines) if link.stuck is not None}
        launch = WorkerLaunch(number, self._config, endpoints, dead, stuck, is_late)
        try:
            await worker.start(self._worker_command, launch, http)
        except OSError:
            self._forget(worker)
            raise
        self._begin(self._follow(worker))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # A worker's life.

    async def _follow(self, worker: WorkerProcess) -> None:
        """Hears a worker until its end, and starts another in its place."""
        while (message := await worker.receive()) is not None:
            match message:
                case WorkerReady():
                    worker.ready.set()
                    self._tell_engines(worker)
                case StartFailed(text):
                    worker.failure = text
                case Counts():
                    worker.take_counts(message)
                case AskTotal(counts):
                    worker.take_counts(counts)
                    self._begin(self._tell_total(worker))
        how = await worker.end()
        self._forget(worker)
        self._past = summed([self._past, worker.counts.ended()])
        if self._ends.is_set():
            self._sockets[worker.number - 1].close()  # no one accepts from it any more
        else:
            await self._replace(worker, how)

    def _forget(self, worker: WorkerProcess) -> None:
        self._workers.remove(worker)
        for link in self._engines:
            with contextlib.suppress(EngineUnavailable):  # it is dead
                link.send(CloseLine(worker.line))

    async def _replace(self, worker: WorkerProcess, how: str) -> None:
        """Starts another worker, unless too many have died lately, or none could start: that ends the server."""
        if not worker.ready.is_set():
            if not (worker.is_late and await self._may_retry(worker.failure or how)):
                self._break(worker.failure or how)
                return
        elif self._die_often():
            self._break(how)
            return
        else:
            logger.error("%s: its calls have ended, starting another", how)
        while not self._ends.is_set():
            try:
                await self._start_worker(worker.number, is_late=True)
                return
            except OSError as error:
                reason = f"worker {worker.number} can't be started: {error}"
                if not await self._may_retry(reason):
                    self._break(reason)
                    return

    def _die_often(self) -> bool:
        """Notes a death; returns whether it is one too many."""
        now_s = time.monotonic()
        self._deaths_s.append(now_s)
        while self._deaths_s[0] < now_s - DEATHS_S:
            self._deaths_s.popleft()
        return len(self._deaths_s) > MAX_DEATHS

    async def _may_retry(self, reason: str) -> bool:
        """Waits a little before another start, if others serve meanwhile; returns False if none does."""
        if not any(other.ready.is_set() for other in self._workers):
            return False
        logger.error("%s: starting another in %.0f s", reason, RETRY_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RETRY_S):
                await self._ends.wait()
        return True

    def _break(self, reason: str) -> None:
        if not self._broken.done():
            logger.error("%s: ending the server", reason)
            self._broken.set_result(reason)

    async def _end(self, orders: Sequence[Drain | EngineDied], limit_s: float) -> None:
        """Tells all workers to end, and waits for that. Those that are not ready yet are killed."""
        self._ends.set()
        for worker in self._workers:
            if not worker.ready.is_set():
                worker.kill()
            for order in orders:
                worker.send(order)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)

    # Once per server.

    async def _report(self) -> None:
        for worker in self._workers:
            self._tell_engines(worker)

    def _tell_engines(self, worker: WorkerProcess) -> None:
        """Tells a worker which engines are dead or stuck."""
        for rank, link in enumerate(self._engines):
            worker.send(EngineDied(rank, str(link.refusal)) if link.is_dead else EngineStuck(rank, link.stuck))

    async def _watch_workers(self) -> None:
        """Kills a worker whose loop has stood still for `--watchdog-s`; another takes its place.

        Not once all of them are to end, for which they have a time of their own.
        """
        tick_s = min(MAX_TICK_S, self._config.watchdog_s / TICKS)
        while True:
            await asyncio.sleep(tick_s)
            if self._ends.is_set():
                continue
            for worker in filter(lambda worker: worker.ready.is_set(), self._workers):
                if worker.unanswered_ticks * tick_s >= self._config.watchdog_s:
                    logger.error(
                        "worker %d has not answered for %.0f s: killing it", worker.number, self._config.watchdog_s
                    )
                    worker.kill()
                worker.unanswered_ticks += 1
                worker.ask_counts()

    async def _tell_total(self, asker: WorkerProcess) -> None:
        """Sends a worker the counts of all. It has sent its own: so totals never go down, whichever worker is asked."""
        others = [worker for worker in self._workers if worker is not asker and worker.ready.is_set()]
        for worker in others:
            worker.ask_counts()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COUNTS_S):
                for worker in others:
                    await worker.answered.wait()
        own = counts_of(self._metrics, 0)
        asker.send(Total(summed([self._past, own, *(worker.counts for worker in self._workers)])))
