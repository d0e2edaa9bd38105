"""Sampling parameters in bodies of both HTTP APIs: one set of bounds, one conversion."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from played_link import PlayedLink, front_end_of
from pydantic import TypeAdapter, ValidationError
from test_event_loop import INFO

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.generation import ServedModel
from jaxsgl.frontend.http.bodies import Body, sampling_params
from jaxsgl.frontend.http.openai.chat import prepare_chat
from jaxsgl.frontend.http.openai.completions import _sampling as completion_sampling
from jaxsgl.frontend.http.openai.ranking import RerankRequest
from jaxsgl.frontend.http.openai.schemas import ChatRequest, CompletionRequest, sampling_of
from jaxsgl.frontend.http.sglang.generate import _sampling as sampling_of_generate
from jaxsgl.frontend.http.sglang.generate import _Scores
from jaxsgl.frontend.http.sglang.schemas import GenerateBody, SamplingBody
from jaxsgl.requests.request import BOUNDS, SamplingParams
from jaxsgl.text.tokenizer import Tokenizer

SGLANG_NAMES = {"min_tokens": "min_new_tokens", "seed": "sampling_seed"}
SGLANG_OUTSIDE = {"logprobs", "prompt_logprobs"}  # /generate has them beside its sampling parameters
SAME = {
    "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "frequency_penalty": 1.0,
    "presence_penalty": -1.0, "repetition_penalty": 1.5, "logit_bias": {"7": 2.5}, "stop": "end", "stop_regex": "e+d",
    "stop_token_ids": [3, 4], "ignore_eos": True,
}  # fmt: skip


def fields_with_bounds() -> list[tuple[type[Body], str, str]]:
    """Returns (body, its field, the field's name in `SamplingParams`) for each bounded field of both APIs."""
    openai = [(CompletionRequest, name, name) for name in BOUNDS if name != "seed"]
    sglang = [(SamplingBody, SGLANG_NAMES.get(name, name), name) for name in BOUNDS if name not in SGLANG_OUTSIDE]
    return [*openai, *sglang]


@pytest.mark.parametrize(("schema", "field", "name"), fields_with_bounds())
def test_schemas_and_sampling_params_accept_the_same_values(schema: type[Body], field: str, name: str) -> None:
    bounds = BOUNDS[name]
    low, high = bounds.low, bounds.high
    step = 1 if isinstance(low, int) else 0.001
    prompt = {"prompt": "a"} if schema is CompletionRequest else {}
    for value, fits in ((low - step, False), (low, not bounds.above_low), (high, True), (high + step, False)):
        params: dict[str, Any] = {name: value}
        if fits:
            schema.model_validate({**prompt, field: value})
            SamplingParams(**params)
        else:
            with pytest.raises(ValidationError, match=field):
                schema.model_validate({**prompt, field: value})
            with pytest.raises(InvalidRequest, match=name):
                SamplingParams(**params)


def test_a_whole_number_is_an_integer_however_it_is_written() -> None:
    """As in JSON Schema, by which clients and languages with one kind of number write them."""
    body = ChatRequest.model_validate(
        {"messages": SAID, "max_tokens": 16.0, "seed": -1e3, "n": 2.0, "top_logprobs": 3.0}
    )
    asked = (body.max_tokens, body.seed, body.n, body.top_logprobs)
    assert asked == (16, -1000, 2, 3) and all(type(value) is int for value in asked)
    each = GenerateBody.model_validate({"text": "a", "sampling_params": [{"max_new_tokens": 4.0}]}).sampling_params
    assert isinstance(each, list) and type(each[0].max_new_tokens) is int


def test_the_schema_of_a_body_is_written_however_many_apps_have_taken_it() -> None:
    class Asked(Body):
        number: int | None = None

    for _ in range(300):
        asked = TypeAdapter(list[Asked])
    (schema,) = asked.json_schema()["$defs"].values()
    assert schema["properties"]["number"]["anyOf"] == [{"type": "integer"}, {"type": "null"}]


@pytest.mark.parametrize("value", [16.5, "16", True, 0.0])
def test_what_is_no_whole_number_in_its_bounds_is_refused(value: object) -> None:
    with pytest.raises(ValidationError, match="max_tokens"):
        ChatRequest.model_validate({"messages": SAID, "max_tokens": value})


def test_a_document_that_is_none_is_named_by_its_place() -> None:
    with pytest.raises(ValidationError) as refused:
        RerankRequest.model_validate({"query": "a", "documents": [{"text": "b"}, {"txt": "c"}]})
    (problem,) = refused.value.errors()
    assert (problem["loc"], problem["msg"]) == (("documents", 1), 'must be a text, or {"text": ...}')


SAID = [{"role": "user", "content": "a"}]


def test_both_apis_ask_for_the_same_sampling() -> None:
    openai: dict[str, Any] = {"prompt": "a", "min_tokens": 2, "seed": 9, "no_stop_trim": True}
    ours = sampling_of(CompletionRequest.model_validate({**openai, **SAME}), max_tokens=8, logprobs=None)
    sglang = sampling_params(
        SamplingBody.model_validate(SAME), max_tokens=8, min_tokens=2, seed=9, include_stop_str_in_output=True
    )
    assert ours == sglang
    assert ours.logit_bias == {7: 2.5}
    assert (ours.stop, ours.stop_token_ids) == (("end",), (3, 4))


@pytest.mark.parametrize("most", [0, 2])
def test_generate_names_its_own_fields_where_too_many_tokens_must_come(most: int) -> None:
    params = SamplingBody(min_new_tokens=3, max_new_tokens=most)
    words = f"sampling_params.min_new_tokens is 3, but must be max_new_tokens={most} at most"
    with pytest.raises(InvalidRequest, match=words):
        sampling_of_generate(GenerateBody(text="a"), params, _Scores())


def test_limits_of_tokens_reach_the_engine() -> None:
    body = CompletionRequest.model_validate({"prompt": "a", "allowed_token_ids": [5, 6], "bad_words": ["no"]})
    ours = sampling_of(body, max_tokens=8, logprobs=None)
    assert (ours.allowed_token_ids, ours.bad_words) == ((5, 6), ("no",))
    with pytest.raises(ValidationError, match="allowed_token_ids"):
        CompletionRequest.model_validate({"prompt": "a", "allowed_token_ids": []})


def test_what_is_left_out_is_as_the_model_says() -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    body = CompletionRequest(prompt="a", temperature=0.0)
    assert sampling_of(body, 5, None, defaults=defaults) == SamplingParams(temperature=0.0, top_k=20, max_tokens=5)


def test_requests_are_sampled_as_the_served_model_says(tokenizer: Tokenizer) -> None:
    async def samplings() -> list[SamplingParams]:
        with ThreadPoolExecutor(1) as threads:
            model = ServedModel(INFO, tokenizer, sampling_defaults={"temperature": 0.25, "top_p": 0.5})
            front_end = front_end_of(PlayedLink(), threads, model)
            chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "top_p": 0.75})
            of_chat, _ = await prepare_chat(front_end, chat, "a")
            return [of_chat.sampling, completion_sampling(CompletionRequest(prompt="a"), model)]

    of_chat, of_completion = asyncio.run(samplings())
    assert (of_chat.temperature, of_chat.top_p) == (0.25, 0.75)
    assert (of_completion.temperature, of_completion.top_p) == (0.25, 0.5)


def test_null_is_the_default_of_sampling_params() -> None:
    nothing = CompletionRequest.model_validate({"prompt": "a", **dict.fromkeys(SAME)})
    assert sampling_of(nothing, max_tokens=None, logprobs=None) == SamplingParams()
    nothing_of_sglang = SamplingBody.model_validate(dict.fromkeys(SAME))
    assert sampling_params(nothing_of_sglang, max_tokens=None) == SamplingParams()


def test_the_log_names_fields_that_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    said = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    for more, line in (({"max_new_tokens": 5, "user": "me"}, "are ignored: max_new_tokens, user"), ({}, "")):
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "jaxsgl.frontend"):
            sampling_of(ChatRequest.model_validate(said | more), 3, None)
        assert caplog.text.strip().endswith(line) and bool(caplog.text) == bool(line)
