"""OpenAI's best_of: more samples of each prompt are generated than the answer has, which are the likeliest of them.

Knows pieces of samples that have ended. completions.py uses it for whole answers; a stream can't take text back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.http.openai.schemas import CompletionRequest
from jaxsgl.text.sample import Piece


def num_samples_of(body: CompletionRequest) -> int:
    """Returns how many samples of each prompt are generated. Raises `InvalidRequest`."""
    n = body.n or 1
    if body.best_of is None:
        return n
    if body.best_of < n:
        raise InvalidRequest(f"best_of is {body.best_of}, but n={n} of so many samples can't be returned: raise it")
    if body.stream and body.best_of > n:
        raise InvalidRequest(
            f"best_of is {body.best_of} and n={n}, but which samples are the best shows when all have ended: leave "
            "stream out, or best_of"
        )
    return n if body.max_tokens == 0 else body.best_of  # nothing is generated then


def likeliest(samples: Sequence[Piece], num_samples: int, n: int) -> tuple[list[Piece], int]:
    """Returns `n` of each prompt's `num_samples` samples, the likeliest first, and the tokens of all the others.

    The likeliest has the highest mean log-probability of its tokens, as OpenAI has it; of equal ones the first. What
    sample 0 says about the prompt stands in the first of each prompt then. All samples must have log-probabilities,
    unless all are returned.
    """
    if n == num_samples:
        return list(samples), 0
    chosen: list[Piece] = []
    num_dropped = 0
    for start in range(0, len(samples), num_samples):
        of_prompt = samples[start : start + num_samples]
        best, *others = sorted(of_prompt, key=_mean_logprob, reverse=True)
        num_dropped += sum(len(piece.token_ids) for piece in others[n - 1 :])
        first = of_prompt[0]
        end = best.end and first.end and replace(best.end, cached_tokens=first.end.cached_tokens)
        chosen += [replace(best, prompt_logprobs=first.prompt_logprobs, end=end), *others[: n - 1]]
    return chosen, num_dropped


def _mean_logprob(piece: Piece) -> float:
    """Returns minus infinity for a sample that was aborted before its first token."""
    if not piece.logprobs:
        return -math.inf
    return sum(of_token.logprob for of_token in piece.logprobs) / len(piece.logprobs)
