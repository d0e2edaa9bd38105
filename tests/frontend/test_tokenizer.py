from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from small_tokenizers import TEXT, byte_fallback, byte_level, save

from jaxsgl.errors import CheckpointError, InvalidRequest
from jaxsgl.frontend import generation
from jaxsgl.frontend.generation import ChatPrompt, TextPrompt
from jaxsgl.frontend.tokenizer import ChatMessage, Tokenizer, load_tokenizer


def test_text_comes_back_from_its_ids(tokenizer: Tokenizer) -> None:
    for text in TEXT:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_ends_where_the_assistant_speaks(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([ChatMessage("user", "hello")])
    assert ids == tokenizer.encode("<|start|>user\nhello<|end|>\n<|start|>assistant\n")


def test_a_template_that_refuses_is_the_clients_mistake(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="unknown role robot"):
        tokenizer.encode_chat([ChatMessage("robot", "hello")])


def test_without_a_template_chat_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(byte_level(), tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template: send text or token_ids"):
        tokenizer.encode_chat([ChatMessage("user", "hello")])


def test_a_folder_without_a_tokenizer_understands_ids_only(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tmp_path))
    assert not tokenizer.exists
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no tokenizer: send token_ids"):
        tokenizer.encode("hello")
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.feed([1, 2]) + detokenizer.finish() == ""


def test_a_broken_tokenizer_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"truncated')
    with pytest.raises(CheckpointError, match=f"the tokenizer of {tmp_path} can't be loaded"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere"])
def test_a_missing_folder_is_a_checkpoint_error(model: str) -> None:
    with pytest.raises(CheckpointError, match=f"{model} does not exist"):
        load_tokenizer(model)


def test_many_threads_may_encode_at_once(tokenizer: Tokenizer) -> None:
    expected = [tokenizer.encode(text) for text in TEXT] + [tokenizer.encode_chat([ChatMessage("user", TEXT[0])])]

    def encode_all(_: int) -> list[list[int]]:
        chat = tokenizer.encode_chat([ChatMessage("user", TEXT[0])])
        return [*(tokenizer.encode(text) for text in TEXT), chat]

    with ThreadPoolExecutor(8) as threads:
        assert all(result == expected for result in threads.map(encode_all, range(80)))


def test_long_prompts_are_tokenized_beside_the_event_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    for name in ("encode", "encode_chat"):
        whole = getattr(tokenizer, name)
        monkeypatch.setattr(
            tokenizer, name, lambda prompt, whole=whole: (threads.append(threading.current_thread()), whole(prompt))[1]
        )
    long = "hello " * generation.INLINE_CHARS
    for text in ("short", long):
        asyncio.run(generation._tokenize(TextPrompt(text), tokenizer))
        asyncio.run(generation._tokenize(ChatPrompt([ChatMessage("user", text)]), tokenizer))
    assert [thread is threading.main_thread() for thread in threads] == [True, True, False, False]


def test_byte_fallback_models_keep_unknown_characters(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(byte_fallback(), tmp_path))
    assert tokenizer.decode(tokenizer.encode("hello 龘")) == "hello 龘"
