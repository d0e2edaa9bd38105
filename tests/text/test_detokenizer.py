from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsgl.messages.replies import Reply
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.text.detokenizer import ByteDetokenizer, WindowDetokenizer
from jaxsgl.text.sample import Sample, detokenizer_of
from jaxsgl.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.small_tokenizers import KINDS, TEXT, save

REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {kind: load_tokenizer(save(make(), folder / kind)) for kind, make in KINDS.items()}


def stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int] | None = None) -> list[str]:
    """Feeds `ids` in portions of the given sizes (default: one by one); returns the pieces, the flush included."""
    detokenizer = tokenizer.detokenizer()
    pieces, start = [], 0
    for size in sizes or [1] * len(ids):
        pieces.append(detokenizer.feed(ids[start : start + size]))
        start += size
    pieces.append(detokenizer.feed(ids[start:]))
    return [*pieces, detokenizer.finish()]


def test_each_kind_of_tokenizer_has_its_own_detokenizer(tokenizers: dict[str, Tokenizer]) -> None:
    assert isinstance(tokenizers["byte_level"].detokenizer(), ByteDetokenizer)
    assert isinstance(tokenizers["byte_fallback"].detokenizer(), WindowDetokenizer)
    assert isinstance(tokenizers["metaspace"].detokenizer(), WindowDetokenizer)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=400)
