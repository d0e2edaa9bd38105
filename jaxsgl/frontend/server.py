"""The server's life: start the engine, take the ports, serve, drain, end. `python -m jaxsgl.serve` runs it.

Owns the order of things at the start and at the end. Never handles a request: that is the business of grpc, http and
generation.py. The engine process starts first, and imports JAX while this one imports what serves the ports. These are
taken while the model loads and answer "not ready" meanwhile, so that a port in use costs a second at most. With several
front-end processes, each of them is a `Server` that is given its `Share` by the parent (workers.py). At the start it
reads the model's sampling defaults, and the chat template that a flag names.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from jaxsgl import logs
from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import StartupError
from jaxsgl.frontend.access import Access
from jaxsgl.frontend.certificates import Certificate, load_certificate
from jaxsgl.frontend.engines.owned import ENGINE_COMMAND, owned_engines
from jaxsgl.frontend.engines.replicas import Replicas
from jaxsgl.frontend.engines.watchdog import watch
from jaxsgl.frontend.generation import FrontEnd, Generator, Peers, ServedModel
from jaxsgl.frontend.listen import Addresses, log_listening, log_ready, raise_file_limit
from jaxsgl.frontend.media.loader import MediaLoader
from jaxsgl.frontend.metrics.exposition import StatusLine
from jaxsgl.frontend.metrics.measurements import Metrics
from jaxsgl.frontend.profiles import Profiles
from jaxsgl.frontend.tracing import tracer_of
from jaxsgl.frontend.workers.parent import Workers
from jaxsgl.messages.replies import EngineInfo
from jaxsgl.preprocess.processors import load_settings
from jaxsgl.sandbox import SandboxCrash
from jaxsgl.text.dialects import dialect_of
from jaxsgl.text.tokenizer import Tokenizer, is_gguf, load_tokenizer

if TYPE_CHECKING:
    from jaxsgl.frontend.ports import Ports
from collections.abc import Mapping
from pathlib import Path

from jaxsgl.errors import CheckpointError, InvalidRequest
from jaxsgl.json_file import read_object
from jaxsgl.requests.request import SamplingParams

GRACE_S = 0.2  # calls that arrive at the end get an error that says why; a stopped gRPC server would say CANCELLED
ENGINE_ERROR_S = 10.0  # a bad model folder breaks the tokenizer too, but the engine's error explains it better
SHUTTING_DOWN = "the server is shutting down: try again elsewhere or later"
POLL_S = 0.02
MAX_THREADS = 4  # that tokenize long prompts
GC_THRESHOLD = 10_000  # new objects; one step's replies exceed Python's default of 700
DEFAULTS_FILE = "generation_config.json"
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # vLLM's and SGLang's

logger = logging.getLogger(__name__)


async def serve(config: ServerConfig, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Serves until a signal comes (returns 0) or the engine dies or hangs (returns 1). Raises `StartupError`."""
    raise_file_limit()  # of the processes that are started from here, too
    server: Life
    if config.engine.hosts.rank:
        from jaxsgl.frontend.following import FollowingServer  # one host needs none of it

        server = FollowingServer(config, engine_command)
    elif config.tokenizer_worker_num > 1:
        server = Workers(config, engine_command)
    else:
        server = Server(config, engine_command)
    return await live(server, _stop_signal(server))


class Life(Protocol):
    """A server that `live` runs."""

    async def run(self) -> int:
        """Starts, and serves until it can't go on; returns the exit status then. Raises `StartupError`."""
        ...

    async def drain(self) -> None:
        """Lets open calls finish, within limits."""
        ...

    async def close(self) -> None:
        """Ends everything that `run` has started. Called in any state."""
        ...

    def kill(self) -> None:
        """Ends the processes that `run` has started, at once."""
        ...


async def live(server: Life, stop: Coroutine[Any, Any, object]) -> int:
    """Serves until `stop` returns (returns 0 then), or until `server` can't go on. Raises `StartupError`."""
    stopped = asyncio.create_task(stop)
    living = asyncio.create_task(server.run())
    try:
        await asyncio.wait({stopped, living}, return_when=asyncio.FIRST_COMPLETED)
        if living.done():
            return living.result()
        await server.drain()
        return 0
    finally:
        stopped.cancel()
        living.cancel()
        await asyncio.wait({stopped, living})
        await server.close()


@dataclass(frozen=True)
class Share:
    """What one of several front-end processes has from its parent, which has taken the ports and owns the engine.

    Attributes:
      engine: the links to the engine processes.
      peers: the other front-end processes.
      http: listens on the HTTP port.
      is_late: the other processes serve already, so nothing is accepted before this one can serve it.
    """

    engine: Replicas
    peers: Peers
    http: socket.socket
    is_late: bool = False


