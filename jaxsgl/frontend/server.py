"""The server's life: take the port, start the engine, serve, drain, end. `python -m jaxsgl.serve` runs it.

Owns the order of things at start and end; requests are the business of service.py and generation.py. The port is
taken and answers (NOT_SERVING) before the model is loaded, so that a port in use costs no start-up time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxsgl.config import ServerConfig
from jaxsgl.errors import StartupError
from jaxsgl.frontend.engine_client import EngineClient
from jaxsgl.frontend.generation import Generator, ServedModel
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc
from jaxsgl.frontend.service import SERVICE_NAME, JaxsglService
from jaxsgl.frontend.supervisor import ENGINE_COMMAND, EngineSupervisor
from jaxsgl.frontend.tokenizer import Tokenizer, load_tokenizer

MAX_MESSAGE_BYTES = 64 << 20
DRAIN_S = 3.0  # for open calls to finish after Ctrl-C or SIGTERM
LATECOMERS_S = 0.2  # calls already on their way are told why; a stopping gRPC server would say CANCELLED
LAST_ANSWERS_S = 1.0  # for statuses to reach their clients before the connections close
ENGINE_VERDICT_S = 10.0  # a bad model folder breaks the tokenizer too, but the engine knows better why
POLL_S = 0.02
MAX_THREADS = 4  # that tokenize long prompts

logger = logging.getLogger(__name__)


async def serve(config: ServerConfig, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Serves until a signal comes (returns 0) or the engine dies (returns 1). Raises `StartupError`."""
    server = Server(config, engine_command)
    stopped = asyncio.create_task(_stop_signal(server))
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


class Server:
    """gRPC server and engine process together. Made inside the event loop that runs it."""

    def __init__(self, config: ServerConfig, engine_command: Sequence[str] = ENGINE_COMMAND) -> None:
        self._start_s = time.monotonic()
        self._config = config
        self._supervisor = EngineSupervisor(config.engine, config.log_level, engine_command)
        self._client = EngineClient(self._supervisor.send)
        self._threads = ThreadPoolExecutor(MAX_THREADS, "tokenizer")  # not asyncio's: that one delays the end
        self._generator = Generator(self._client, self._threads)
        self._health = health.aio.HealthServicer()
        self._grpc = grpc.aio.server(
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        )

    async def run(self) -> int:
        """Starts, and serves until the engine dies; returns exit status 1 then. Raises `StartupError`."""
        await self.start()
        reason = await self._supervisor.death()
        logger.error("%s; ending %d open calls and the server", reason, self._client.num_open)
        await self._end_calls(reason)
        return 1

    async def start(self) -> str:
        """Starts everything; returns the address when requests may come. Raises `StartupError`."""
        address = await self._listen()
        logger.info("listening on %s, loading %s", address, self._config.engine.model)
        await self._supervisor.start(self._client.deliver)
        self._generator.serve(await self._load_model())
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        seconds = time.monotonic() - self._start_s
        logger.info("ready: %s on %s, %.1f s after start", self._config.engine.model, address, seconds)
        return address

    async def drain(self) -> None:
        """Refuses new calls, and gives the open ones a moment to finish before it ends them."""
        reason = "the server is shutting down: try again elsewhere or later"
        logger.info("stopping: %d open calls get %.0f s to finish", self._client.num_open, DRAIN_S)
        self._client.refuse(reason)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        deadline_s = time.monotonic() + DRAIN_S
        while self._client.num_open and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)
        await self._end_calls(reason)

    async def close(self) -> None:
        """Ends connections and engine process. A thread that tokenizes or downloads may still be at it."""
        await self._grpc.stop(LAST_ANSWERS_S)
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._supervisor.stop()
        logger.info("stopped")

    def kill(self) -> None:
        """Ends the engine process at once."""
        self._supervisor.kill()

    async def _end_calls(self, reason: str) -> None:
        self._client.fail(reason)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await asyncio.sleep(LATECOMERS_S)

    async def _listen(self) -> str:
        """Starts the gRPC server, not serving yet; returns its address."""
        host = self._config.host
        _check_free(host, self._config.grpc_port)
        service = JaxsglService(self._generator, self._client)
        pb_grpc.add_JaxsglServicer_to_server(service, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc)
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        address = f"[{host}]" if ":" in host else host
        try:
            port = self._grpc.add_insecure_port(f"{address}:{self._config.grpc_port}")
        except RuntimeError as error:
            raise StartupError(f"can't listen on {address}:{self._config.grpc_port}: {error}") from error
        await self._grpc.start()
        return f"{address}:{port}"

    async def _load_model(self) -> ServedModel:
        """Waits for the engine while the tokenizer loads beside it."""
        starting = asyncio.create_task(self._supervisor.ready())
        loop = asyncio.get_running_loop()
        loading = loop.run_in_executor(self._threads, load_tokenizer, self._config.engine.model)
        try:
            either: set[asyncio.Future[Any]] = {starting, loading}
            await asyncio.wait(either, return_when=asyncio.FIRST_EXCEPTION)
            if _failed(loading):
                await asyncio.wait({starting}, timeout=ENGINE_VERDICT_S)
            if _failed(starting):
                starting.result()
            tokenizer: Tokenizer = await loading
            return ServedModel(await starting, tokenizer)
        finally:
            starting.cancel()
            loading.cancel()

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in ("", SERVICE_NAME):
            await self._health.set(service, status)


async def _stop_signal(server: Server) -> None:
    """Waits for Ctrl-C or SIGTERM; a second one ends both processes on the spot."""
    first = asyncio.Event()

    def on_signal(number: int) -> None:
        if first.is_set():
            server.kill()
            os._exit(128 + number)
        first.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    await first.wait()


def _failed(task: asyncio.Future[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


def _check_free(host: str, port: int) -> None:
    """Raises `StartupError` if `host:port` can't be listened on, in better words than gRPC's."""
    where = f"{host}:{port} (--host, --grpc-port)"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        raise StartupError(
            f"can't listen on {where}: {error.strerror or error}; choose another port or address"
        ) from None