@given(data=st.data())
def test_joined_pieces_are_the_text_of_all_ids(
    kind: str, tokenizers: dict[str, Tokenizer], data: st.DataObject
) -> None:
    tokenizer = tokenizers[kind]
    # 700 is beyond every vocabulary here: models have more ids than their tokenizers.
    ids = data.draw(st.lists(st.integers(0, 700), max_size=40))
    sizes = data.draw(st.lists(st.integers(1, 4), max_size=10))
    assert "".join(stream(tokenizer, ids, sizes)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_joined_pieces_are_the_text_of_long_random_sequences(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer, rng = tokenizers[kind], random.Random(1)
    for _ in range(20):
        ids = [rng.randrange(400) for _ in range(500)]
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_character_split_over_tokens_comes_whole(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    text = "x 🦊 龘 ☂ é 𝄞🧭 y"
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    assert len(ids) > len(text), "the test wants characters that are split over tokens"
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_text_comes_with_its_token(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(TEXT[0])
    detokenizer, so_far = tokenizer.detokenizer(), ""
    for count, token_id in enumerate(ids, start=1):
        so_far += detokenizer.feed([token_id])
        assert so_far == tokenizer.decode(ids[:count])


def test_an_incomplete_character_is_replaced_at_the_end_only(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("a𝄞")[:-1]
    assert stream(tokenizer, ids)[:-1] == ["a", *[""] * (len(ids) - 1), ""]
    assert stream(tokenizer, ids)[-1] == REPLACEMENT


def test_invalid_bytes_flow_on(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    (lead_byte,) = [id for id in range(400) if tokenizer.decode([id, id]) == REPLACEMENT * 2][:1]
    pieces = stream(tokenizer, [lead_byte] * 50)
    assert all(len(piece) <= 1 for piece in pieces)
    assert "".join(pieces) == REPLACEMENT * 50


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_give_no_text(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    hello = tokenizer.encode("hello world")
    end = tokenizer.encode("a<|end|>")[-1]
    assert "".join(stream(tokenizer, [end] * 9)) == ""
    assert "".join(stream(tokenizer, [*hello, end])) == "hello world"


def continued(tokenizer: Tokenizer, prompt: list[int], output: list[int], **sampling: Any) -> str:
    """Returns the text of a sample, whose tokens come one by one."""
    params = SamplingParams(**sampling)
    sample = Sample(Request("r", prompt, params), 0, detokenizer_of(tokenizer, params))
    replies = [Reply("r", (token_id,)) for token_id in output[:-1]]
    replies.append(Reply("r", tuple(output[-1:]), FinishReason.LENGTH))
    text = ""
    for reply in replies:
        text += sample.take([reply]).text
        if sample.ended:
            break
    return text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["hello world, hello you", TEXT[5], "a  b 🙂 c 你 you"])
def test_a_text_goes_on_where_its_prompt_ends(kind: str, text: str, tokenizers: dict[str, Tokenizer]) -> None:
    """SentencePiece strips the first space of a text, which the output of a prompt is not."""
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    for place in range(1, len(ids)):
        prompt = tokenizer.decode(ids[:place])
        if not prompt.endswith(REPLACEMENT):
            assert prompt + continued(tokenizer, ids[:place], ids[place:]) == tokenizer.decode(ids), place


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_a_text_begins_behind_a_special_token(kind: str, skip: bool, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    prompt, output = tokenizer.encode("hello<|end|>"), tokenizer.encode("hello world")
    assert continued(tokenizer, prompt, output, skip_special_tokens=skip) == "hello world"
    assert continued(tokenizer, [*prompt, 700], output) == "hello world", "behind an id that no tokenizer knows, too"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_an_output_does_not_complete_a_character_of_its_prompt(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("a𝄞")
    assert continued(tokenizer, ids[:-1], ids[-1:]) == REPLACEMENT


@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings_are_looked_for_behind_the_prompt(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("hello world, hello you")
    place = next(place for place in range(len(ids)) if tokenizer.decode(ids[:place]) == "hello")
    assert continued(tokenizer, ids[:place], ids[place:], stop=("o w",)) == " world, hello you"
    assert continued(tokenizer, ids[:place], ids[place:], stop=("lo", " world")) == ""
    assert continued(tokenizer, ids[:place], ids[place:], stop=("lo",)) == " world, hel"


@pytest.mark.parametrize("kind", KINDS)
def test_work_per_token_does_not_grow_with_the_stream(kind: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[kind]
    decoded: list[int] = []
    detokenizer = tokenizer.detokenizer()
    if isinstance(detokenizer, WindowDetokenizer):
        whole = detokenizer._decode
        detokenizer._decode = lambda ids: decoded.append(len(ids)) or whole(ids)  # type: ignore[func-returns-value]
        for token_id in tokenizer.encode(" ".join(TEXT[:2] * 20)):
            detokenizer.feed([token_id])
        assert max(decoded) <= 8
    else:
        assert isinstance(detokenizer, ByteDetokenizer)
        for token_id in tokenizer.encode(" ".join(TEXT * 20)):
            detokenizer.feed([token_id])
            assert len(detokenizer._decoder.getstate()[0]) <= 3


# Tokens that stand for whole characters, for parts of some, for no valid byte, and for nothing.
ODD_TOKENS = (
    b"a", b"\xef\xbf\xbd", b"", b"\xc3", b"\xa9", b"\xff", b"\xf0", b"\x9f", b"\x99", b"\x82", b"\xef\xbf\xbd" * 2,
    b"b\xf0\x9f", b"\x99\x82", b"\xa9c",
)  # fmt: skip


def check_odd(ids: list[int]) -> None:
    """Streams `ids` one by one: the pieces are the whole text, and no decoding is long."""
    decoded: list[int] = []

    def decode(ids: list[int]) -> str:
        decoded.append(len(ids))
        return b"".join(ODD_TOKENS[id] for id in ids).decode(errors="replace")

    detokenizer = WindowDetokenizer(decode, range(len(ODD_TOKENS)), frozenset())
    pieces = [detokenizer.feed([token_id]) for token_id in ids]
    pieces.append(detokenizer.finish())
    assert max(decoded) <= 32
    assert sum(decoded) <= 100 * len(ids)
    assert "".join(pieces) == decode(ids)


@pytest.mark.parametrize("turns", [(1,), (10,), (1, 1, 0), (2,), (2, 1), (5,), (6, 7, 8), (3, 4, 1), (11, 12, 1, 1)])
def test_replacement_characters_cost_no_more_than_other_tokens(turns: tuple[int, ...]) -> None:
    """4,000 of them took 1.8 s: all were held back, and decoded again for each new one."""
    check_odd([turns[i % len(turns)] for i in range(4000)])


@settings(max_examples=300)
@given(st.lists(st.sampled_from(range(len(ODD_TOKENS))), min_size=1, max_size=60))
def test_odd_tokens_yield_the_text_of_all_of_them(ids: list[int]) -> None:
    check_odd(ids)


def test_an_added_token_stands_for_its_own_characters(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    tokenizer = tokenizers["byte_level"]
    text = "a<think>5 € b"
    assert "".join(stream(tokenizer, tokenizer.encode(text))) == text
