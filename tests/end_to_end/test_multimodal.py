"""Pictures through a real server of the demo checkpoint, through the real gateway, and offline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from bench.processes import free_ports
from make.vision_demo import make
from PIL import Image

import jaxsgl
from jaxsgl.config.features import VisionConfig
from jaxsgl.wiring import RETRACT_VARIABLE
from tests.end_to_end.gateway import Gateway, client_of, running_gateway, wait_for
from tests.end_to_end.servers import START_TIMEOUT_S, RunningServer, check_log, running_server
from tests.grids import NIGHTLY
from tests.preprocess.pictures import animation, data_url, picture

pytestmark = [pytest.mark.foreign, pytest.mark.usefixtures("greedy_steps_by_day")]

MODEL = "demo"
SIZES: dict[str, Any] = {
    "page_size": 4, "max_total_tokens": 2048, "context_length": 512, "max_running_requests": 2, "decode_buckets": (2,),
    "extend_buckets": (128,), "chunked_prefill_size": 128, "dtype": "float32",
}  # fmt: skip
VISION: dict[str, Any] = {"mm_pool_tokens": 256, "mm_max_patches": 256}
BY_NIGHT = pytest.mark.skipif(
    not NIGHTLY, reason="starts a server; by day test_scenario.py has pictures and the gateway"
)
ROUND, ODD = picture(96, 64), picture(123, 77, seed=1)  # the second one must be resized


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    make(folder)
    return folder


def flags_of(folder: Path) -> tuple[str, ...]:
    def text_of(value: Any) -> str:
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    sizes = [
        text for name, value in (SIZES | VISION).items() for text in (f"--{name.replace('_', '-')}", text_of(value))
    ]
    return ("--model", str(folder), "--served-model-name", MODEL, "--max-request-bytes", str(32 << 20), *sizes)


class Clients:
    """To the same server, with and without the gateway."""

    def __init__(self, direct: openai.OpenAI, gateway: openai.OpenAI) -> None:
        self.direct, self.gateway = direct, gateway


@pytest.fixture(scope="module")
def clients(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    server_folder, gateway_folder = (tmp_path_factory.mktemp(name) for name in ("server", "gateway"))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running_server(server_folder, flags_of(folder)))
        gateway = stack.enter_context(running_gateway(gateway_folder, [server.address]))
        wait_for(lambda: gateway.healthy() == [server.address], "a healthy worker", START_TIMEOUT_S)
        yield Clients(client_of(f"http://{server.http_address}", stack), client_of(gateway.url, stack))
        check_log(server)


def ask(client: openai.OpenAI, *pictures: Image.Image) -> tuple[str, list[float], int, int]:
    """Text, log-probabilities, and tokens of the prompt and of its cached part."""
    content: list[Any] = [{"type": "image_url", "image_url": {"url": data_url(given)}} for given in pictures]
    content.append({"type": "text", "text": "What is this?"})  # the gateway puts pictures before texts
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=8, temperature=0, logprobs=True
    )
    (choice,), usage = answer.choices, answer.usage
    assert usage is not None and choice.logprobs is not None and choice.logprobs.content is not None
    details = usage.prompt_tokens_details
    cached = 0 if details is None else details.cached_tokens or 0
    logprobs = [entry.logprob for entry in choice.logprobs.content]
    return choice.message.content or "", logprobs, usage.prompt_tokens, cached


@BY_NIGHT
@pytest.mark.parametrize(
    "pictures", [(ROUND,), (ROUND, picture(64, 128, seed=2)), (ODD,)], ids=["one", "two", "resized"]
)
def test_a_chat_about_pictures_through_the_gateway_equals_the_direct_one(
    clients: Clients, pictures: tuple[Image.Image, ...]
) -> None:
    """The gateway scales pictures by an algorithm of its own, so what it has scaled is only nearly the same."""
    text, logprobs, num_tokens, _ = ask(clients.direct, *pictures)
    again = ask(clients.gateway, *pictures)
    assert (again[0], again[2]) == (text, num_tokens)
    assert again[1] == pytest.approx(logprobs, abs=1e-4 if ODD not in pictures else 1e-2)
    if ODD not in pictures:
        assert again[3] >= num_tokens - 5, "its patches have the same names as ours, so all but a page was cached"


@BY_NIGHT
def test_another_picture_is_seen(clients: Clients) -> None:
    """The demo's words hardly depend on the picture, but their probabilities do."""
    one, other = ask(clients.direct, ROUND), ask(clients.direct, picture(96, 64, seed=5))
    assert one[2] == other[2] and one[1] != pytest.approx(other[1], abs=1e-5)
    assert other[3] == 4, "the page before the picture is shared, and no other"


@BY_NIGHT
def test_texts_are_answered_as_the_bundled_model_does(clients: Clients) -> None:
    for client in (clients.direct, clients.gateway):
        messages: Any = [{"role": "user", "content": "What is 3 + 4?"}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, temperature=0)
        assert answer.choices[0].message.content == "3 + 4 = 7."


