"""`Request`: the tokenized request with its `SamplingParams`, every check of both, and why it ended.

`SamplingParams` check what can be known of themselves where they are made, by `BOUNDS`; `check_request`, which every
front end calls, checks a request against the limits of a server. All bounds are here, so that every front end refuses
the same values with the same message. Knows nothing about pages, batches or devices. Built by the front end (or `LLM`),
read by the scheduler.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterator, Sequence, Sized
from numbers import Real
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.grammar import Grammar
from jaxsgl.requests.media import MediaItem, MediaLimits, check_media
from jaxsgl.requests.outputs import MAX_STATE_NUMBERS, Pooling, StatesSpec, check_pooling

if TYPE_CHECKING:
    from jaxsgl.config.engine import Limits

MAX_SEED = 2**32 - 1
MAX_TOP_K = 2**31 - 1  # int32 on the device
MAX_MIN_TOKENS = 2**31 - 1  # int32 in protocols; more than any context holds
MAX_MAX_TOKENS = 2**63 - 1  # int64 between processes; capped by the context
MAX_STOP_TOKEN_IDS = 64
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 256
MAX_STOP_STRINGS_CHARS = 4096  # of all of them: so many places are looked at with each token
MAX_STOP_REGEXES = 16
MAX_STOP_REGEX_CHARS = 256
MAX_LOGIT_BIAS = 300  # entries
MAX_TOP_LOGPROBS = 20
MAX_LOGPROB_TOKEN_IDS = 32
MAX_SAMPLES = 128
MAX_ALLOWED_TOKEN_IDS = 1 << 18
MAX_BAD_WORDS = 512
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORD_IDS = 8192  # of all together


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
SWITCHES = (
    "include_stop_str_in_output", "skip_special_tokens", "ignore_eos", "return_hidden_states", "return_routed_experts",
)  # fmt: skip
MAX_TOKENS_BOUNDS = Bounds(1, MAX_MAX_TOKENS, f"1 to {MAX_MAX_TOKENS}", optional=True)  # protocols have their own
PLAIN = frozenset({int, float, bool, NoneType})  # types of numbers, and of none, as messages hold them
LOGIT_BIAS_BOUNDS = Bounds(-100.0, 100.0, "-100 to 100")  # of each entry


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
      allowed_token_ids: only these may be drawn, so EOS tokens only if they are among them; (): all.
      bad_words: texts that the output doesn't get to hold, by the tokens that they begin with and that they begin with
        behind a space: the last of these never follows the others (vLLM). Another spelling in tokens may come.
      bad_word_ids: sequences of tokens of which the last never follows the others, which `bad_words` become.
      max_tokens: the most tokens to generate; None: as many as the context holds.
      min_tokens: no EOS token, stop token or stop string can end the request before this many tokens.
      stop_token_ids: tokens that end the request when sampled. They are part of the returned ids, not of the text.
      stop: texts that end the request where they occur, however they are tokenized. The text before the first one is
        returned; the token that completes it is the last of the returned ids.
      stop_regex: patterns that end the request where its text so far matches one; the match stays in the text. Rust's
        regular expressions without lookaround, as those of grammars.
      include_stop_str_in_output: leave the stop string, or the text of the stop token, in the returned text.
      skip_special_tokens: leave special tokens out of the text; false: their names stand in it.
      ignore_eos: continue after the model's end-of-sequence tokens (for benchmarks).
      logprobs: return the log-probability of every output token and of the k most likely tokens in its place, from
        the model's own logits, before penalties and temperature. None: none; 0: of the output token alone.
      logprob_token_ids: with `logprobs`, return the log-probabilities of these tokens in the place of every output
        token, too, as those of a judge's "yes" and "no".
      prompt_logprobs: the same as `logprobs` for every prompt token but the first. The prompt is then computed again,
        since a prefix cache holds no logits.
      n: independent samples of one prompt, which is computed once. Sample i draws with seed + i.
      grammar: what the output must be; EOS and stop tokens can't be drawn before it is. The request also ends where
        the grammar can't go on, before min_tokens and with ignore_eos, too. None: the output is free.
      return_hidden_states, return_routed_experts: return what was computed for each token of prompt and output but the
        last; the prompt is then computed whole. Servers need flags for it (`requests/outputs.py`).
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    n: int = 1
    grammar: Grammar | None = None
    return_hidden_states: bool = False
    return_routed_experts: bool = False

    def __post_init__(self) -> None:
        """Checks types, too, since Python code may pass anything: a max_tokens of 2.5 would never be reached."""
        for name, value in (*_unset(self), *_foreign_numbers(self)):
            msgspec.structs.force_setattr(self, name, value)
        for name, bounds in BOUNDS.items():
            check_type = check_integer if name in INTEGERS else check_number
            check_type(name, getattr(self, name))
            check_bounds(name, getattr(self, name), bounds)
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} is {getattr(self, name)!r:.100}, but must be true or false")
        if not isinstance(self.grammar, Grammar | None):
            raise InvalidRequest(f"grammar is {self.grammar!r:.100}, but must be a jaxsgl.Grammar")
        self._check_lists()
        self._check_logprob_token_ids()
        self._check_logit_bias()
        self._check_end()

    def _check_lists(self) -> None:
        """Checks types and lengths, before anything looks at the entries."""
        if not isinstance(self.stop, tuple | list):
            raise InvalidRequest(f"stop is {self.stop!r:.100}, but must be a list of texts")
        if not isinstance(self.stop_token_ids, tuple | list):
            raise InvalidRequest(f"stop_token_ids is {self.stop_token_ids!r:.100}, but must be a list of token ids")
        if not isinstance(self.logit_bias, dict):
            raise InvalidRequest(f"logit_bias is {self.logit_bias!r:.100}, but must be a dict of numbers by token id")
        check_counts(self.stop_token_ids, self.stop, self.logit_bias)
        if (self.allowed_token_ids, self.bad_words, self.bad_word_ids) != ((), (), ()):
            self._check_limits()

    def _check_limits(self) -> None:
        """Checks which tokens are allowed, and bad words."""
        most_of = {
            "allowed_token_ids": MAX_ALLOWED_TOKEN_IDS,
            "bad_words": MAX_BAD_WORDS,
            "bad_word_ids": MAX_BAD_WORD_IDS,
        }
        for name, most in most_of.items():
            given = getattr(self, name)
            if not isinstance(given, tuple | list):
                raise InvalidRequest(f"{name} is {given!r:.100}, but must be a list")
            check(len(given) <= most, f"the number of {name}", len(given), f"0 to {most}")
        if isinstance(self.allowed_token_ids, list) and not self.allowed_token_ids:  # () is the default
            raise InvalidRequest("allowed_token_ids is an empty list; leave it out if all are allowed")
        for word in self.bad_words:
            if not isinstance(word, str):
                raise InvalidRequest(f"a bad word is {word!r:.100}, but must be a text")
            allowed = f"1 to {MAX_BAD_WORD_CHARS} characters"
            check(1 <= len(word) <= MAX_BAD_WORD_CHARS, "the length of a bad word", len(word), allowed)
        if not all(isinstance(ids, tuple | list) and ids for ids in self.bad_word_ids):
            raise InvalidRequest("bad_word_ids must be lists of one token id and more")
        num_ids = sum(map(len, self.bad_word_ids))
        check(num_ids <= MAX_BAD_WORD_IDS, "the number of tokens of bad words", num_ids, f"{MAX_BAD_WORD_IDS} at most")
        for ids in (self.allowed_token_ids, *self.bad_word_ids):
            if set(map(type, ids)) - {int}:
                raise InvalidRequest("allowed_token_ids and bad_word_ids must hold integers")

    def _check_logprob_token_ids(self) -> None:
        ids = self.logprob_token_ids
        if ids == ():
            return
        if not isinstance(ids, tuple | list) or set(map(type, ids)) - {int}:
            raise InvalidRequest(f"logprob_token_ids is {ids!r:.100}, but must be a list of token ids")
        allowed = f"0 to {MAX_LOGPROB_TOKEN_IDS}"
        check(len(ids) <= MAX_LOGPROB_TOKEN_IDS, "the number of logprob_token_ids", len(ids), allowed)
        if self.logprobs is None:
            raise InvalidRequest("logprob_token_ids are given, but logprobs is not: set it, to 0 for no likely tokens")

    def _check_logit_bias(self) -> None:
        for token_id, bias in self.logit_bias.items():
            check_integer("a token id of logit_bias", token_id, optional=False)
            check_number(f"the logit_bias of token {token_id}", bias)
            check_bounds(f"the logit_bias of token {token_id}", bias, LOGIT_BIAS_BOUNDS)

    def _check_end(self) -> None:
        """Checks what ends a request."""
        check_integer("max_tokens", self.max_tokens)
        check_bounds("max_tokens", self.max_tokens, MAX_TOKENS_BOUNDS)
        for stop_token_id in self.stop_token_ids:
            check_integer("a stop token id", stop_token_id, optional=False)
        if self.max_tokens is not None:
            check(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                self.min_tokens,
                f"max_tokens={self.max_tokens} at most",
            )
        if not isinstance(self.stop_regex, tuple | list) or not all(isinstance(text, str) for text in self.stop_regex):
            raise InvalidRequest(f"stop_regex is {self.stop_regex!r:.100}, but must be a list of texts")
        count = len(self.stop_regex)
        check(count <= MAX_STOP_REGEXES, "the number of patterns of stop_regex", count, f"0 to {MAX_STOP_REGEXES}")
        for pattern in self.stop_regex:
            allowed = f"1 to {MAX_STOP_REGEX_CHARS} characters"
            check(1 <= len(pattern) <= MAX_STOP_REGEX_CHARS, "the length of a stop_regex", len(pattern), allowed)
        for text in self.stop:
            if not isinstance(text, str):
                raise InvalidRequest(f"a stop string is {text!r}, but must be a text")
            allowed = f"1 to {MAX_STOP_STRING_CHARS} characters"
            check(1 <= len(text) <= MAX_STOP_STRING_CHARS, "the length of a stop string", len(text), allowed)
        num_chars = sum(map(len, self.stop))
        allowed = f"{MAX_STOP_STRINGS_CHARS} characters at most"
        check(num_chars <= MAX_STOP_STRINGS_CHARS, "the length of all stop strings", num_chars, allowed)

    @property
    def wants_states(self) -> bool:
        """Whether hidden states or experts of its tokens are wanted."""
        return self.return_hidden_states or self.return_routed_experts

    @property
    def edits_logits(self) -> bool:
        """Whether logits change before a token is chosen: penalties, bias, or stop tokens held back by min_tokens."""
        return self.penalizes or bool(self.logit_bias) or self.bans_stop_tokens

    @property
    def has_row(self) -> bool:
        """Whether the device must know more of it than its sampling arrays before a token is chosen."""
        return self.edits_logits or bool(self.logprob_token_ids)

    @property
    def num_scores(self) -> int:
        """Log-probabilities of each output token, those of others in its place included."""
        return 0 if self.logprobs is None else 1 + self.logprobs + len(self.logprob_token_ids)

    @property
    def penalizes(self) -> bool:
        """Whether logits change with each token of prompt and output."""
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def bans_stop_tokens(self) -> bool:
        """Whether stop tokens are held back by edits of the logits. Masks hold them back, too."""
        return self.min_tokens > 0 and not self.masked

    @property
    def masked(self) -> bool:
        """Whether masks say before each token which may be drawn: those of a grammar, or of tokens and bad words."""
        return self.grammar is not None or bool(self.allowed_token_ids or self.bad_word_ids)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken (temperature 0, or one candidate)."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def filtered(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


def _unset(params: SamplingParams) -> Iterator[tuple[str, Any]]:
    """(field, its value as a list) where `params` have None, as vLLM's by default, or a text in place of a list."""
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
        if getattr(params, name) is None:
            yield name, ()
    if params.logit_bias is None:
        yield "logit_bias", {}
    if isinstance(params.stop, str):
        yield "stop", (params.stop,)


