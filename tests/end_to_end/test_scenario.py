"""Everything that a large multimodal model is served with, at the same time, and small enough for every day.

A Qwen3-VL-MoE; prefill and decode in servers of their own; prompts in chunks; a vision tower whose devices share the
images; caches of prefixes and of images; chats of two turns about the same images; and the real gateway in front.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from bench.processes import free_ports
from make.vision_demo import make

from tests.end_to_end.gateway import PATIENCE_S, Worker, client_of, running_gateway, wait_for
from tests.end_to_end.precision import EXACT_FLAGS
from tests.end_to_end.servers import START_TIMEOUT_S, check_log, running_server
from tests.preprocess.pictures import data_url, picture

pytestmark = pytest.mark.foreign

MODEL = "qwen3-vl-moe"  # a gateway knows the family of mixtures by the name alone
CHUNK = 32
FLAGS = (
    *EXACT_FLAGS, "--served-model-name", MODEL, "--page-size", "4", "--max-total-tokens", "2048", "--context-length",
    "512", "--max-running-requests", "4", "--decode-buckets", "4", "--extend-buckets", str(CHUNK),
    "--chunked-prefill-size", str(CHUNK), "--mm-pool-tokens", "256", "--mm-max-patches", "256",
)  # fmt: skip
PICTURES = [picture(192, 128, seed=1), picture(128, 160, seed=2)]  # 24 and 20 tokens
QUESTIONS = ("What is this?", "What is 3 + 4?")
OTHER_QUESTIONS = ("Is it red? Say yes or no.", "What is 2 + 2?")


class Fleet:
    """Prefill with two devices, decode with one; clients of the gateway, and of the prefill server itself."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        (port,) = free_ports(1)
        make(folder / "model", num_experts=4)
        more = {
            "prefill": ("--disaggregation-bootstrap-port", str(port), "--tp", "2", "--mm-enable-dp-encoder"),
            "decode": (),
        }
        servers = []
        for mode, flags in more.items():
            (folder / mode).mkdir()
            flags = ("--model", str(folder / "model"), *FLAGS, "--disaggregation-mode", mode, *flags)
            servers.append(stack.enter_context(running_server(folder / mode, flags)))
        self.prefill, self.decode = map(Worker, servers)
        pair = ("--prefill", f"grpc://{self.prefill.address}", str(port), "--decode", f"grpc://{self.decode.address}")
        flags = ("--pd-disaggregation", *pair, "--disable-retries", "--health-check-interval-secs", "1")
        gateway = stack.enter_context(running_gateway(folder, (), flags))
        wait_for(lambda: len(gateway.healthy()) == 2, "healthy servers", START_TIMEOUT_S)
        self.through = client_of(gateway.url, stack)
        self.as_one = client_of(f"http://{self.prefill.http}", stack)  # without a room, prefill generates as well

    def check(self) -> None:
        """Nothing leaks, and nothing was logged as an error."""
        for worker in (self.prefill, self.decode):
            state = httpx.get(f"http://{worker.http}/internal_state?check=true", timeout=PATIENCE_S).json()
            assert state["leaks"] == [], state
            check_log(worker.server)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        yield Fleet(tmp_path_factory.mktemp("scenario"), stack)


def talk(client: openai.OpenAI, questions: tuple[str, ...]) -> list[tuple[str, int, int]]:
    """A chat about the pictures; for each turn the answer, and tokens of the prompt and of its cached part."""
    images: list[Any] = [{"type": "image_url", "image_url": {"url": data_url(given)}} for given in PICTURES]
    messages: list[Any] = []
    turns = []
    for question in questions:
        text = {"type": "text", "text": question}
        messages.append({"role": "user", "content": [text] if messages else [*images, text]})
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0)
        content, usage = answer.choices[0].message.content, answer.usage
        assert content and usage is not None
        cached = 0 if usage.prompt_tokens_details is None else usage.prompt_tokens_details.cached_tokens or 0
        turns.append((content, usage.prompt_tokens, cached))
        messages.append({"role": "assistant", "content": content})
    return turns


def test_two_chats_about_the_same_images_are_answered_as_by_one_server_and_images_are_encoded_once(
    fleet: Fleet,
) -> None:
    chats = (QUESTIONS, OTHER_QUESTIONS)
    before = fleet.decode.output_tokens
    ours = [talk(fleet.through, questions) for questions in chats]
    assert fleet.decode.output_tokens - before >= 4, "decode has generated"
    assert fleet.prefill.count("jaxsgl:encoded_images") == len(PICTURES), "once, in whatever chat or turn"
    assert fleet.decode.count("jaxsgl:encoded_images") == 0
    assert ours[0][0][1] > CHUNK, "the prompt takes several chunks"
    for turn, (_, _, cached) in zip(("second turn", "other chat"), (ours[0][1], ours[1][0]), strict=True):
        assert cached >= 44, f"the {turn} finds the images' pages in the prefix cache"
    httpx.post(f"http://{fleet.prefill.http}/flush_cache", timeout=PATIENCE_S).raise_for_status()
    alone = [talk(fleet.as_one, questions) for questions in chats]
    assert [[turn[:2] for turn in chat] for chat in alone] == [[turn[:2] for turn in chat] for chat in ours]
    fleet.check()
