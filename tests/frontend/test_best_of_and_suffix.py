"""best_of and suffix of /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from fake_engine_process import EOS_ID
from http_calls import chunks, connect, post, refusal
from server_process import ServerProcess

PATH = "/v1/completions"


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with connect(server) as http:
        yield http


def test_the_likeliest_samples_are_returned_and_all_are_counted(http: httpx.Client) -> None:
    """Sample i of the fake engine starts i ids later, and higher ids are less likely; token 1 ends a sample."""
    body = {"prompt": [[66, 50, 90, EOS_ID], [50, 60, 70, 80]], "max_tokens": 3}
    every = post(http, PATH, **body, n=4, logprobs=0)
    answer = post(http, PATH, **body, n=2, best_of=4, logprobs=0)
    for prompt, best in enumerate(([3, 2], [0, 3])):
        for rank, sample in enumerate(best):
            wanted = every["choices"][4 * prompt + sample] | {"index": 2 * prompt + rank}
            assert answer["choices"][2 * prompt + rank] == wanted
    assert answer["usage"] == every["usage"]
    assert answer["usage"]["completion_tokens"] == 3 + 3 + 2 + 1 + 4 * 3
    bare = post(http, PATH, **body, n=2, best_of=4)
    assert bare["choices"] == [choice | {"logprobs": None} for choice in answer["choices"]]
    assert bare["usage"] == answer["usage"]
    assert post(http, PATH, **body, n=2, best_of=2)["choices"] == post(http, PATH, **body, n=2)["choices"]


def test_the_likeliest_sample_comes_with_the_echoed_and_scored_prompt(http: httpx.Client) -> None:
    body = {"prompt": [[90, 60, 50], [50, 60, 70]], "max_tokens": 2, "echo": True, "logprobs": 1}
    every = post(http, PATH, **body, n=3)["choices"]
    for place, choice in enumerate(post(http, PATH, **body, best_of=3)["choices"]):
        assert choice == every[3 * place + (1 - place)] | {"index": place}
    scored = post(http, PATH, **body | {"max_tokens": 0}, best_of=3)
    assert [choice["logprobs"]["token_logprobs"] for choice in scored["choices"]] == [
        [None, -60 / 8, -50 / 8], [None, -60 / 8, -70 / 8],
    ]  # fmt: skip
    assert scored["usage"]["completion_tokens"] == 0


def test_a_suffix_asks_for_what_stands_between_it_and_the_prompt(scripted: ServerProcess) -> None:
    fields = {"prompt": "def f(", "suffix": "return x", "max_tokens": 40, "logprobs": 0}
    with connect(scripted) as http:
        tokens = {
            text: http.post("/tokenize", json={"prompt": text}).json()["tokens"]
            for text in ("<|fim_prefix|>", "def f(", "<|fim_suffix|>", "return x", "<|fim_middle|>", "a<|fim_pad|>b")
        }
        *laid_out, ends = tokens.values()
        ids = [token_id for part in laid_out for token_id in part]
        (choice,) = post(http, PATH, **fields)["choices"]
        names = choice["logprobs"]["tokens"]
        (wanted,) = post(http, PATH, **fields | {"prompt": ids, "suffix": ""})["choices"]
        assert names == wanted["logprobs"]["tokens"]
        assert names[0] == "<|fim_prefix|>"
        assert "".join(part["choices"][0]["text"] for part in chunks(http, PATH, **fields)) == choice["text"]
        (none_before,) = post(http, PATH, **fields | {"prompt": ""})["choices"]
        assert none_before["text"].startswith("<|fim_prefix|><|fim_suffix|>return x<|fim_middle|>")
        assert len(post(http, PATH, **fields | {"prompt": ["a", "b"]})["choices"]) == 2
        assert "send texts" in refusal(http, PATH, **fields | {"prompt": [50, 60]})["message"]
        assert "leave echo out" in refusal(http, PATH, **fields, echo=True)["message"]
        cut = post(http, PATH, **fields, truncate_prompt_tokens=len(ids) - 1)
        assert cut["choices"][0]["logprobs"]["tokens"][:2] == ["<|fim_prefix|>", names[2]]
        # The fake model says the prompt again: it ends where the middle does.
        (ended,) = post(http, PATH, **fields | {"prompt": "a<|fim_pad|>b"})["choices"]
        assert (ended["finish_reason"], ended["matched_stop"]) == ("stop", ends[1])
        assert ended["text"] == "<|fim_prefix|>a"
        (ignored,) = post(http, PATH, **fields | {"prompt": "a<|fim_pad|>b"}, ignore_eos=True)["choices"]
        assert ignored["finish_reason"] == "length"
