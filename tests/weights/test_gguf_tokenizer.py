"""Tokenizers made of GGUF files' metadata cut texts as llama.cpp does, and end answers where it does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from jaxsgl.errors import CheckpointError
from jaxsgl.text.tokenizer import load_tokenizer
from jaxsgl.weights.gguf_tokenizer import end_tokens, save_tokenizer

pytestmark = pytest.mark.device

# A vocabulary of SentencePiece; the kinds 2 and 3 are of tokens that no text is cut into.
PIECES = ["<unk>", "<s>", "</s>", "▁a", "a", "▁", "b", "▁b", "<|user|>", "\n", "<0x0A>"]
KINDS = [2, 3, 3, 1, 1, 1, 1, 1, 3, 1, 6]
SCORES = [0.0, 0.0, 0.0, -1.0, -5.0, -6.0, -7.0, -2.0, 0.0, -8.0, 0.0]
NAMED = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}


def metadata_of(model: str, tokens: list[str], kinds: list[int], architecture: str = "llama", **told: Any) -> Any:
    """What a file says; None leaves a key out."""
    named = {"model": model, "tokens": tokens, "token_type": kinds, **told}
    keys = {f"tokenizer.ggml.{key}": value for key, value in named.items() if value is not None}
    return {"general.architecture": architecture, **keys}


def pieces_of(text: str, folder: Path, metadata: Any) -> list[str]:
    """The tokens that `text` is cut into by the tokenizer of `metadata`."""
    save_tokenizer(metadata, folder, "x.gguf")
    return [metadata["tokenizer.ggml.tokens"][token_id] for token_id in load_tokenizer(str(folder)).encode(text)]


def of_pieces(**told: Any) -> Any:
    return metadata_of("llama", PIECES, KINDS, scores=SCORES, **{**NAMED, **told})


def of_bytes(**told: Any) -> Any:
    """With a token that is a word, which no merges make."""
    tokens = ["<s>", "a", "b", "ab", "1", "11"]
    return metadata_of("gpt2", tokens, [3, 1, 1, 1, 1, 1], **{"merges": ["1 1"], "bos_token_id": 0, **told})


def test_a_tokenizer_that_is_not_known_names_the_way_out(tmp_path: Path) -> None:
    metadata = {"general.architecture": "qwen3", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]}
    with pytest.raises(CheckpointError, match=r"into words as poro.*tokenizer.json and tokenizer_config.json next to"):
        save_tokenizer({**metadata, "tokenizer.ggml.pre": "poro"}, tmp_path, "x.gguf")
    with pytest.raises(CheckpointError, match="no tokenizer can be made of its metadata"):
        save_tokenizer({**metadata, "tokenizer.ggml.model": "rwkv"}, tmp_path, "x.gguf")


@pytest.mark.parametrize(
    ("words", "told", "begins"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("default", None, False), ("default", True, True)],
)
def test_texts_begin_with_the_token_that_the_model_was_trained_with(
    words: str, told: bool | None, begins: bool, tmp_path: Path
) -> None:
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": words,
        "tokenizer.ggml.tokens": ["<s>", "a", "b", "ab"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 0,
        **({} if told is None else {"tokenizer.ggml.add_bos_token": told}),
    }
    save_tokenizer(metadata, tmp_path, "x.gguf")
    ids = load_tokenizer(str(tmp_path)).encode("ab")
    assert ids == [0] * begins + ([3] if words == "llama-bpe" else [1, 2])  # Llama 3 takes whole words


def test_a_vocabulary_of_sentencepiece_keeps_its_spaces_and_its_first_token(tmp_path: Path) -> None:
    metadata = {
        "general.architecture": "gemma2",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "▁", "a", "▁a"],
        "tokenizer.ggml.token_type": [3, 3, 3, 2, 4, 1, 1, 1],
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0],
        **{f"tokenizer.ggml.{word}_token_id": i for i, word in enumerate(("padding", "eos", "bos", "unknown"))},
    }
    save_tokenizer(metadata, tmp_path, "x.gguf")
    tokenizer = load_tokenizer(str(tmp_path))
    assert [tokenizer.encode(text) for text in ("a", "a a", "a  a")] == [[2, 6], [2, 6, 7], [2, 6, 4, 6]]


@pytest.mark.parametrize(
    ("tokens", "kinds", "ids"),
    [
        (["a", "<|endoftext|>", "<|end|>"], [1, 3, 4], [1, 2]),  # Phi 3
        (["<eos>", "<end_of_turn>", "<turn|>"], [3, 3, 1], [0, 1]),  # the last one is a word
        (["<|return|>", "<|end|>", "<|call|>"], [3, 3, 3], [0, 2]),  # Harmony, where one ends a part of an answer
        (["<|im_end|>"], [], [0]),
    ],
)
def test_tokens_that_end_an_answer_are_known_by_their_spelling(
    tokens: list[str], kinds: list[int], ids: list[int]
) -> None:
    told = {"eos_token_id": ids[0], "tokens": tokens, "token_type": kinds}
    assert end_tokens({f"tokenizer.ggml.{name}": value for name, value in told.items()}) == ids
    assert end_tokens({"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eos_token_ids": [7, 5]}) == [5, 7]


def test_a_space_precedes_each_text_between_special_tokens(tmp_path: Path) -> None:
    """As in Llama 2's own tokenizer."""
    assert pieces_of("a b</s>a", tmp_path, of_pieces()) == ["<s>", "▁a", "▁b", "</s>", "▁a"]
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.decode(tokenizer.encode("a b\n")) == "a b\n"


