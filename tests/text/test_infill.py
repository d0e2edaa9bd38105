"""Prompts that ask for what stands between two texts, in every family's spelling."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from jaxsgl.errors import InvalidRequest
from jaxsgl.text.infill import SPELLINGS, Spelling, end_ids, infill_ids
from jaxsgl.text.tokenizer import Tokenizer, Truncation, load_tokenizer
from tests.text.small_tokenizers import byte_fallback, byte_level, save

BEFORE, BEHIND = "def f(x):\n    return", "+ 1\n"


def with_tokens(folder: Path, spelling: Spelling) -> Tokenizer:
    """A tokenizer that knows the spelling and puts a start token before texts."""
    made = byte_fallback() if spelling.spaced else byte_level()
    names = (spelling.prefix, spelling.suffix, spelling.middle, *spelling.ends[:1])
    made.add_tokens([AddedToken(name, special=False, normalized=False) for name in names])
    made.post_processor = TemplateProcessing(
        single="<|start|> $A", pair="<|start|> $A $B", special_tokens=[("<|start|>", made.token_to_id("<|start|>"))]
    )
    return load_tokenizer(save(made, folder))


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda spelling: spelling.prefix)
def test_each_family_has_its_tokens_before_the_texts_and_at_the_end(spelling: Spelling, tmp_path: Path) -> None:
    tokenizer = with_tokens(tmp_path, spelling)
    start, prefix, suffix, middle = (
        tokenizer.id_of(name) for name in ("<|start|>", spelling.prefix, spelling.suffix, spelling.middle)
    )
    ids = infill_ids(tokenizer, BEFORE, BEHIND, True, None)
    assert suffix is not None
    gap = ids.index(suffix)
    assert ids[:2] == [start, prefix]
    assert ids[-1] == middle
    assert ids[2:gap] == tokenizer.encode(BEFORE, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids[gap + 1 : -1])).decode() == BEHIND, "no space is put before it"
    assert infill_ids(tokenizer, BEFORE, BEHIND, False, None) == ids[1:]
    assert infill_ids(tokenizer, "", BEHIND, True, None) == [*ids[:2], *ids[gap:]]
    assert end_ids(tokenizer) == [tokenizer.id_of(name) for name in spelling.ends[:1]]


def test_the_text_before_the_gap_is_cut_and_nothing_else(tmp_path: Path) -> None:
    tokenizer = with_tokens(tmp_path, SPELLINGS[0])
    ids = infill_ids(tokenizer, BEFORE, BEHIND, True, None)
    assert infill_ids(tokenizer, BEFORE, BEHIND, True, Truncation(len(ids) - 2)) == ids[:2] + ids[4:]
    assert infill_ids(tokenizer, BEFORE, BEHIND, True, Truncation(len(ids))) == ids
    with pytest.raises(InvalidRequest, match="can't be cut"):
        infill_ids(tokenizer, "", BEHIND, True, Truncation(2))


def test_a_tokenizer_without_the_tokens_is_named_in_the_refusal(tokenizer: Tokenizer) -> None:
    for refused in (tokenizer, Tokenizer(None)):
        with pytest.raises(InvalidRequest, match="tokenizer has no tokens to fill in the middle"):
            infill_ids(refused, BEFORE, BEHIND, True, None)
