"""Bad words as sequences of tokens, of which the last may never follow the others: vLLM's rule.

A word is tokenized as an output begins with it and as it follows a space. Other spellings in tokens are not found.
Servers and `LLM` call it before requests are checked; never knows requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.sampling import MAX_ALLOWED_TOKEN_IDS, SamplingParams
from jaxsgl.text.tokenizer import Tokenizer

MAX_CALL_IDS = 4 * MAX_ALLOWED_TOKEN_IDS  # of all requests of a call, each of which carries its own


def with_bad_word_ids(samplings: Sequence[SamplingParams], tokenizer: Tokenizer) -> list[SamplingParams]:
    """Returns `samplings` with their bad words as tokens. Raises `InvalidRequest`.

    Equal ones in a row, as the prompts of a call have them, are tokenized once.
    """
    made: list[SamplingParams] = []
    for number, sampling in enumerate(samplings):
        same = number > 0 and sampling is samplings[number - 1]
        made.append(made[-1] if same else _with_ids(sampling, tokenizer))
    num_ids = sum(len(one.allowed_token_ids) + sum(map(len, one.bad_word_ids)) for one in made)
    if num_ids > MAX_CALL_IDS:
        raise InvalidRequest(
            f"allowed_token_ids and bad_words of all prompts have {num_ids} tokens, but {MAX_CALL_IDS} are the most: "
            "send fewer prompts in a call"
        )
    return made


def num_bad_chars(samplings: Sequence[SamplingParams]) -> int:
    """Characters that are to be tokenized at most."""
    return sum(len(word) for sampling in samplings for word in sampling.bad_words)


def _with_ids(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    if not sampling.bad_words:
        return sampling
    ids = dict.fromkeys(sampling.bad_word_ids)
    for word in sampling.bad_words:
        bare = word.lstrip() or word
        for text in (bare, f" {bare}"):
            ids[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return replace(sampling, bad_words=(), bad_word_ids=tuple(ids))