def _foreign_numbers(params: SamplingParams) -> Iterator[tuple[str, Any]]:
    """(field, its value in Python's own numbers) where `params` have others, as NumPy's, which no message can hold."""
    for name in (*BOUNDS, "max_tokens"):
        value = getattr(params, name)
        if type(value) not in PLAIN:
            yield name, _plain(value)
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        ids = getattr(params, name)
        if isinstance(ids, tuple | list) and set(map(type, ids)) - PLAIN:
            yield name, tuple(map(_plain, ids))
    words = params.bad_word_ids
    lists = isinstance(words, tuple | list) and all(isinstance(word, tuple | list) for word in words)
    if lists and any(set(map(type, word)) - PLAIN for word in words):
        yield "bad_word_ids", tuple(tuple(map(_plain, word)) for word in words)
    bias = params.logit_bias
    if isinstance(bias, dict) and set(map(type, (*bias, *bias.values()))) - PLAIN:
        yield "logit_bias", {_plain(token_id): _plain(number) for token_id, number in bias.items()}


def _plain(value: Any) -> Any:
    """`value` as Python's integer or float, if it is a number; anything else as it is."""
    if type(value) in PLAIN:
        return value
    if getattr(getattr(value, "dtype", None), "kind", "") == "b":  # which older versions of NumPy take for an index
        return value
    try:
        return operator.index(value)
    except TypeError:
        return float(value) if isinstance(value, Real) else value


