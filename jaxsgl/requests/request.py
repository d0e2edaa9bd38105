"""Requests: the tokenized request, why it ended, and `check_request`, which every front end calls.

Knows nothing about pages, batches or devices. Built by the front end (or `LLM`), read by the scheduler.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.media import MediaItem, MediaLimits, check_media
from jaxsgl.requests.outputs import Pooling, check_pooling, check_states
from jaxsgl.requests.sampling import Bounds, SamplingParams, check, check_bounds, check_integer

if TYPE_CHECKING:
    from jaxsgl.config.engine import Limits

MAX_OUTPUT_TOKENS = 1 << 22  # of all samples of a request
MAX_SCORES = 1 << 20  # log-probabilities in one answer, those of other likely tokens included: 120 MB
MAX_PROMPT_SCORES = 1 << 18  # of those, the prompt's, which come all at once: reading them takes 30 ms
MAX_CACHE_SALT_CHARS = 256
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1  # int32 in protocols
PRIORITY_BOUNDS = Bounds(MIN_PRIORITY, MAX_PRIORITY, f"{MIN_PRIORITY} to {MAX_PRIORITY}")


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"  # an EOS or stop token was sampled, or a stop string occurred in the text
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # the client left or aborted it


class Rendezvous(msgspec.Struct, frozen=True, array_like=True):
    """Where the two legs of a request meet, if prefill and decode run in different workers.

    Attributes:
      host, port: where the prefill worker listens for decode workers.
      number: of the room, the same for both legs.
    """

    host: str
    port: int
    number: int


class Request(msgspec.Struct, frozen=True, tag="generate"):
    """One tokenized request, as it travels from the front end to the scheduler.

    `priority` is ignored unless the server schedules by it: the higher number goes first, or the lower one if the
    server's flags say so. Cached prefixes are shared among requests of an equal `cache_salt` alone. With a `room` this
    is the leg of the request that this worker computes; without, all of it. `media` are its images and video frames in
    the order of their placeholder tokens. With `pooling` it ends with its prompt and yields no token. `adapter` is the
    name of the LoRA adapter to run with, empty for none. `kv_source` is the server that computes the prompt's KV, if it
    has not proved itself: requests with KV from elsewhere don't share it. Empty if it has, or if it is this server; the
    scheduler of a decode server sets it. Neither `speculative`, whether drafts of its tokens may be verified, nor
    `prediction_ids`, what its client expects as its output, changes a token of it. `rank` is the one that must serve it
    of an engine with data-parallel attention; None: any.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    room: Rendezvous | None = None
    media: tuple[MediaItem, ...] = ()
    pooling: Pooling | None = None
    adapter: str = ""
    kv_source: str = ""
    speculative: bool = True
    prediction_ids: list[int] = []
    rank: int | None = None

    @property
    def least_output(self) -> int:
        """Tokens that the context must hold beside the prompt."""
        return 1 if self.pooling is None else 0


def check_request(request: Request, limits: Limits) -> None:
    """Raises `InvalidRequest` if `request` can never be served within `limits`.

    An output that doesn't fit into the context is no error: `max_new_tokens` caps it.
    """
    check_integer("priority", request.priority)
    check_bounds("priority", request.priority, PRIORITY_BOUNDS)
    _check_cache_salt(request.cache_salt)
    prompt_len = len(request.prompt_ids)
    if prompt_len == 0:
        raise InvalidRequest("the prompt is empty: send at least one token")
    check_prompt_len(prompt_len, limits.context_length, request.least_output)
    if request.pooling is not None:
        check_pooling(request.pooling, limits.pooling, limits.vocab_size)
    elif not limits.generates:
        raise InvalidRequest(
            "the model served gives embeddings or scores only: it generates no tokens (start the server with "
            "--enable-embeddings for both, if the model can)"
        )
    check_token_ids("prompt", request.prompt_ids, limits.vocab_size)
    if request.media and request.room is None and limits.media is not None and limits.media.may_come_later:
        raise InvalidRequest(
            "a decode server has no vision tower, so it serves requests with images only behind a prefill server: send "
            "it through the gateway, or to a server without --disaggregation-mode decode"
        )
    if request.media or (limits.media is not None and not may_follow(request, limits.media)):
        check_media(request.media, request.prompt_ids, limits.media)
    if request.prediction_ids:
        _check_prediction(request, limits)
    check_token_ids("stop_token_ids", request.sampling.stop_token_ids, limits.vocab_size)
    check_token_ids("logit_bias", tuple(request.sampling.logit_bias), limits.vocab_size)
    check_token_ids("allowed_token_ids", request.sampling.allowed_token_ids, limits.vocab_size)
    for ids in request.sampling.bad_word_ids:
        check_token_ids("bad_word_ids", ids, limits.vocab_size)
    asked = request.sampling.max_tokens
    least = request.least_output
    needed = prompt_len + (min(asked, limits.context_length - prompt_len) if asked is not None and least else least)
    if needed > limits.pool_tokens:
        raise InvalidRequest(
            f"prompt and output need {needed} tokens of KV cache ({prompt_len} + {needed - prompt_len}), but the "
            f"whole pool holds {limits.pool_tokens}: shorten the prompt, lower max_tokens, or start the server "
            "with a larger --max-total-tokens"
        )
    check_num_scores([request], limits)
    if request.sampling.wants_states:
        check_states(request.sampling, prompt_len + max_new_tokens(request, limits), limits.states)
    num_tokens = request.sampling.n * max_new_tokens(request, limits)
    if num_tokens > MAX_OUTPUT_TOKENS:
        raise InvalidRequest(
            f"n={request.sampling.n} samples may have {num_tokens} tokens, but a request may have {MAX_OUTPUT_TOKENS}: "
            "lower n or max_tokens"
        )