def test_no_space_precedes_a_text_where_the_file_says_so(tmp_path: Path) -> None:
    assert pieces_of("a b</s>a", tmp_path, of_pieces(add_space_prefix=False)) == ["<s>", "a", "▁b", "</s>", "a"]


@pytest.mark.parametrize(
    ("architecture", "name", "drops"),
    [("phi3", "Some Model", True), ("llama", "Phi-3 Mini", True), ("llama", "Some Model", False)],
)
def test_blanks_after_special_tokens_of_phi_3_are_dropped(
    architecture: str, name: str, drops: bool, tmp_path: Path
) -> None:
    metadata = {**of_pieces(architecture=architecture), "general.name": name}
    cut = ["▁a"] if drops else ["▁", "\n", "a"]
    assert pieces_of("<|user|>\na<s>\na", tmp_path, metadata)[1:] == ["<|user|>", *cut, "<s>", "▁", "\n", "a"]


def test_ids_that_a_vocabulary_of_sentencepiece_never_names_are_known(tmp_path: Path) -> None:
    metadata = of_pieces(**dict.fromkeys(NAMED))
    assert pieces_of("a", tmp_path, metadata) == ["<s>", "▁a"]
    assert end_tokens(metadata) == [2]


@pytest.mark.parametrize("token_id", [-1, 6, 2**32 - 1])
def test_an_id_that_no_token_has_counts_as_not_named(
    token_id: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = of_bytes(pre="llama-bpe", bos_token_id=token_id, eos_token_id=token_id)
    assert pieces_of("ab", tmp_path, metadata) == ["ab"]
    assert f"x.gguf: tokenizer.ggml.bos_token_id is {token_id}, but the vocabulary has 6 tokens" in caplog.text
    assert end_tokens(metadata) == []


@pytest.mark.parametrize("words", ["llama-bpe", "tekken", "lfm2", "pixtral", "falcon-h1", "midm-2.0", "jina-v5-nano"])
def test_some_ways_of_cutting_words_take_whole_ones_and_begin_texts(words: str, tmp_path: Path) -> None:
    assert pieces_of("ab", tmp_path, of_bytes(pre=words)) == ["<s>", "ab"]


@pytest.mark.parametrize(
    ("words", "cut"),
    [
        *((words, ["a", "11", "b"]) for words in ("olmo", "exaone4", "glm4")),
        *((words, ["a", "1", "1", "b"]) for words in ("smollm", "refact", "seed-coder")),
    ],
)
def test_words_are_cut_as_the_file_says(words: str, cut: list[str], tmp_path: Path) -> None:
    assert pieces_of("a11b", tmp_path, of_bytes(pre=words)) == cut


def test_a_vocabulary_of_bytes_that_does_not_name_its_words_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        pieces_of("ab", tmp_path, of_bytes(pre="gpt-2"))
        assert not caplog.text
        pieces_of("ab", tmp_path, of_bytes())
    assert "x.gguf: tokenizer.ggml.pre is missing" in caplog.text and "own tokenizer.json" in caplog.text
