"""Requests: sampling parameters, the tokenized request, why it ended, and the checks of all their values.

Knows nothing about pages, batches or devices. Built by the front end (or `LLM`), read by the scheduler.
All bounds and checks are here, so that every front end refuses the same values with the same message.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence, Sized
from numbers import Real
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from jaxsgl.errors import InvalidRequest
from jaxsgl.media import MediaItem, check_media

if TYPE_CHECKING:
    from jaxsgl.config import Limits

MAX_SEED = 2**32 - 1
MAX_TOP_K = 2**31 - 1  # int32 on the device
MAX_MIN_TOKENS = 2**31 - 1  # int32 in protocols; more than any context holds
MAX_MAX_TOKENS = 2**63 - 1  # int64 between processes; capped by the context
MAX_STOP_TOKEN_IDS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_LOGIT_BIAS = 300  # entries
MAX_TOP_LOGPROBS = 20
MAX_SAMPLES = 128
MAX_OUTPUT_TOKENS = 1 << 22  # of all samples of a request
MAX_SCORES = 1 << 20  # log-probabilities in one answer, those of other likely tokens included: 120 MB
MAX_PROMPT_SCORES = 1 << 18  # of those, the prompt's, which come all at once: reading them takes 30 ms
MAX_CACHE_SALT_CHARS = 256
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1  # int32 in protocols


class Bounds(NamedTuple):
    """The values that a number may have: `low` to `high`, without `low` itself if `above_low`.

    `words` say so in errors; an `optional` number may be None.
    """

    low: float
    high: float
    words: str
    above_low: bool = False
    optional: bool = False

    def hold(self, value: float | None) -> bool:
        """Returns whether `value` is inside; NaN never is."""
        if value is None:
            return self.optional
        return (self.low < value if self.above_low else self.low <= value) and value <= self.high


# By field of `SamplingParams`, which checks them; the schemas of the HTTP APIs take their limits from here, too.
BOUNDS = {
    "temperature": Bounds(0.0, 1e4, "0 (greedy) to 10000"),
    "top_k": Bounds(-1, MAX_TOP_K, f"-1 (all), or 1 to {MAX_TOP_K}"),
    "top_p": Bounds(0.0, 1.0, "above 0, up to 1", above_low=True),
    "min_p": Bounds(0.0, 1.0, "0 to 1"),
    "seed": Bounds(0, MAX_SEED, f"0 to {MAX_SEED}", optional=True),
    "frequency_penalty": Bounds(-2.0, 2.0, "-2 to 2"),
    "presence_penalty": Bounds(-2.0, 2.0, "-2 to 2"),
    "repetition_penalty": Bounds(0.0, 2.0, "above 0, up to 2", above_low=True),
    "min_tokens": Bounds(0, MAX_MIN_TOKENS, f"0 to {MAX_MIN_TOKENS}"),
    "logprobs": Bounds(0, MAX_TOP_LOGPROBS, f"0 to {MAX_TOP_LOGPROBS}", optional=True),
    "prompt_logprobs": Bounds(0, MAX_TOP_LOGPROBS, f"0 to {MAX_TOP_LOGPROBS}", optional=True),
    "n": Bounds(1, MAX_SAMPLES, f"1 to {MAX_SAMPLES}"),
}
INTEGERS = frozenset({"top_k", "seed", "min_tokens", "logprobs", "prompt_logprobs", "n"})  # of `BOUNDS`
MAX_TOKENS_BOUNDS = Bounds(1, MAX_MAX_TOKENS, f"1 to {MAX_MAX_TOKENS}", optional=True)  # protocols have their own
LOGIT_BIAS_BOUNDS = Bounds(-100.0, 100.0, "-100 to 100")  # of each entry
PRIORITY_BOUNDS = Bounds(MIN_PRIORITY, MAX_PRIORITY, f"{MIN_PRIORITY} to {MAX_PRIORITY}")


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"  # an EOS or stop token was sampled, or a stop string occurred in the text
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # the client left or aborted it


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose the next tokens and when to stop. Values outside `BOUNDS` raise `InvalidRequest`.

    Attributes:
      temperature: 0 is greedy; otherwise logits are divided by it.
      top_k: keep the k most likely tokens; -1 (or 0) keeps all.
      top_p: keep the smallest set of most likely tokens whose probability reaches top_p (nucleus sampling,
        Holtzman et al. 2020).
      min_p: keep tokens at least min_p times as likely as the most likely one (Nguyen et al. 2024).
      seed: makes sampling reproducible: a token depends on (seed, its position) alone, not on its neighbours.
      frequency_penalty: subtracted from a token's logit for each time it occurs in the output (OpenAI).
      presence_penalty: subtracted once if it occurs in the output at all (OpenAI).
      repetition_penalty: divides the positive and multiplies the negative logits of tokens in prompt and output
        (CTRL, Keskar et al. 2019; as in Hugging Face); 1 changes nothing.
      logit_bias: token id -> number added to its logit, after penalties and before temperature.
      max_tokens: the most tokens to generate; None: as many as the context holds.
      min_tokens: no EOS token, stop token or stop string can end the request before this many tokens.
      stop_token_ids: tokens that end the request when sampled. They are part of the returned ids, not of the text.
      stop: texts that end the request where they occur, however they are tokenized. The text before the first one is
        returned; the token that completes it is the last of the returned ids.
      include_stop_str_in_output: leave the stop string, or the text of the stop token, in the returned text.
      ignore_eos: continue after the model's end-of-sequence tokens (for benchmarks).
      logprobs: return the log-probability of every output token and of the k most likely tokens in its place, from
        the model's own logits, before penalties and temperature. None: none; 0: of the output token alone.
      prompt_logprobs: the same for every prompt token but the first. The prompt is then computed again, since a
        prefix cache holds no logits.
      n: independent samples of one prompt, which is computed once. Sample i draws with seed + i.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        """Checks types, too, since Python code may pass anything: a max_tokens of 2.5 would never be reached."""
        for name, bounds in BOUNDS.items():
            check_type = _check_integer if name in INTEGERS else _check_number
            check_type(name, getattr(self, name))
            _check_bounds(name, getattr(self, name), bounds)
        self._check_lists()
        self._check_logit_bias()
        self._check_end()

    def _check_lists(self) -> None:
        """Checks types and lengths, before anything looks at the entries."""
        if isinstance(self.stop, str):
            raise InvalidRequest(f"stop is the text {self.stop!r}, but must be a list of texts: write [{self.stop!r}]")
        if not isinstance(self.stop, tuple | list):
            raise InvalidRequest(f"stop is {self.stop!r:.100}, but must be a list of texts")
        if not isinstance(self.stop_token_ids, tuple | list):
            raise InvalidRequest(f"stop_token_ids is {self.stop_token_ids!r:.100}, but must be a list of token ids")
        if not isinstance(self.logit_bias, dict):
            raise InvalidRequest(f"logit_bias is {self.logit_bias!r:.100}, but must be a dict of numbers by token id")
        check_counts(self.stop_token_ids, self.stop, self.logit_bias)

    def _check_logit_bias(self) -> None:
        for token_id, bias in self.logit_bias.items():
            _check_integer("a token id of logit_bias", token_id, optional=False)
            _check_number(f"the logit_bias of token {token_id}", bias)
            _check_bounds(f"the logit_bias of token {token_id}", bias, LOGIT_BIAS_BOUNDS)

    def _check_end(self) -> None:
        """Checks what ends a request."""
        _check_integer("max_tokens", self.max_tokens)
        _check_bounds("max_tokens", self.max_tokens, MAX_TOKENS_BOUNDS)
        for stop_token_id in self.stop_token_ids:
            _check_integer("a stop token id", stop_token_id, optional=False)
        if self.max_tokens is not None:
            _check(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                self.min_tokens,
                f"max_tokens={self.max_tokens} at most",
            )
        for text in self.stop:
            if not isinstance(text, str):
                raise InvalidRequest(f"a stop string is {text!r}, but must be a text")
            allowed = f"1 to {MAX_STOP_STRING_CHARS} characters"
            _check(1 <= len(text) <= MAX_STOP_STRING_CHARS, "the length of a stop string", len(text), allowed)

    @property
    def edits_logits(self) -> bool:
        """Whether logits change before a token is chosen: penalties, bias, or stop tokens held back by min_tokens."""
        penalties = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0) or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken (temperature 0, or one candidate)."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def filtered(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


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
    the order of their placeholder tokens.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    room: Rendezvous | None = None
    media: tuple[MediaItem, ...] = ()


def check_counts(stop_token_ids: Sized, stop: Sized, logit_bias: Sized) -> None:
    """Raises `InvalidRequest` for lists of `SamplingParams` that are too long, before they are copied."""
    for name, given, most in (
        ("stop_token_ids", stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("stop strings", stop, MAX_STOP_STRINGS),
        ("logit_bias entries", logit_bias, MAX_LOGIT_BIAS),
    ):
        _check(len(given) <= most, f"the number of {name}", len(given), f"0 to {most}")


def check_request(request: Request, limits: Limits) -> None:
    """Raises `InvalidRequest` if `request` can never be served within `limits`.

    An output that doesn't fit into the context is no error: `max_new_tokens` caps it.
    """
    _check_integer("priority", request.priority)
    _check_bounds("priority", request.priority, PRIORITY_BOUNDS)
    _check_cache_salt(request.cache_salt)
    prompt_len = len(request.prompt_ids)
    if prompt_len == 0:
        raise InvalidRequest("the prompt is empty: send at least one token")
    check_prompt_len(prompt_len, limits.context_length)
    check_token_ids("prompt", request.prompt_ids, limits.vocab_size)
    check_media(request.media, request.prompt_ids, limits.media)
    check_token_ids("stop_token_ids", request.sampling.stop_token_ids, limits.vocab_size)
    check_token_ids("logit_bias", tuple(request.sampling.logit_bias), limits.vocab_size)
    asked = request.sampling.max_tokens
    needed = prompt_len + (min(asked, limits.context_length - prompt_len) if asked is not None else 1)
    if needed > limits.pool_tokens:
        raise InvalidRequest(
            f"prompt and output need {needed} tokens of KV cache ({prompt_len} + {needed - prompt_len}), but the "
            f"whole pool holds {limits.pool_tokens}: shorten the prompt, lower max_tokens, or start the server "
            "with a larger --max-total-tokens"
        )
    check_num_scores([request], limits)
    num_tokens = request.sampling.n * max_new_tokens(request, limits)
    if num_tokens > MAX_OUTPUT_TOKENS:
        raise InvalidRequest(
            f"n={request.sampling.n} samples may have {num_tokens} tokens, but a request may have {MAX_OUTPUT_TOKENS}: "
            "lower n or max_tokens"
        )


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
    _check(len(salt) <= MAX_CACHE_SALT_CHARS, "the length of cache_salt", len(salt), f"0 to {MAX_CACHE_SALT_CHARS}")


def check_prompt_len(prompt_len: int, context_length: int) -> None:
    """Raises `InvalidRequest` unless `prompt_len` tokens leave room for a new one in a context of `context_length`."""
    if prompt_len >= context_length:
        raise InvalidRequest(
            f"the prompt has {prompt_len} tokens, but the context holds {context_length} with room for at least one "
            f"new token: shorten the prompt to {context_length - 1} tokens"
        )


def max_new_tokens(request: Request, limits: Limits) -> int:
    """Tokens that `request` may generate: max_tokens, capped by the context.

    If it is not given, the pool and the size of an answer cap the output, too.
    """
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


def _check_integer(name: str, value: object, optional: bool = True) -> None:
    if not (value is None and optional) and (not isinstance(value, int) or isinstance(value, bool)):
        raise InvalidRequest(f"{name} is {value!r:.100}, but must be an integer")


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InvalidRequest(f"{name} is {value!r:.100}, but must be a number")


def _check_bounds(name: str, value: float | None, bounds: Bounds) -> None:
    _check(bounds.hold(value), name, value, bounds.words)


def _check(ok: bool, name: str, value: float | None, allowed: str) -> None:
    if not ok:
        raise InvalidRequest(f"{name} is {value}, but must be {allowed}")
