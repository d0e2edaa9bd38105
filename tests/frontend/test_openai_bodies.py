"""Bodies that must be refused, and the tokenizer's endpoints."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

import httpx
import pytest
from http_calls import connect, post, refusal, say
from server_process import ServerProcess

from jaxsgl.text.tokenizer import Tokenizer

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with connect(server) as http:
        yield http


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"null",
        b"[]",
        b'"text"',
        b'{"prompt": "a"',
        b'{"prompt": NaN, "messages": NaN, "tokens": NaN}',
        b'{"temperature": Infinity}',
        b'{"prompt": "a", "temperature": 1e999, "messages": 1, "tokens": [1e999]}',
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\udfff"}], "tokens": "\\ud800"}',
        b'{"prompt": "\xff"}',
        b'{"prompt": [' + b"9" * 5000 + b'], "messages": 1, "tokens": [' + b"9" * 5000 + b"]}",
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": ' * 150 + b"1" + b"}" * 150,
    ],
)
def test_broken_bodies_are_the_clients_mistake(http: httpx.Client, path: str, body: bytes) -> None:
    answer = http.post(path, content=body, headers=JSON)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_an_error_names_only_the_first_of_many_problems(http: httpx.Client) -> None:
    error = refusal(http, "/v1/completions", prompt=["a"] * 10_000 + [1] * 10_000)
    assert len(error["message"]) < 500


@pytest.mark.parametrize(
    ("path", "fields", "limit"),
    [
        ("/v1/completions", {"prompt": ["a"] * 1025}, 1024),
        ("/v1/completions", {"prompt": [[1]] * 1025}, 1024),
        ("/v1/chat/completions", {"messages": say("a") * 8193}, 8192),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text"}] * 1025}]}, 1024),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}] * 129}]},
            128,
        ),
        ("/generate", {"text": ["a"] * 1025}, 1024),
        ("/generate", {"input_ids": [[1]] * 1025}, 1024),
        ("/generate", {"text": "a", "sampling_params": [{}] * 1025}, 1024),
    ],
)
def test_lists_too_long_to_validate_quickly_are_refused(
    http: httpx.Client, path: str, fields: dict[str, object], limit: int
) -> None:
    assert str(limit) in refusal(http, path, **fields)["message"]


def test_a_body_may_begin_with_a_byte_order_mark(http: httpx.Client) -> None:
    """Editors and shells of Windows write one before a file's text, which curl sends as it is."""
    body = b'{"prompt": "hello"}'
    plain = http.post("/tokenize", content=body, headers=JSON).json()
    assert http.post("/tokenize", content=codecs.BOM_UTF8 + body, headers=JSON).json() == plain


def test_unknown_paths_and_methods_are_refused_in_the_same_shape(http: httpx.Client) -> None:
    for answer in (http.get("/v1/nothing"), http.get("/v1/completions")):
        assert answer.status_code in (404, 405)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_a_request_keeps_its_id(http: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    assert http.post("/v1/completions", json=body, headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    assert len(http.post("/v1/completions", json=body).headers["x-request-id"]) == 32


def test_text_is_tokenized_and_comes_back(http: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello Köln")
    answer = post(http, "/tokenize", prompt="hello Köln", return_token_strs=True)
    assert answer["tokens"] == ids
    assert answer["count"] == len(ids)
    assert answer["max_model_len"] == 200
    assert answer["token_strs"][0] == "hello"
    named = "".join(answer["token_strs"]).encode("latin-1").decode("unicode_escape").encode("latin-1")
    assert named.decode() == "hello Köln"
    assert post(http, "/v1/detokenize", tokens=ids) == {"prompt": "hello Köln", "text": "hello Köln"}


def test_several_texts_are_tokenized_one_by_one(http: httpx.Client, tokenizer: Tokenizer) -> None:
    answer = post(http, "/v1/tokenize", prompt=["abc", "hello"])
    assert answer["tokens"] == [tokenizer.encode("abc"), tokenizer.encode("hello")]
    assert answer["count"] == [3, 1]


def test_an_empty_text_has_no_tokens(http: httpx.Client, tokenizer: Tokenizer) -> None:
    answer = post(http, "/tokenize", prompt="", return_token_strs=True)
    assert (answer["tokens"], answer["count"], answer["token_strs"]) == ([], 0, [])
    assert post(http, "/tokenize", prompt=["", "abc"])["tokens"] == [[], tokenizer.encode("abc")]


def test_special_tokens_come_back_as_each_api_has_them_or_as_asked(http: httpx.Client, tokenizer: Tokenizer) -> None:
    """vLLM's answer is `prompt`, SGLang's `text`."""
    names, plain = "<|start|>hello<|end|>", "hello"
    ids = tokenizer.encode(names)
    assert post(http, "/detokenize", tokens=ids) == {"prompt": names, "text": plain}
    for skips, text in ((False, names), (True, plain)):
        assert post(http, "/detokenize", tokens=ids, skip_special_tokens=skips) == {"prompt": text, "text": text}
    assert post(http, "/detokenize", tokens=[ids, []]) == {"prompt": [names, ""], "text": [plain, ""]}


def test_messages_are_tokenized_in_their_template(http: httpx.Client, tokenizer: Tokenizer) -> None:
    expected = tokenizer.encode("<|start|>user\nhello<|end|>\n<|start|>assistant\n")
    assert post(http, "/tokenize", messages=say("hello"))["tokens"] == expected


def test_the_list_of_models_may_be_asked_for_with_a_slash(http: httpx.Client) -> None:
    assert http.get("/v1/models/").json() == http.get("/v1/models").json()


def test_more_tokens_than_the_context_holds_can_be_counted(http: httpx.Client) -> None:
    assert post(http, "/tokenize", prompt="龘" * 300)["count"] == 900


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "send one of them"),
        ("/tokenize", {"prompt": "a", "messages": say("a")}, "send one of them"),
        ("/tokenize", {"prompt": 5}, "must be a text"),
        ("/tokenize", {"prompt": []}, "must be a text"),
        ("/tokenize", {"prompt": "龘" * 10_000}, "30000 bytes"),
        ("/detokenize", {"tokens": [1000]}, "ids go from 0 to 999"),
        ("/detokenize", {"tokens": [10**30]}, "ids go from 0 to 999"),
        ("/detokenize", {"tokens": [5] * 201}, "201 tokens"),
        ("/detokenize", {"tokens": "a"}, "must be a list of token ids"),
        ("/detokenize", {"tokens": [[5], [1000]]}, "ids go from 0 to 999"),
        ("/detokenize", {"tokens": [[5], 5]}, "must be a list of token ids"),
    ],
)
def test_bodies_that_cannot_be_tokenized_are_refused(
    http: httpx.Client, path: str, body: dict[str, object], words: str
) -> None:
    assert words in refusal(http, path, **body)["message"]
