"""A load on a running server by its settings: which protocol, which requests, what is printed of the run.

Datasets have SGLang's names and flags, and become traces of `jaxsgl.bench.traces`. Called by `jaxsgl bench`, and by
what measures the generator itself.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jaxsgl.bench.backend import Backend
from jaxsgl.bench.grpc_backend import GrpcBackend, grpc_tls
from jaxsgl.bench.http_backends import DIALECTS, HttpBackend
from jaxsgl.bench.http_stream import HttpServer
from jaxsgl.bench.requests import Ask
from jaxsgl.bench.run import Outcome, Run
from jaxsgl.bench.traces import FORMATS, TraceConfig, made_up, replayed
from jaxsgl.config.flags import flag
from jaxsgl.config.server import API_KEY_VARIABLE
from jaxsgl.errors import ConfigError
from jaxsgl.frontend.listen import address_of, raise_file_limit

DATASETS = ("random", "random-ids", "generated-shared-prefix", "multi-turn", *FORMATS)
GRPC = "jaxsgl-grpc"
PORTS = {GRPC: 30001}
HTTP_PORT = 30000
VOCAB_SIZE = 10_000  # if the server doesn't report its own: all but tiny models have as many tokens


@dataclass(frozen=True)
class DatasetConfig:
    """Which requests are sent, and when."""

    dataset_name: str = flag(
        "random",
        "random, random-ids (the same): prompts of random ids; generated-shared-prefix: groups with a system prompt of "
        "their own; multi-turn: conversations, each turn sent when the one before is answered; mooncake, bailian: "
        "--dataset-path",
        choices=DATASETS,
    )
    dataset_path: str | None = flag(
        None, "recorded trace: JSON lines with timestamp, input_length, output_length, hash_ids"
    )
    slowdown_factor: float = flag(1.0, "factor on the trace's timestamps", alias="--mooncake-slowdown-factor")
    num_prompts: int = flag(1000, "requests in all, every turn counted; of a trace at most")
    request_rate: float = flag(
        float("inf"), "Poisson arrivals a second (of conversations in multi-turn); inf: all at once; not for traces"
    )
    seed: int = flag(1, "of lengths, arrivals and token ids")
    random_input_len: int = flag(1024, "random: tokens of a prompt at most")
    random_output_len: int = flag(1024, "random: tokens of an output at most")
    random_range_ratio: float = flag(0.0, "random, multi-turn: lengths are uniform from this share of the most on")
    gsp_num_groups: int = flag(64, "generated-shared-prefix: groups")
    gsp_prompts_per_group: int = flag(16, "generated-shared-prefix: requests of each; --num-prompts doesn't count")
    gsp_system_prompt_len: int = flag(2048, "generated-shared-prefix: tokens that a group has in common")
    gsp_question_len: int = flag(128, "generated-shared-prefix: tokens that follow them")
    gsp_output_len: int = flag(256, "generated-shared-prefix: tokens of an output")
    turns: int = flag(8, "multi-turn: turns of a conversation at most, at least one")
    turn_input_len: int = flag(256, "multi-turn: tokens that a turn adds at most")
    turn_output_len: int = flag(256, "multi-turn: tokens of an output at most")
    turn_system_len: int = flag(512, "multi-turn: tokens that all conversations begin with")
    think_s: float = flag(0.0, "multi-turn: mean seconds from an answer to the next turn")

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            name = "--" + spec.name.replace("_", "-")
            if isinstance(value, int) and value < 1 and spec.name != "seed":
                raise ConfigError(f"{name} is {value}, but must be 1 and more")
            if spec.name in ("request_rate", "slowdown_factor") and not value > 0:
                raise ConfigError(f"{name} is {value}, but must be more than 0")
        if not 0 <= self.random_range_ratio <= 1:
            raise ConfigError(f"--random-range-ratio is {self.random_range_ratio}, but must be 0 to 1")
        if self.think_s < 0 or self.seed < 0:
            raise ConfigError(f"--think-s is {self.think_s} and --seed {self.seed}, but both must be 0 and more")

    @property
    def replays(self) -> bool:
        """Whether requests arrive as in a recorded file."""
        return self.dataset_name in FORMATS

    def asks(self) -> list[Ask]:
        """The requests in order of arrival.

        Raises `ConfigError` or `ValueError` if a value is out of range or no trace.
        """
        if not self.replays:
            return list(made_up(self._trace(), self.seed))
        if self.dataset_path is None:
            raise ConfigError(f"--dataset-name {self.dataset_name} replays a file: name it with --dataset-path")
        return replayed(Path(self.dataset_path), self.dataset_name, self.num_prompts, self.slowdown_factor)

    def _trace(self) -> TraceConfig:
        rate, ratio = self.request_rate, self.random_range_ratio
        match self.dataset_name:
            case "generated-shared-prefix":
                return TraceConfig(
                    trace="shared-prefix", request_rate=rate, range_ratio=1.0, groups=self.gsp_num_groups,
                    num_prompts=self.gsp_num_groups * self.gsp_prompts_per_group, input_len=self.gsp_question_len,
                    output_len=self.gsp_output_len, system_len=self.gsp_system_prompt_len,
                )  # fmt: skip
            case "multi-turn":
                return TraceConfig(
                    trace="chat", request_rate=rate, range_ratio=ratio, num_prompts=self.num_prompts, turns=self.turns,
                    input_len=self.turn_input_len, output_len=self.turn_output_len, system_len=self.turn_system_len,
                    think_s=self.think_s,
                )  # fmt: skip
            case _:
                return TraceConfig(
                    trace="random", request_rate=rate, range_ratio=ratio, num_prompts=self.num_prompts,
                    input_len=self.random_input_len, output_len=self.random_output_len,
                )  # fmt: skip


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
    tls: bool = flag(False, "the server has a certificate; implied by https:// in --base-url")
    ca: str | None = flag(None, "certificate (PEM) of the server or its authority (default: those of the system)")
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
        if self.warmup_requests < 0:
            raise ConfigError(f"--warmup-requests is {self.warmup_requests}, but must be 0 and more")
        if self.output_details and not self.output_file:
            raise ConfigError("--output-details is for a file: name it with --output-file")
        if self.backend == GRPC and "://" in (self.base_url or ""):
            raise ConfigError(
                f"--base-url is {self.base_url}, but must be HOST:PORT for --backend {GRPC}: for TLS add --tls"
            )
        if self.tls and (self.base_url or "").startswith("http://"):
            raise ConfigError(f"--base-url is {self.base_url}, but --tls is given: write https://, or leave --tls out")
        if self.ca is not None and not self.has_tls:
            raise ConfigError("--ca is given, but the connection is not encrypted: add --tls")
        if self.ca is not None and not Path(self.ca).is_file():
            raise ConfigError(f"--ca is {self.ca}, but there is no such file: name a certificate (PEM)")

    @property
    def has_tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.tls or (self.base_url or "").startswith("https://")


async def load(config: ServingConfig, asks: list[Ask]) -> Outcome:
    """Runs the warm-up and the load. Raises `BackendError`."""
    raise_file_limit()  # each request has a connection, and the default is often 1,024
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
    """The backend for the settings.

    Raises:
      ValueError: the address is not valid.
      OSError: the file of --ca can't be read, or is no certificate.
    """
    key = config.api_key or os.environ.get(API_KEY_VARIABLE) or os.environ.get("OPENAI_API_KEY")
    address = address_of(config.host.strip("[]"), config.port or PORTS.get(config.backend, HTTP_PORT))
    if config.backend == GRPC:
        tls = grpc_tls(config.ca) if config.has_tls else None
        return GrpcBackend(config.base_url or address, key, not config.disable_ignore_eos, tls)
    server = HttpServer(config.base_url or f"http{'s' * config.tls}://{address}", key, config.ca)
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
    count, turn = 1, ask.then
    while turn is not None:
        count, turn = count + 1, turn.then
    return count