def _ports_of(front_end: FrontEnd, certificate: Certificate | None, listener: socket.socket | None) -> Ports:
    from jaxsgl.frontend.ports import Ports  # FastAPI and gRPC: they take a while, in which the engine starts

    return Ports(front_end, certificate, listener)


class ClosedPorts:
    """Stands there until there are `Ports`."""

    async def open(self) -> Addresses:
        """Never called."""
        raise AssertionError("the ports are made first")

    async def set_serving(self, serving: bool) -> None:
        """Has no one to tell."""

    @property
    def is_answering(self) -> bool:
        """Nothing comes."""
        return False

    async def stop(self) -> None:
        """Has nothing to stop."""


class Server:
    """Both ports and the engine processes together, or what a `share` has of them. Made inside the loop that runs it.

    Raises `StartupError` for a certificate, a file of keys or a folder for profiles that doesn't work, and for traces
    without their packages.

    Attributes:
      engine: the links to the engine processes.
      front_end: what endpoints work with.
      metrics: what this process has counted.
      serving: set when requests may come.
    """

    def __init__(
        self, config: ServerConfig, engine_command: Sequence[str] = ENGINE_COMMAND, share: Share | None = None
    ) -> None:
        self._start_s = time.monotonic()
        self._config = config
        self._shares = share is not None
        self._is_late = share is not None and share.is_late
        self._host_watch: asyncio.Task[None] | None = None
        self._certificate = load_certificate(config)
        access = Access(config)
        self.engine = Replicas(owned_engines(config, engine_command)) if share is None else share.engine
        self.serving = asyncio.Event()
        self._threads = ThreadPoolExecutor(MAX_THREADS, "tokenizer")  # asyncio's own would delay the end
        self._closing = ExitStack()  # what the model needs of its own
        self.metrics = Metrics(
            lambda: self.engine.load, log_lines=logs.line_counts(), replicas=lambda: self.engine.each
        )
        tracer = tracer_of(config.otlp_traces_endpoint, config.model_name)
        legs = config.engine.disaggregation
        self._generator = Generator(
            self.engine,
            self._threads,
            self.metrics,
            config.request_timeout_s,
            legs.disaggregation_mode,
            legs.disaggregation_prefill_hosts,
            config.engine.speculation.is_on,
            logging.INFO if config.log_requests else logging.DEBUG,
            tracer,
        )
        self._status = StatusLine(self.metrics)
        peers = None if share is None else share.peers
        profiles = Profiles(config, self.engine)
        self.front_end = FrontEnd(config, access, self.engine, self._generator, self.metrics, profiles, peers, tracer)
        self._listener = None if share is None else share.http
        self._ports: Ports | ClosedPorts = ClosedPorts()

    async def run(self) -> int:
        """Starts, and serves until the engine dies or hangs; returns exit status 1 then. Raises `StartupError`."""
        await self.start()
        _spare_the_garbage_collector()
        death = asyncio.create_task(self.engine.death())
        duties = [asyncio.create_task(duty) for duty in self._duties()]
        try:
            await asyncio.wait([death, *duties], return_when=asyncio.FIRST_COMPLETED)
            # The watchdog ends with the reason of a death, other duties by a bug only.
            reason = next((duty.result() for duty in duties if duty.done()), None) or death.result()
        finally:
            for task in (death, *duties):
                task.cancel()
        await self._end_calls(reason)
        return 1

    async def start(self) -> Addresses:
        """Starts everything; returns the addresses when requests may come. Raises `StartupError`."""
        await self.engine.start()
        ready = self.engine.some_ready() if self._is_late else self.engine.ready()
        starting = asyncio.create_task(ready)  # now, so that an engine that dies meanwhile ends the start
        try:
            return await self._open(starting)
        finally:
            starting.cancel()

    async def _open(self, starting: asyncio.Task[EngineInfo]) -> Addresses:
        """Opens the ports, and lets requests in once the engine is ready."""
        self._ports = _ports_of(self.front_end, self._certificate, self._listener)
        at = None if self._is_late else await self._ports.open()
        if at is not None and not self._shares:
            log_listening(self._config, at)
        if self._config.engine.hosts.are_several:
            from jaxsgl.frontend.following import watch_hosts

            self._host_watch = asyncio.create_task(watch_hosts(self.engine.links[0]))
        model = await self._load_model(starting)
        self._generator.serve(model)
        at = at or await self._ports.open()
        await self.report_health()
        self.serving.set()
        if not self._shares:
            log_ready(self._config, at, time.monotonic() - self._start_s)
        return at

    async def drain(self) -> None:
        """Refuses new calls, gives the open ones `--drain-s` seconds to finish, and ends those that are left.

        A call is finished when its client has read the answer.
        """
        reason = SHUTTING_DOWN
        drain_s = self._config.drain_s
        logger.info("stopping: %d open calls get %.0f s to finish", self.engine.num_open, drain_s)
        self.engine.refuse(reason)
        await self.report_health()
        deadline_s = time.monotonic() + drain_s
        while (self.engine.num_open or self._ports.is_answering) and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)
        await self._end_calls(reason)

    async def close(self) -> None:
        """Ends connections and the engine processes. Does not wait for threads that tokenize or download."""
        if self._host_watch is not None:
            self._host_watch.cancel()
        await self._ports.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._closing.close()
        await asyncio.gather(self.engine.stop(), asyncio.to_thread(self.front_end.tracer.flush))
        logger.info("stopped")

    def kill(self) -> None:
        """Ends the engine processes at once."""
        self.engine.kill()

    async def report_health(self) -> None:
        """Tells gRPC's health checks whether requests make sense now."""
        await self._ports.set_serving(self.engine.refusal is None)

    def _duties(self) -> list[Coroutine[Any, Any, str | None]]:
        """Returns what runs next to the requests; the parent of several front-end processes does some of it for all."""
        certificate = [self._certificate.watch()] if self._certificate is not None else []
        if self._shares:
            return [self.metrics.keep_sampling(), *certificate]
        return [watch(self.engine, self._config, self.report_health), self._status.run(), *certificate]

    async def _end_calls(self, reason: str) -> None:
        self.engine.fail(reason)
        await self.report_health()
        await asyncio.sleep(GRACE_S)

    async def _media_loader(self, info: EngineInfo, tokenizer: Tokenizer) -> MediaLoader | None:
        """Returns what prepares pictures, if the model takes any. Raises `StartupError`."""
        if info.limits.media is None:
            return None
        settings = load_settings(info.model_path)
        if settings is None:
            return None
        loader = MediaLoader(self._config.media, info.limits.media, settings, tokenizer, self._threads)
        self._closing.callback(loader.close)
        try:
            await loader.start()
        except SandboxCrash as crash:
            raise StartupError(f"pictures can't be decoded: {crash}") from None
        return loader

    async def _load_model(self, starting: asyncio.Task[EngineInfo]) -> ServedModel:
        """Loads the tokenizer while the engine starts; waits for both."""
        loop = asyncio.get_running_loop()
        engine = self._config.engine
        template = template_of(self._config.chat_template)
        model = (await starting).model_path if is_gguf(engine.model) else engine.model
        loading = loop.run_in_executor(
            self._threads, load_tokenizer, model, engine.revision, self._config.split_special_tokens, template
        )
        try:
            either: set[asyncio.Future[Any]] = {starting, loading}
            await asyncio.wait(either, return_when=asyncio.FIRST_EXCEPTION)
            if _failed(loading):
                await asyncio.wait({starting}, timeout=ENGINE_ERROR_S)
            if _failed(starting):
                starting.result()
            tokenizer: Tokenizer = await loading
            dialect = dialect_of(
                tokenizer.chat_template,
                self._config.tool_call_parser,
                self._config.reasoning_parser,
                tokenizer.response_template,
                tokenizer.special_names,
            )
            info = await starting
            defaults = sampling_defaults(info.model_path) if self._config.samples_as_the_model_says else {}
            return ServedModel(info, tokenizer, dialect, await self._media_loader(info, tokenizer), defaults)
        finally:
            loading.cancel()


