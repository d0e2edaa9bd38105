"""What a client asks for: sampling parameters, the tokenized request, and how it can end.

Knows nothing about pages, batches or devices. Built by the front end (or `LLM`), read by the scheduler.
All checks of a request's values live here, so that every front end refuses the same things in the same words.
"""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING

import msgspec

from jaxsgl.errors import InvalidRequest

if TYPE_CHECKING:
    from jaxsgl.config import Limits

MAX_SEED = 2**32 - 1
MAX_TOP_K = 2**31 - 1  # int32 on the device
MAX_STOP_TOKEN_IDS = 64


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"  # an EOS or stop token was sampled
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # the client gave up


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose the next tokens and when to stop. Out-of-range values raise `InvalidRequest`.

    Attributes:
      temperature: 0 is greedy; otherwise logits are divided by it.
      top_k: keep the k most likely tokens; -1 (or 0) keeps all.
      top_p: keep the smallest set of most likely tokens whose probability reaches top_p (nucleus sampling,
        Holtzman et al. 2020).
      min_p: keep tokens at least min_p times as likely as the most likely one (Nguyen et al. 2024).
      seed: makes sampling reproducible: a token depends on (seed, its position) alone, not on its neighbours.
      max_tokens: tokens to generate at most; None: as many as the context holds.
      stop_token_ids: sampled, they end the request; they are part of the returned ids, not of the text.
      ignore_eos: go on after the model's end-of-sequence tokens (benchmarks).
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("top_k", "seed", "max_tokens"):
            _check_integer(name, getattr(self, name))
        for stop_token_id in self.stop_token_ids:
            _check_integer("a stop token id", stop_token_id)
        _check(0.0 <= self.temperature <= 1e4, "temperature", self.temperature, "0 (greedy) to 10000")
        _check(-1 <= self.top_k <= MAX_TOP_K, "top_k", self.top_k, f"-1 (all), or 1 to {MAX_TOP_K}")
        _check(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0, up to 1")
        _check(0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "0 to 1")
        _check(self.seed is None or 0 <= self.seed <= MAX_SEED, "seed", self.seed, f"0 to {MAX_SEED}")
        _check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 and more")
        _check(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "the number of stop_token_ids",
            len(self.stop_token_ids),
            f"0 to {MAX_STOP_TOKEN_IDS}",
        )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken (temperature 0, or one candidate)."""
        return self.temperature == 0.0 or self.top_k == 1


class Request(msgspec.Struct, frozen=True, tag="generate"):
    """One tokenized request, as it travels from the front end to the scheduler."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams


def check_request(request: Request, limits: Limits) -> None:
    """Raises `InvalidRequest` if `request` can never be served within `limits`.

    An output that doesn't fit into the context is no error: `max_new_tokens` caps it.
    """
    prompt_len = len(request.prompt_ids)
    if prompt_len == 0:
        raise InvalidRequest("the prompt is empty: send at least one token")
    if prompt_len >= limits.context_length:
        raise InvalidRequest(
            f"the prompt has {prompt_len} tokens, but the context holds {limits.context_length} with room for at "
            f"least one new token: shorten the prompt to {limits.context_length - 1} tokens"
        )
    check_token_ids("prompt", request.prompt_ids, limits.vocab_size)
    check_token_ids("stop_token_ids", request.sampling.stop_token_ids, limits.vocab_size)
    asked = request.sampling.max_tokens
    needed = prompt_len + (min(asked, limits.context_length - prompt_len) if asked is not None else 1)
    if needed > limits.pool_tokens:
        raise InvalidRequest(
            f"prompt and output need {needed} tokens of KV cache ({prompt_len} + {needed - prompt_len}), but the "
            f"whole pool holds {limits.pool_tokens}: shorten the prompt, lower max_tokens, or start the server "
            "with a larger --max-total-tokens"
        )


def max_new_tokens(request: Request, limits: Limits) -> int:
    """Tokens that `request` may generate: max_tokens, capped by the context and (if not given) by the pool."""
    prompt_len = len(request.prompt_ids)
    room = limits.context_length - prompt_len
    if request.sampling.max_tokens is not None:
        return min(request.sampling.max_tokens, room)
    return min(room, limits.pool_tokens - prompt_len)


def check_token_ids(what: str, ids: list[int] | tuple[int, ...], vocab_size: int) -> None:
    """Raises `InvalidRequest` if an id is outside the vocabulary."""
    if not ids:
        return
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequest(f"{what} holds token id {bad}, but ids go from 0 to {vocab_size - 1}")


def _check_integer(name: str, value: object) -> None:
    """Structs don't check types when Python code makes them; a max_tokens of 2.5 would never be reached."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise InvalidRequest(f"{name} is {value!r}, but must be an integer")


def _check(ok: bool, name: str, value: float | None, allowed: str) -> None:
    if not ok or (isinstance(value, float) and math.isnan(value)):
        raise InvalidRequest(f"{name} is {value}, but must be {allowed}")
