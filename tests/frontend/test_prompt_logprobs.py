"""vLLM's prompt_logprobs and return_tokens_as_token_ids; the fake engine's log-probability of a token is -id / 8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from http_calls import chunks, connect, post, refusal, say
from server_process import ServerProcess

from jaxsgl.frontend.http.openai.logprobs import PromptLogprob, name_of, prompt_logprobs
from jaxsgl.messages.replies import TokenLogprob
from jaxsgl.text.tokenizer import Tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with connect(server) as http:
        yield http


def scores(tokenizer: Tokenizer, ids: list[int], num_top: int) -> list[dict[str, Any] | None]:
    """What stands for a prompt of `ids`: each token is the likeliest in its place."""

    def entry(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": name_of(tokenizer, token_id)}

    own = [{str(id): entry(id, -id / 8, 1 if num_top else None)} for id in ids[1:]]
    others = [{str(id + 1): entry(id + 1, -id / 8 - 1, 2)} if num_top == 2 else {} for id in ids[1:]]
    return [None, *(one | other for one, other in zip(own, others, strict=True))]


@pytest.mark.parametrize("num_top", [0, 2])
def test_completions_score_their_prompts(http: httpx.Client, tokenizer: Tokenizer, num_top: int) -> None:
    prompts = ["abc", "hello world"]
    answer = post(http, COMPLETIONS, prompt=prompts, max_tokens=2, n=2, prompt_logprobs=num_top)
    first, other, second, _ = answer["choices"]
    for choice, prompt in ((first, prompts[0]), (second, prompts[1])):
        assert choice["prompt_logprobs"] == scores(tokenizer, tokenizer.encode(prompt), num_top)
        assert choice["logprobs"] is None
    assert "prompt_logprobs" not in other, "once for each prompt"


def test_they_have_a_number_of_likely_tokens_of_their_own(http: httpx.Client, tokenizer: Tokenizer) -> None:
    body = {"prompt": "abc", "max_tokens": 0, "echo": True}
    both = post(http, COMPLETIONS, **body, logprobs=1, prompt_logprobs=2)["choices"][0]
    assert both["prompt_logprobs"] == scores(tokenizer, tokenizer.encode("abc"), 2)
    assert both["logprobs"] == post(http, COMPLETIONS, **body, logprobs=1)["choices"][0]["logprobs"]
    fewer = post(http, COMPLETIONS, **body, logprobs=2, prompt_logprobs=0)["choices"][0]
    assert fewer["prompt_logprobs"] == scores(tokenizer, tokenizer.encode("abc"), 0)
    alone = post(http, COMPLETIONS, prompt="abc", max_tokens=0, prompt_logprobs=0)["choices"][0]
    assert (alone["text"], alone["prompt_logprobs"]) == ("", fewer["prompt_logprobs"])


def test_chats_score_their_prompts(http: httpx.Client, tokenizer: Tokenizer) -> None:
    answer = post(http, CHAT, messages=say("hi"), max_tokens=2, n=2, prompt_logprobs=2, return_token_ids=True)
    ids = answer["prompt_token_ids"]
    assert [entry and list(entry) for entry in answer["prompt_logprobs"]] == [
        None,
        *([str(id), str(id + 1)] for id in ids[1:]),
    ]
    assert [entry[str(id)]["logprob"] for id, entry in zip(ids[1:], answer["prompt_logprobs"][1:], strict=True)] == [
        -id / 8 for id in ids[1:]
    ]
    assert "prompt_logprobs" not in post(http, CHAT, messages=say("hi"), max_tokens=2)


def test_a_token_that_is_none_of_the_likely_ones_has_no_rank(tokenizer: Tokenizer) -> None:
    first, second = tokenizer.encode("a")[-1], tokenizer.encode("b")[-1]
    scored = [TokenLogprob(-3.0, ((first, -1.0),)), TokenLogprob(-1.0, ((first, -1.0),))]
    assert prompt_logprobs(tokenizer, [5, second, first], scored, 1) == [
        None,
        {first: PromptLogprob(-1.0, 1, "a"), second: PromptLogprob(-3.0, None, "b")},
        {first: PromptLogprob(-1.0, 1, "a")},
    ]
    assert prompt_logprobs(tokenizer, [5, 6], None, 1) is None, "aborted before"


def test_the_prompts_own_token_comes_first(tokenizer: Tokenizer) -> None:
    """Clients of vLLM take the first value for it."""
    first, second, third = (tokenizer.encode(letter)[-1] for letter in "abc")
    top = ((first, -1.0), (second, -2.0))
    answer = prompt_logprobs(tokenizer, [5, third, second], [TokenLogprob(-3.0, top), TokenLogprob(-2.0, top)], 2)
    assert answer is not None
    assert [entry and next(iter(entry.items())) for entry in answer] == [
        None,
        (third, PromptLogprob(-3.0, None, "c")),
        (second, PromptLogprob(-2.0, 2, "b")),
    ]


@pytest.mark.parametrize(("path", "field"), [(COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": say("hi")})])
def test_what_a_stream_cannot_have_is_refused(http: httpx.Client, path: str, field: dict[str, Any]) -> None:
    error = refusal(http, path, **field, prompt_logprobs=0, stream=True)
    assert error["message"] == "prompt_logprobs come with whole answers: leave stream out, or prompt_logprobs"


def test_tokens_are_named_by_their_ids_if_asked(http: httpx.Client, tokenizer: Tokenizer) -> None:
    body = {"prompt": "abc", "max_tokens": 3, "logprobs": 1, "return_tokens_as_token_ids": True}
    names = [f"token_id:{id}" for id in tokenizer.encode("abc")]
    scored = post(http, COMPLETIONS, **body)["choices"][0]["logprobs"]
    assert scored["tokens"] == names and [list(top) for top in scored["top_logprobs"]] == [[name] for name in names]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks(http, COMPLETIONS, **body)]
    assert [token for part in parts if part for token in part["tokens"]] == names
    chat = {"messages": say("abc"), "max_tokens": 3, "logprobs": True, "top_logprobs": 1}
    plain, named = (
        post(http, CHAT, **chat, return_token_ids=True, return_tokens_as_token_ids=as_ids)["choices"][0]
        for as_ids in (False, True)
    )
    for token, other, id in zip(
        plain["logprobs"]["content"], named["logprobs"]["content"], named["token_ids"], strict=True
    ):
        top = [{**token["top_logprobs"][0], "token": f"token_id:{id}"}]
        assert other == {**token, "token": f"token_id:{id}", "top_logprobs": top}
