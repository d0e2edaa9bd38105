"""Ranks, stages and several hosts behind the real gateway: clients get what one device answers behind it."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tests.end_to_end.gateway import PATIENCE_S, Gateway, running_gateway, wait_for
from tests.end_to_end.hosts import running_hosts
from tests.end_to_end.precision import EXACT_FLAGS
from tests.end_to_end.servers import START_TIMEOUT_S, running_server
from tests.grids import NIGHTLY
from tests.text.small_tokenizers import byte_level, save

pytestmark = pytest.mark.foreign

PAGE_SIZE = 4
FLAGS = (
    *EXACT_FLAGS, "--served-model-name", "small", "--page-size", str(PAGE_SIZE), "--context-length", "256",
    "--max-running-requests", "8", "--max-total-tokens", "1600", "--chunked-prefill-size", "32",
    "--decode-buckets", "8", "--extend-buckets", "32",
)  # fmt: skip
# Hosts, and the flags of each.
LAYOUTS = {
    "ranks": (1, ("--tp", "2", "--dp-size", "2", "--enable-dp-attention")),
    "stages": (1, ("--pp-size", "2")),
    "hosts": (2, ("--tp", "2")),
    "hosts with stages": (2, ("--pp-size", "2")),
}
GREEDY: dict[str, Any] = {"model": "small", "temperature": 0, "max_tokens": 16, "ignore_eos": True}
PROMPTS = (
    "The quick brown fox jumps over the lazy dog, again and again.",
    "hello world, hello you. How are you? I'm fine. " * 3,  # several chunks
    "def f(x):",
    "naïve café",
)


class Answers(NamedTuple):
    """Texts of prompts, two samples each and streamed, and of chats that a grammar holds; scores of the latter."""

    texts: list[list[str]]
    scores: list[float]


def answers(gateway: Gateway) -> Answers:
    """What clients get of a dozen requests at the same time."""

    def post(path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{gateway.url}/v1/{path}", json=GREEDY | body, timeout=PATIENCE_S).raise_for_status()

    def whole(prompt: str) -> Answers:
        choices = post("completions", {"prompt": prompt, "n": 2}).json()["choices"]
        return Answers([[choice["text"] for choice in choices]], [])

    def streamed(prompt: str) -> Answers:
        text = post("completions", {"prompt": prompt, "stream": True}).text
        parts = [json.loads(part) for part in re.findall(r"^data: (\{.*)$", text, re.MULTILINE)]
        return Answers([["".join(choice["text"] for part in parts for choice in part["choices"])]], [])

    def held(prompt: str) -> Answers:
        chat = {"messages": [{"role": "user", "content": prompt}], "logprobs": True, "top_logprobs": 2}
        schema = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"type": "boolean"}}}
        (choice,) = post("chat/completions", {**chat, "response_format": schema}).json()["choices"]
        return Answers([[choice["message"]["content"]]], [each["logprob"] for each in choice["logprobs"]["content"]])

    with ThreadPoolExecutor(12) as threads:
        asked = [threads.map(ask, PROMPTS * 2) for ask in (whole, streamed, held)]
        found = [answer for each in asked for answer in each]
    return Answers([text for each in found for text in each.texts], [score for each in found for score in each.scores])


@contextlib.contextmanager
def behind_gateway(folder: Path, worker: str) -> Iterator[Gateway]:
    """A gateway that has found the worker at this gRPC address."""
    with running_gateway(folder, [worker], ("--block-size", str(PAGE_SIZE))) as gateway:
        wait_for(lambda: gateway.healthy() == [worker], "healthy worker", START_TIMEOUT_S)
        yield gateway


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    made = make_checkpoint("qwen3_moe", folder, num_experts=16, vocab_size=416, num_hidden_layers=2)
    save(byte_level(), made)
    return made


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """What one device answers behind the gateway."""
    folder = tmp_path_factory.mktemp("alone")
    with (
        running_server(folder, ["--model", str(model), *FLAGS]) as server,
        behind_gateway(folder, server.address) as gateway,
    ):
        return answers(gateway)


@contextlib.contextmanager
def running_layout(folder: Path, num_hosts: int, flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The addresses of gRPC and HTTP of a server, or of the first one of several hosts."""
    if num_hosts > 1:
        with running_hosts(folder, num_hosts, flags) as hosts:
            yield hosts.grpc_address, hosts.url
    else:
        with running_server(folder, flags) as server:
            yield server.address, f"http://{server.http_address}"


@pytest.mark.skipif(not NIGHTLY, reason="servers on virtual devices; by night")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gateway_gives_the_answers_of_one_device(layout: str, alone: Answers, model: Path, tmp_path: Path) -> None:
    """Chunks, prefixes, several samples, streams, grammars with scores, all at the same time."""
    num_hosts, flags = LAYOUTS[layout]
    with (
        running_layout(tmp_path, num_hosts, ["--model", str(model), *FLAGS, *flags]) as (address, url),
        behind_gateway(tmp_path, address) as gateway,
    ):
        found = answers(gateway)
        assert found.texts == alone.texts
        np.testing.assert_allclose(found.scores, alone.scores, rtol=0, atol=2e-4)
        if layout == "ranks":
            ranks = httpx.get(f"{url}/internal_state", timeout=PATIENCE_S).json()["ranks"]
            assert all(rank["cache"]["cached_pages"] for rank in ranks), "a rank has served nothing"
