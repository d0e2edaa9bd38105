"""Rooms in the bodies of requests, and what each side's server makes of a request that has one."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest
from played_link import PlayedLink, front_end_of
from test_event_loop import INFO

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.generation import RequestOptions, ServedModel
from jaxsgl.frontend.http.anthropic.conversation import MessagesRequest, chat_of
from jaxsgl.frontend.http.app import build_app
from jaxsgl.frontend.http.bodies import in_rooms
from jaxsgl.frontend.http.openai.chat import answer_chat, prepare_chat
from jaxsgl.frontend.http.openai.completions import answer_completions
from jaxsgl.frontend.http.openai.schemas import ChatRequest, CompletionRequest
from jaxsgl.frontend.legs import rendezvous
from jaxsgl.messages.orders import ToEngine
from jaxsgl.requests.request import Rendezvous, Request, SamplingParams
from jaxsgl.text.tokenizer import Tokenizer

ROOM = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 5}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
CALL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def rooms_of(body: ChatRequest | CompletionRequest, num_prompts: int = 1) -> list[Rendezvous | None]:
    return [options.room for options in in_rooms([RequestOptions()] * num_prompts, body)]


@pytest.mark.parametrize("name", ROOM)
@pytest.mark.parametrize("value", [True, False, 1.0, -1, 1 << 64, "5" * 300, "", [5, 6], {}, [True]])
def test_a_room_that_is_none_is_refused_before_the_engine_must_read_it(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=name):
        rooms_of(ChatRequest.model_validate({**CHAT, **ROOM, name: value}))


def test_the_engine_reads_the_rooms_that_are_taken() -> None:
    for given in (ROOM, {**ROOM, "bootstrap_port": None}, {**ROOM, "bootstrap_host": "[::1]", "bootstrap_room": 0}):
        (room,) = rooms_of(ChatRequest.model_validate({**CHAT, **given}))
        request = Request("a/1", [5], SamplingParams(), room=room)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=ToEngine) == request
    assert room == rendezvous("::1", 8998, 0)


def test_the_samples_of_a_prompt_share_the_first_of_their_rooms() -> None:
    """smg's HTTP router names a room for each sample of a chat."""

    def given(count: int) -> dict[str, Any]:
        return {"bootstrap_host": ["a"] * count, "bootstrap_port": [8998] * count, "bootstrap_room": [*range(count)]}

    assert rooms_of(ChatRequest.model_validate({**CHAT, "n": 3, **given(3)})) == [rendezvous("a", 8998, 0)]
    two = {"prompt": ["a", "b"], "n": 2}
    for count, numbers in ((2, (0, 1)), (4, (0, 2))):
        body = CompletionRequest.model_validate({**two, **given(count)})
        assert rooms_of(body, 2) == [rendezvous("a", 8998, number) for number in numbers]
    with pytest.raises(InvalidRequest, match="3 entries for 2 prompts"):
        rooms_of(CompletionRequest.model_validate({**two, **given(3)}), 2)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize(
    "body",
    [
        ChatRequest.model_validate({**CHAT, "prompt_logprobs": 1}),
        CompletionRequest.model_validate({"prompt": "a", "prompt_logprobs": 0}),
        CompletionRequest.model_validate({"prompt": "a", "echo": True, "logprobs": 1}),
        CompletionRequest.model_validate({"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0, "stream": True}),
    ],
)
def test_scores_of_a_prompt_that_no_gateway_brings_back_are_refused_by_both_sides(
    tokenizer: Tokenizer, body: ChatRequest | CompletionRequest, mode: str
) -> None:
    link = PlayedLink()

    async def answer() -> None:
        with ThreadPoolExecutor(1) as threads:
            front_end = front_end_of(link, threads, ServedModel(INFO, tokenizer), mode)
            asked = body.model_copy(update=ROOM)
            if isinstance(asked, ChatRequest):
                await answer_chat(front_end, asked)
            else:
                await answer_completions(front_end, asked)

    with pytest.raises(InvalidRequest, match="between prefill and decode"):
        asyncio.run(asyncio.wait_for(answer(), 5.0))
    assert not link.sent


@pytest.mark.parametrize(
    "asked", [{"tools": [CALL], "tool_choice": "required"}, {"response_format": {"type": "json_object"}}]
)
def test_the_grammar_of_a_chat_is_left_to_decode(tokenizer: Tokenizer, asked: dict[str, Any]) -> None:
    """Prefill yields one token that no client sees, and needs no package for grammars."""
    body = ChatRequest.model_validate({**CHAT, **ROOM, **asked, "max_tokens": 9})

    async def sampling(mode: str) -> SamplingParams:
        with ThreadPoolExecutor(1) as threads:
            front_end = front_end_of(PlayedLink(), threads, ServedModel(INFO, tokenizer), mode)
            request, _ = await prepare_chat(front_end, body, "a")
            return request.sampling

    at_prefill, at_decode = (asyncio.run(sampling(mode)) for mode in ("prefill", "decode"))
    assert at_prefill == SamplingParams(temperature=0.0, max_tokens=1)
    assert at_decode.grammar is not None and at_decode.max_tokens == 9


@pytest.mark.parametrize(
    "given",
    [
        {"stop_token_ids": [10**6]},
        {"logit_bias": {"1000000": 1}},
        {"prompt": [[5], [6] * INFO.limits.context_length]},
    ],
)
def test_the_server_of_the_other_leg_is_told_of_what_the_front_end_refuses(
    tokenizer: Tokenizer, given: dict[str, Any]
) -> None:
    link, rooms = PlayedLink(), {name: [value, value] for name, value in ROOM.items()}
    prompts = given.get("prompt", [[5], [6]])
    body = CompletionRequest.model_validate({**rooms, **given, "prompt": prompts})

    async def answer() -> None:
        with ThreadPoolExecutor(1) as threads:
            await answer_completions(front_end_of(link, threads, ServedModel(INFO, tokenizer), "decode"), body)

    with pytest.raises(InvalidRequest) as refusal:
        asyncio.run(asyncio.wait_for(answer(), 5.0))
    sent = [message for message in link.sent if isinstance(message, Request)]
    assert [(message.prompt_ids, message.refused) for message in sent] == [(ids, str(refusal.value)) for ids in prompts]
    assert not link.num_open


@pytest.mark.parametrize(
    ("given", "words"),
    [({"data_parallel_rank": 1}, "data_parallel_rank is 1"), ({"rid": ["a", "b"]}, "id of a running request")],
)
def test_the_server_of_the_other_leg_is_told_of_what_no_replica_takes(
    tokenizer: Tokenizer, given: dict[str, Any], words: str
) -> None:
    """The prefill server may have more replicas, or have ended the request that had the id."""
    link, prompts = PlayedLink(), [[5], [6]]
    rooms = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": [5, 6]}
    link.accept()

    async def answer() -> None:
        transport = httpx.ASGITransport(build_app(front_end_of(link, threads, ServedModel(INFO, tokenizer), "decode")))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            refused = await http.post("/generate", json={"input_ids": prompts, **rooms, **given})
        assert refused.status_code == 400 and words in refused.text

    with ThreadPoolExecutor(1) as threads, link.open(Request("a", [9], SamplingParams())):
        asyncio.run(asyncio.wait_for(answer(), 5.0))
    told = [message for message in link.sent if isinstance(message, Request) and message.refused]
    assert [message.prompt_ids for message in told] == prompts and all(words in message.refused for message in told)


def test_the_legs_of_anthropics_messages_meet_in_a_room() -> None:
    body = MessagesRequest.model_validate({**CHAT, **ROOM, "model": "default", "max_tokens": 5})
    assert rooms_of(chat_of(body)) == [rendezvous("127.0.0.1", 8998, 5)]
