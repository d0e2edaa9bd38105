"""OpenAI's Python client and curl against a server."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from fake_engine_process import Script
from http_calls import connect, post, refusal
from openai.types.chat import ChatCompletionMessageParam
from server_process import PATIENCE_S, ServerProcess, wait_for

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{server.http_address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with connect(server) as http:
        yield http


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    model, *_ = client.models.list().data  # other files' tests may have given the server adapters
    return str(model.id)


def test_openai_chats(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=HELLO, logprobs=True, top_logprobs=2, n=2)
    assert answer.choices[0].message.content == "user\nhello"
    assert answer.choices[1].index == 1
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert [len(token.top_logprobs) for token in answer.choices[0].logprobs.content] == [2] * 7
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens // 2


def test_openai_reads_a_stream(client: openai.OpenAI, model: str) -> None:
    stream = client.chat.completions.create(
        model=model, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    *parts, last = list(stream)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "user\nhello"
    assert parts[-1].choices[0].finish_reason == "stop"
    assert last.usage is not None
    assert last.usage.completion_tokens == 7


def test_openai_collects_a_stream(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(model=model, messages=HELLO, logprobs=True) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content == "user\nhello"
    assert answer.choices[0].message.role == "assistant"


def test_openai_completes(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=["abc", "xyz"], max_tokens=3, logprobs=1, echo=True)
    assert [choice.text for choice in answer.choices] == ["abcabc", "xyzxyz"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == list("abcabc")
    stream = client.completions.create(model=model, prompt="abc", max_tokens=3, stream=True)
    assert "".join(part.choices[0].text for part in stream) == "abc"


def test_openai_raises_its_own_errors(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="greater than or equal to -2") as bad:
        client.chat.completions.create(model=model, messages=HELLO, presence_penalty=-3)
    assert bad.value.param == "presence_penalty"
    with pytest.raises(openai.RateLimitError, match="overloaded"):
        client.completions.create(model=model, prompt=[Script.REFUSE, 1])


def test_openai_lists_the_model(client: openai.OpenAI, model: str, model_folder: str) -> None:
    assert model == Path(model_folder).name
    card = client.models.retrieve(model)
    assert (card.id, card.owned_by, card.object) == (model, "jaxsgl", "model")
    assert card.to_dict()["max_model_len"] == 200
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_requests_may_name_the_served_name_or_the_path(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    server = start_server("--served-model-name", "org/small")
    server.wait_until_ready()
    with connect(server) as http:
        for name in ("org/small", str(tmp_path / "model"), "default", "", None):
            answer = post(http, "/v1/completions", model=name, prompt=[50], max_tokens=1)
            assert answer["model"] == "org/small"
        assert http.get("/v1/models/org/small").json()["id"] == "org/small"
        assert http.post("/v1/completions", json={"model": "org", "prompt": [50]}).status_code == 404


def test_a_model_without_a_tokenizer_answers_ids(start_server: Callable[..., ServerProcess]) -> None:
    server = start_server()
    server.wait_until_ready()
    with connect(server) as http:
        (choice,) = post(http, "/v1/completions", prompt=[50], max_tokens=1, echo=True, logprobs=0)["choices"]
        assert choice["text"] == ""
        assert choice["logprobs"]["tokens"] == ["token_id:50", "token_id:50"]
        for path, body in (
            ("/v1/completions", {"prompt": "hello"}),
            ("/v1/completions", {"prompt": [50], "stop": "a"}),
            ("/v1/chat/completions", {"messages": HELLO}),
            ("/tokenize", {"prompt": "hello"}),
            ("/detokenize", {"tokens": [50]}),
        ):
            assert "no tokenizer" in refusal(http, path, **body)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_all_its_prompts_and_samples(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": [[Script.HANG], [Script.HANG]], "n": 2, "stream": stream}
    before = counts(http)
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=body, timeout=0.3)
    wait_for(lambda: counts(http)[0] == 0, "end of what the client asked for")
    assert counts(http)[1] == before[1] + 4


def counts(http: httpx.Client) -> tuple[int, int]:
    """Returns (samples that run now, samples ever aborted)."""
    report = post(http, "/v1/completions", prompt=[Script.REPORT], max_tokens=3, logprobs=0)
    running, _, aborted = (round(-8 * logprob) for logprob in report["choices"][0]["logprobs"]["token_logprobs"])
    return running, aborted


JSON = "Content-Type: application/json"
curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def run_curl(server: ServerProcess, path: str, *flags: str) -> str:
    command = ["curl", "--silent", "--show-error", "--no-buffer", f"http://{server.http_address}{path}", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout


@curl
def test_curl_completes(server: ServerProcess) -> None:
    data = json.dumps({"prompt": "abc", "max_tokens": 3})
    answer = json.loads(run_curl(server, "/v1/completions", "--header", JSON, "--data", data))
    assert answer["choices"][0]["text"] == "abc"


@curl
def test_curl_reads_a_stream(server: ServerProcess) -> None:
    data = json.dumps({"messages": HELLO, "stream": True})
    lines = run_curl(server, "/v1/chat/completions", "--header", JSON, "--data", data).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: {") for line in lines[:-2])


@curl
def test_curl_is_asked_for_the_content_type_of_its_body(server: ServerProcess) -> None:
    answer = run_curl(server, "/v1/completions", "--data", '{"prompt": "abc"}', "--write-out", "%{http_code}")
    assert answer.endswith("400")
    assert "content-type: application/json" in answer