def sees_two(gateway: Gateway) -> bool:
    return len(gateway.healthy()) == 2


@pytest.mark.skipif(not NIGHTLY, reason="starts two servers more")
def test_prefill_and_decode_servers_answer_about_pictures_as_one_server_does(folder: Path, tmp_path: Path) -> None:
    """To decode workers over gRPC the gateway sends no pictures: they come from prefill.

    Decode has no tower. A page holds whole prompts, so decode computes them all, and again where it retracts a request,
    with the embeddings that prefill sends.
    """
    (port,) = free_ports(1)
    with contextlib.ExitStack() as stack:
        servers: list[RunningServer] = []
        for mode, *more in (("prefill", "--disaggregation-bootstrap-port", str(port)), ("decode",)):
            (tmp_path / mode).mkdir()
            flags = (*flags_of(folder), "--page-size", "64", "--disaggregation-mode", mode, *more)
            with pytest.MonkeyPatch.context() as patch:
                if mode == "decode":
                    patch.setenv(RETRACT_VARIABLE, "5")
                servers.append(stack.enter_context(running_server(tmp_path / mode, flags)))
        direct = client_of(f"http://{servers[0].http_address}", stack)
        moved = 0
        for scheme in ("grpc", "http"):
            prefill, decode = (
                f"{scheme}://{server.address if scheme == 'grpc' else server.http_address}" for server in servers
            )
            pair = ("--pd-disaggregation", "--prefill", prefill, str(port), "--decode", decode, "--disable-retries")
            gateway = stack.enter_context(running_gateway(tmp_path, (), (*pair, "--health-check-interval-secs", "1")))
            wait_for(partial(sees_two, gateway), "healthy servers", START_TIMEOUT_S)
            through = client_of(gateway.url, stack)
            for pictures in ((ROUND,), (ROUND, picture(64, 128, seed=2)), (ODD,)):
                answer, expected = ask(through, *pictures), ask(direct, *pictures)
                assert (answer[0], answer[2]) == (expected[0], expected[2])
                scaled_by_gateway = scheme == "grpc" and ODD in pictures
                assert answer[1] == pytest.approx(expected[1], abs=1e-2 if scaled_by_gateway else 1e-4)
            state = httpx.get(f"http://{servers[1].http_address}/get_server_info", timeout=60).json()
            before, moved = moved, state["internal_states"][0]["transfer"]["moved_bytes"]
            assert moved > before or scheme == "http", "the embeddings are in host memory by then"
        metrics = httpx.get(f"http://{servers[1].http_address}/metrics", timeout=60).text
        counts = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
        for name, least, most in (
            ("jaxsgl:encoded_images", 0, 0),
            ("jaxsgl:restored_images", 1, 99),
            ("sglang:num_retracted_requests", 1, 99),
        ):
            (count,) = [float(value) for row, value in counts.items() if row.startswith(f"{name}_total")]
            assert least <= count <= most, name


@pytest.mark.skipif(not NIGHTLY, reason="compiles as long as the rest of this file")
def test_offline_prompts_have_pictures_and_videos(folder: Path, tmp_path: Path) -> None:
    llm = jaxsgl.LLM(str(folder), **SIZES, vision=VisionConfig(**VISION))
    params = jaxsgl.SamplingParams(temperature=0.0, max_tokens=4)
    ROUND.save(tmp_path / "round.png")
    given: list[Any] = [ROUND, str(tmp_path / "round.png"), (tmp_path / "round.png").read_bytes(), data_url(ROUND)]
    chats = [
        [{"role": "user", "content": [{"type": "text", "text": "What is this? "}, {"type": "image", "image": image}]}]
        for image in given
    ]
    answers = llm.chat(chats, params, use_tqdm=False)
    assert len({(tuple(answer.token_ids), answer.prompt_tokens) for answer in answers}) == 1
    assert answers[-1].cached_tokens >= answers[-1].prompt_tokens - 5
    prompt = "a<|vision_start|><|image_pad|><|vision_end|>b<|vision_start|><|video_pad|><|vision_end|>"
    frames = [picture(64, 64, seed=i) for i in range(4)]
    for video in (frames, animation(frames, 500, "PNG")):
        data = {"image": ROUND, "video": [video]}
        (answer,) = llm.generate({"prompt": prompt, "multi_modal_data": data}, params, use_tqdm=False)
        assert (
            answer.prompt_tokens
            == llm.generate(
                {"prompt_token_ids": llm.tokenizer.encode(prompt), "multi_modal_data": data}, params, use_tqdm=False
            )[0].prompt_tokens
        )
    with pytest.raises(jaxsgl.errors.InvalidRequest, match="0 placeholders"):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": ROUND}}, params, use_tqdm=False)
    with pytest.raises(jaxsgl.errors.InvalidRequest, match="can't be read"):
        llm.generate({"prompt": prompt, "multi_modal_data": {"image": "missing.png"}}, params, use_tqdm=False)
    llm.close()