async def _stop_signal(server: Life) -> None:
    """Waits for Ctrl-C or SIGTERM; a second one ends both processes on the spot."""
    first = asyncio.Event()

    def on_signal(number: int) -> None:
        if first.is_set():
            server.kill()
            logging.shutdown()
            os._exit(128 + number)
        first.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    await first.wait()


def _spare_the_garbage_collector() -> None:
    """Exempts all objects made at the start from collections: a full one took 150 ms, in which no token moved."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def _failed(task: asyncio.Future[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


def sampling_defaults(folder: str) -> Mapping[str, float]:
    """Returns what the model's generation_config.json says of sampling: fields of `SamplingParams`.

    What is missing, or out of bounds, is left out; so is all of a file that can't be read.
    """
    try:
        given = read_object(Path(folder) / DEFAULTS_FILE)
    except CheckpointError:
        return {}
    found: dict[str, float] = {}
    for name in _DEFAULTS:
        value = given.get(name)
        if value is None:
            continue
        try:
            SamplingParams(**{name: value})
            found[name] = value
        except InvalidRequest as error:
            logger.warning("%s is left out in part: %s", DEFAULTS_FILE, error)
    return found


def template_of(given: str | None) -> str | None:
    """Returns the chat template that a flag names by its file, or gives itself. Raises `StartupError`."""
    if given is None or ("{" in given and "\n" in given):
        return given
    try:
        return Path(given).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as error:
        if "{{" in given or "{%" in given:
            return given
        reason = getattr(error, "strerror", None) or "it is no text"
        raise StartupError(f"--chat-template {given:.200} can't be read: {reason}: name a file of Jinja") from None
