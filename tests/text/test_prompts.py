from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jaxsgl.errors import InvalidRequest
from jaxsgl.text.prompts import INLINE_CHARS, ChatPrompt, IdsPrompt, Prompt, TextPrompt, encode_prediction, tokenize
from jaxsgl.text.tokenizer import ChatMessage, Tokenizer, Truncation, load_tokenizer
from tests.text.small_tokenizers import byte_level, save


class Uncopied(Sequence[int]):
    """A sequence of ids that has a length, but none of whose ids may be read."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("an id was looked at")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def ids_of(prompt: Prompt, tokenizer: Tokenizer, threads: ThreadPoolExecutor, context_length: int) -> list[int]:
    return asyncio.run(tokenize(prompt, tokenizer, context_length, threads))


def chat(*contents: str, role: str = "user") -> ChatPrompt:
    return ChatPrompt([ChatMessage(role, content) for content in contents])


@pytest.mark.parametrize(
    ("prompt", "in_thread"),
    [
        (TextPrompt("short"), False),
        (chat("short"), False),
        (TextPrompt("x" * (INLINE_CHARS + 1)), True),
        (chat("x" * INLINE_CHARS), True),
        (chat("x", role="user" * INLINE_CHARS), True),
        (chat(*[""] * (INLINE_CHARS // 5 + 1)), True),
        (chat(*[""] * (INLINE_CHARS + 1), role=""), True),
    ],
)
def test_long_prompts_are_tokenized_beside_the_event_loop(
    prompt: Prompt,
    in_thread: bool,
    tokenizer: Tokenizer,
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[threading.Thread] = []

    def note(*_: object, **options: object) -> list[int]:
        used.append(threading.current_thread())
        return []

    monkeypatch.setattr(tokenizer, "encode", note)
    monkeypatch.setattr(tokenizer, "render_chat", lambda turns, options: "")
    ids_of(prompt, tokenizer, threads, context_length=10_000)
    assert [thread is not threading.main_thread() for thread in used] == [in_thread]


def test_too_many_ids_are_refused_before_they_are_copied(tokenizer: Tokenizer, threads: ThreadPoolExecutor) -> None:
    with pytest.raises(InvalidRequest, match=r"has 1000000 tokens, .* length is 100 tokens, .* to 99 tokens"):
        ids_of(IdsPrompt(Uncopied(1_000_000)), tokenizer, threads, context_length=100)


def test_the_longest_text_that_could_fit_is_tokenized(tokenizer: Tokenizer, threads: ThreadPoolExecutor) -> None:
    text = "龘" * (100 * tokenizer.max_token_bytes // 3)
    assert ids_of(TextPrompt(text), tokenizer, threads, context_length=100) == tokenizer.encode(text)
    with pytest.raises(InvalidRequest, match="bytes"):
        ids_of(TextPrompt(text + "龘"), tokenizer, threads, context_length=100)


def test_a_prediction_that_is_too_long_is_not_taken_for_a_prompt_that_is(tokenizer: Tokenizer) -> None:
    most = 100 * tokenizer.max_token_bytes
    assert encode_prediction("x" * most, tokenizer, 100)
    with pytest.raises(InvalidRequest, match=rf"the prediction has {most + 1} bytes, .*: shorten it$") as caught:
        encode_prediction("x" * (most + 1), tokenizer, 100)
    assert caught.value.code is None, "it is no context_length_exceeded"


@pytest.mark.parametrize("first", [True, False])
def test_a_text_that_is_cut_may_have_any_length(
    tokenizer: Tokenizer, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    text, cut = "日本語も dogs " * 20_000, Truncation(10, first)
    expected = tokenizer.encode(text, truncation=cut)
    lengths: list[int] = []
    encode = tokenizer.encode

    def note(text: str, *rest: Any) -> list[int]:
        lengths.append(len(text))
        return encode(text, *rest)

    monkeypatch.setattr(tokenizer, "encode", note)
    assert ids_of(TextPrompt(text, truncation=cut), tokenizer, threads, context_length=10) == expected
    assert max(lengths) < len(text) / 20, "most of it is not even tokenized"


def test_a_chat_that_its_template_makes_too_long_is_not_tokenized(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    tokenizer = load_tokenizer(save(byte_level(), tmp_path, "{{ 'x' * (messages[0].content | int) }}"))
    max_bytes = 10 * tokenizer.max_token_bytes
    assert len(ids_of(chat(str(max_bytes)), tokenizer, threads, context_length=10)) == max_bytes
    with pytest.raises(InvalidRequest, match=f"chat has {max_bytes + 1} bytes"):
        ids_of(chat(str(max_bytes + 1)), tokenizer, threads, context_length=10)
