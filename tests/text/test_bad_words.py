from __future__ import annotations

from typing import Any

import pytest

from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.request import MAX_ALLOWED_TOKEN_IDS, SamplingParams
from jaxsgl.text.prompts import with_bad_word_ids
from jaxsgl.text.tokenizer import Tokenizer


def test_a_bad_word_is_what_an_output_begins_with_and_what_follows_a_space(tokenizer: Tokenizer) -> None:
    given = SamplingParams(bad_words=("hello", " world", "\n"), bad_word_ids=((7, 8),))
    first, second = with_bad_word_ids([given, given], tokenizer)
    texts = ("hello", " hello", "world", " world", "\n", " \n")
    assert first.bad_word_ids == ((7, 8), *(tuple(tokenizer.encode(text, False)) for text in texts))
    assert first is second and not first.bad_words, "tokenized once"
    assert with_bad_word_ids([SamplingParams()], tokenizer) == [SamplingParams()]


def test_many_prompts_with_many_allowed_tokens_are_refused(tokenizer: Tokenizer) -> None:
    many = SamplingParams(allowed_token_ids=(1,) * MAX_ALLOWED_TOKEN_IDS)
    with pytest.raises(InvalidRequest, match="send fewer prompts in a call"):
        with_bad_word_ids([many] * 5, tokenizer)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"bad_words": ("",)}, "the length of a bad word is 0"),
        ({"bad_words": ("x" * 257,)}, "the length of a bad word is 257"),
        ({"bad_words": ("x",) * 513}, "the number of bad_words is 513"),
        ({"bad_words": (5,)}, "a bad word is 5, but must be a text"),
        ({"bad_words": "hello"}, "bad_words is 'hello', but must be a list"),
        ({"allowed_token_ids": (1.5,)}, "must hold integers"),
        ({"allowed_token_ids": []}, "is an empty list; leave it out"),
        ({"allowed_token_ids": (True,)}, "must hold integers"),
        ({"bad_word_ids": ((),)}, "must be lists of one token id and more"),
        ({"bad_word_ids": ((1,) * 8193,)}, "the number of tokens of bad words is 8193"),
    ],
)
def test_limits_have_types_and_bounds(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        SamplingParams(**fields)
