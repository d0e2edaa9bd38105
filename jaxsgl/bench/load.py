"""A load on a running server by its settings: which protocol, which requests, what is printed of the run.

Called by `jaxsgl bench`, and by what measures the generator itself.
"""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from jaxsgl.bench.backend import Backend
from jaxsgl.bench.datasets import DatasetConfig
from jaxsgl.bench.grpc_backend import GrpcBackend
from jaxsgl.bench.http_backends import DIALECTS, HttpBackend
from jaxsgl.bench.http_stream import HttpServer
from jaxsgl.bench.requests import Ask
from jaxsgl.bench.run import Outcome, Run
from jaxsgl.config.flags import flag
from jaxsgl.config.server import API_KEY_VARIABLE
from jaxsgl.errors import ConfigError

GRPC = "jaxsgl-grpc"
PORTS = {GRPC: 30001}
HTTP_PORT = 30000
VOCAB_SIZE = 10_000  # if the server doesn't report its own: all but tiny models have as many tokens


@dataclass(frozen=True)
class ServingConfig:
    """Settings of one run."""

    backend: str = flag(
        "openai",
        "openai: /v1/completions; openai-chat: /v1/chat/completions; sglang: /generate; jaxsgl-grpc: jaxsgl's Generate",
        choices=(*DIALECTS, GRPC),
    )
    host: str = flag("127.0.0.1", "host of the server")
    port: int | None = flag(None, f"port of the server (default: {HTTP_PORT}; jaxsgl-grpc: {PORTS[GRPC]})")
    base_url: str | None = flag(None, "http://HOST:PORT, instead of --host and --port; jaxsgl-grpc: HOST:PORT")
    model: str | None = flag(None, "name of the model for the server (default: the first one that /v1/models lists)")
    api_key: str | None = flag(
        None, f"sent as a bearer token (default: {API_KEY_VARIABLE} or OPENAI_API_KEY of the environment)", secret=True
    )
    vocab_size: int | None = flag(
        None, f"ids of prompts are below this (default: what the server says, else {VOCAB_SIZE})"
    )
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    max_concurrency: int | None = flag(None, "largest number of open requests (default: no limit)")
    disable_ignore_eos: bool = flag(False, "let EOS tokens end the outputs")
    warmup_requests: int = flag(1, "requests that are sent before the run and don't count")
    flush_cache: bool = flag(False, "empty the server's prefix cache before the run")
    goodput: str = flag(
        "", 'limits in milliseconds, as "ttft:500 tpot:50 e2el:5000": counts answers per second within all limits'
    )
    output_file: str | None = flag(None, "append the figures as a line of JSON")
    output_details: bool = flag(False, "add lengths, times, texts and errors of each request")

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency is {self.max_concurrency}, but must be 1 and more")
        if self.vocab_size is not None and self.vocab_size < 2:
            raise ConfigError(f"--vocab-size is {self.vocab_size}, but must be 2 and more")


async def load(config: ServingConfig, asks: list[Ask]) -> Outcome:
    """Runs the warm-up and the load. Raises `BackendError`."""
    _allow_many_connections()
    backend = backend_of(config)
    try:
        served = await backend.describe()
        if served.words:
            print("The server takes no token ids: prompts are words, of about a token each.", file=sys.stderr)
        vocab_size = config.vocab_size or served.vocab_size or VOCAB_SIZE
        run = Run(backend, vocab_size, config.dataset.seed, config.max_concurrency)
        await run.warm_up(asks[0], config.warmup_requests)
        if config.flush_cache:
            await backend.flush_cache()
        with tqdm(total=sum(map(num_turns, asks)), disable=None, unit="request") as progress:
            return await run.send(asks, progress.update)
    finally:
        await backend.close()


def backend_of(config: ServingConfig) -> Backend:
    """The backend for the settings. Raises `ValueError` if the address is not valid."""
    key = config.api_key or os.environ.get(API_KEY_VARIABLE) or os.environ.get("OPENAI_API_KEY")
    address = f"{config.host}:{config.port or PORTS.get(config.backend, HTTP_PORT)}"
    if config.backend == GRPC:
        return GrpcBackend(config.base_url or address, key, not config.disable_ignore_eos)
    server = HttpServer(config.base_url or f"http://{address}", key)
    return HttpBackend(server, DIALECTS[config.backend], config.model, not config.disable_ignore_eos)


def settings(config: ServingConfig) -> dict[str, Any]:
    """The settings under SGLang's names."""
    dataset = config.dataset
    return {
        "backend": config.backend,
        "dataset_name": dataset.dataset_name,
        "request_rate": "trace" if dataset.replays else dataset.request_rate,
        "max_concurrency": config.max_concurrency,
        "random_input_len": dataset.random_input_len,
        "random_output_len": dataset.random_output_len,
        "random_range_ratio": dataset.random_range_ratio,
        "seed": dataset.seed,
    }


def num_turns(ask: Ask) -> int:
    """The number of turns of a conversation; 1 for a single request."""
    return 1 if ask.then is None else 1 + num_turns(ask.then)


def _allow_many_connections() -> None:
    """Raises the limit of open files: each request has a connection, and the default is often 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