def check_counts(stop_token_ids: Sized, stop: Sized, logit_bias: Sized) -> None:
    """Raises `InvalidRequest` for lists of `SamplingParams` that are too long, before they are copied."""
    for name, given, most in (
        ("stop_token_ids", stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("stop strings", stop, MAX_STOP_STRINGS),
        ("logit_bias entries", logit_bias, MAX_LOGIT_BIAS),
    ):
        check(len(given) <= most, f"the number of {name}", len(given), f"0 to {most}")


def check_integer(name: str, value: object, optional: bool = True) -> None:
    """Raises `InvalidRequest` unless `value` is an integer, or None where it is optional; True and False are none."""
    if not (value is None and optional) and (not isinstance(value, int) or isinstance(value, bool)):
        raise InvalidRequest(f"{name} is {value!r:.100}, but must be an integer")


def check_number(name: str, value: object) -> None:
    """Raises `InvalidRequest` unless `value` is a real number; True and False are none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InvalidRequest(f"{name} is {value!r:.100}, but must be a number")


def check_bounds(name: str, value: float | None, bounds: Bounds) -> None:
    """Raises `InvalidRequest` unless `value` is within `bounds`."""
    check(bounds.hold(value), name, value, bounds.words)


def check(ok: bool, name: str, value: float | None, allowed: str) -> None:
    """Raises `InvalidRequest` with the value and what is `allowed`, unless `ok`."""
    if not ok:
        raise InvalidRequest(f"{name} is {value}, but must be {allowed}")


POOLING_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)  # it ends where it would sample
MAX_OUTPUT_TOKENS = 1 << 22  # of all samples of a request
TOO_LONG = "context_length_exceeded"  # OpenAI's code of a prompt that is too long
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
    of an engine with data-parallel attention; None: any. `refused` is why the front end has refused it, though it has a
    room: the engine tells the server of the other leg, and serves nothing.
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
    refused: str = ""

    @property
    def least_output(self) -> int:
        """Tokens that the context must hold besides the prompt."""
        return 1 if self.pooling is None else 0


def check_request(request: Request, limits: Limits) -> None:
    """Raises `InvalidRequest` if `request` can never be served within `limits`.

    An output that doesn't fit into the context is no error: `max_new_tokens` caps it.
    """
    check_integer("priority", request.priority)
    check_bounds("priority", request.priority, PRIORITY_BOUNDS)
    check_cache_salt(request.cache_salt)
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
    check_token_ids("logprob_token_ids", request.sampling.logprob_token_ids, limits.vocab_size)
    check_token_ids("logit_bias", tuple(request.sampling.logit_bias), limits.vocab_size)
    check_token_ids("allowed_token_ids", request.sampling.allowed_token_ids, limits.vocab_size)
    for ids in request.sampling.bad_word_ids:
        check_token_ids("bad_word_ids", ids, limits.vocab_size)
    asked = request.sampling.max_tokens
    least = request.least_output
    needed = prompt_len + (min(asked, limits.context_length - prompt_len) if asked is not None and least else least)
    if needed > limits.pool_tokens:
        raise too_long(
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


def check_states(sampling: SamplingParams, num_tokens: int, spec: StatesSpec | None) -> None:
    """Raises `InvalidRequest` for states of up to `num_tokens` tokens that a server with `spec` doesn't return."""
    asked, per_token = (sampling.return_hidden_states, sampling.return_routed_experts), 0
    for name, flag, wanted in zip(("hidden_states", "routed_experts"), ("hidden", "experts"), asked, strict=True):
        if wanted and not (spec is not None and getattr(spec, flag)):
            needs = "" if flag == "hidden" else ", and serve a model with a mixture of experts"
            raise InvalidRequest(
                f"return_{name} is true, but the server returns none: start it with "
                f"--enable-return-{name.replace('_', '-')}{needs}"
            )
        if wanted and spec is not None:
            per_token += spec.hidden_size if flag == "hidden" else spec.num_layers * spec.top_k
    if num_tokens * per_token > MAX_STATE_NUMBERS:
        raise InvalidRequest(
            f"the states of {num_tokens} tokens may be {num_tokens * per_token} numbers, but {MAX_STATE_NUMBERS} are "
            "the most: shorten the prompt or lower max_tokens"
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
            total += request.sampling.n * request.sampling.num_scores * max_new_tokens(request, limits)
    if total > MAX_SCORES:
        raise InvalidRequest(
            f"the answer may hold {total} log-probabilities, but {MAX_SCORES} are the most: lower max_tokens, n or the "
            "number of likely tokens, or send fewer prompts at once"
        )


def _num_scores(num_likely: int | None) -> int:
    """Log-probabilities of each token, if `num_likely` others are wanted in its place."""
    return 0 if num_likely is None else 1 + num_likely


def check_cache_salt(salt: object) -> None:
    """Raises `InvalidRequest` for a salt that is too long, or is no text."""
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


def too_long(words: str) -> InvalidRequest:
    """Returns the error about a prompt that is too long. Clients that shorten it by themselves look for its code."""
    error = InvalidRequest(words)
    error.code = TOO_LONG
    return error


def check_prompt_len(prompt_len: int, context_length: int, least_output: int) -> None:
    """Raises `InvalidRequest` unless `prompt_len` tokens leave room for `least_output` (0 or 1) in the context."""
    if not least_output and prompt_len > context_length:
        raise too_long(
            f"the prompt has {prompt_len} tokens, but this model's maximum context length is {context_length} tokens: "
            "shorten it"
        )
    if least_output and prompt_len >= context_length:
        raise too_long(
            f"the prompt has {prompt_len} tokens, but this model's maximum context length is {context_length} tokens, "
            f"at least one of them new: shorten the prompt to {context_length - 1} tokens"
        )


def room_of_prompt(truncate_prompt_tokens: int, limits: Limits) -> int:
    """Returns how many tokens of a prompt context and pool hold. Raises `InvalidRequest` if more are to be kept."""
    room = min(limits.context_length, limits.pool_tokens)
    check_integer("truncate_prompt_tokens", truncate_prompt_tokens, optional=False)
    if truncate_prompt_tokens != -1 and not 1 <= truncate_prompt_tokens <= room:
        raise InvalidRequest(f"truncate_prompt_tokens is {truncate_prompt_tokens}, but must be -1, or 1 to {room}")
    return room


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
        most = min(most, max(left // (sampling.n * sampling.num_scores), 1))
    return most


def check_token_ids(what: str, ids: list[int] | tuple[int, ...], vocab_size: int) -> None:
    """Raises `InvalidRequest` if an id is outside the vocabulary."""
    if not ids:
        return
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequest(f"{what} holds token id {bad}, but ids go from 0 to {vocab_size - 1}")