def may_follow(request: Request, limits: MediaLimits | None) -> bool:
    """Whether the images of a request that brings none may come from the server of its other leg."""
    return request.room is not None and limits is not None and limits.may_come_later


def check_num_scores(requests: Sequence[Request], limits: Limits) -> None:
    """Raises `InvalidRequest` if the answer to `requests`, which one call brings, may hold too many log-probabilities.

    The answer is in memory as a whole.
    """
    of_prompts = [_num_scores(request.sampling.prompt_logprobs) * len(request.prompt_ids) for request in requests]
    if max(of_prompts) > MAX_PROMPT_SCORES:
        raise InvalidRequest(
            f"the prompt's log-probabilities are {max(of_prompts)}, but may be {MAX_PROMPT_SCORES}: ask for fewer "
            "likely tokens, or shorten the prompt"
        )
    total = sum(of_prompts)
    for request in requests:
        if request.sampling.logprobs is not None:
            per_token = request.sampling.n * _num_scores(request.sampling.logprobs)
            total += per_token * max_new_tokens(request, limits)
    if total > MAX_SCORES:
        raise InvalidRequest(
            f"the answer may hold {total} log-probabilities, but {MAX_SCORES} are the most: lower max_tokens, n or the "
            "number of likely tokens, or send fewer prompts at once"
        )


def _num_scores(num_likely: int | None) -> int:
    """Log-probabilities of each token, if `num_likely` others are wanted in its place."""
    return 0 if num_likely is None else 1 + num_likely


def _check_cache_salt(salt: object) -> None:
    if not isinstance(salt, str):
        raise InvalidRequest(f"cache_salt is {salt!r}, but must be a text")
    check(len(salt) <= MAX_CACHE_SALT_CHARS, "the length of cache_salt", len(salt), f"0 to {MAX_CACHE_SALT_CHARS}")


def _check_prediction(request: Request, limits: Limits) -> None:
    """Checks what the client expects. It may be longer than what is generated."""
    if not request.speculative:
        raise InvalidRequest("prediction speeds up speculation, but speculative is false: leave one of them out")
    num_tokens = len(request.prediction_ids)
    if num_tokens > limits.context_length:
        raise InvalidRequest(
            f"the prediction has {num_tokens} tokens, but the context holds {limits.context_length}: shorten it"
        )
    check_token_ids("prediction", request.prediction_ids, limits.vocab_size)


def check_prompt_len(prompt_len: int, context_length: int, least_output: int = 1) -> None:
    """Raises `InvalidRequest` unless `prompt_len` tokens leave room for `least_output` (0 or 1) in the context."""
    if not least_output and prompt_len > context_length:
        raise InvalidRequest(f"the prompt has {prompt_len} tokens, but the context holds {context_length}: shorten it")
    if least_output and prompt_len >= context_length:
        raise InvalidRequest(
            f"the prompt has {prompt_len} tokens, but the context holds {context_length} with room for at least one "
            f"new token: shorten the prompt to {context_length - 1} tokens"
        )


def max_new_tokens(request: Request, limits: Limits) -> int:
    """Tokens that `request` may generate: max_tokens, capped by the context.

    If it is not given, the pool and the size of an answer cap the output, too.
    """
    if request.pooling is not None:
        return 1  # in the scheduler's books; it is never computed
    sampling, prompt_len = request.sampling, len(request.prompt_ids)
    room = limits.context_length - prompt_len
    if sampling.max_tokens is not None:
        return min(sampling.max_tokens, room)
    most = min(room, limits.pool_tokens - prompt_len, MAX_OUTPUT_TOKENS // sampling.n)
    if sampling.logprobs is not None:
        left = MAX_SCORES - _num_scores(sampling.prompt_logprobs) * prompt_len
        most = min(most, max(left // (sampling.n * _num_scores(sampling.logprobs)), 1))
    return most


def check_token_ids(what: str, ids: list[int] | tuple[int, ...], vocab_size: int) -> None:
    """Raises `InvalidRequest` if an id is outside the vocabulary."""
    if not ids:
        return
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequest(f"{what} holds token id {bad}, but ids go from 0 to {vocab_size - 1}")
