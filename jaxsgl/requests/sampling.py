"""`SamplingParams`: how to choose the next tokens and when to stop, with the bounds of all its values.

All bounds are here, so that every front end refuses the same values with the same message; the checks of numbers at the
end are those of all that a request holds.
"""

from __future__ import annotations

from collections.abc import Sized
from numbers import Real
from typing import NamedTuple

import msgspec

from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.grammar import Grammar

MAX_SEED = 2**32 - 1
MAX_TOP_K = 2**31 - 1  # int32 on the device
MAX_MIN_TOKENS = 2**31 - 1  # int32 in protocols; more than any context holds
MAX_MAX_TOKENS = 2**63 - 1  # int64 between processes; capped by the context
MAX_STOP_TOKEN_IDS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_REGEXES = 16
MAX_STOP_REGEX_CHARS = 256
MAX_LOGIT_BIAS = 300  # entries
MAX_TOP_LOGPROBS = 20
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
MAX_TOKENS_BOUNDS = Bounds(1, MAX_MAX_TOKENS, f"1 to {MAX_MAX_TOKENS}", optional=True)  # protocols have their own
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
      prompt_logprobs: the same for every prompt token but the first. The prompt is then computed again, since a
        prefix cache holds no logits.
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
    prompt_logprobs: int | None = None
    n: int = 1
    grammar: Grammar | None = None
    return_hidden_states: bool = False
    return_routed_experts: bool = False

    def __post_init__(self) -> None:
        """Checks types, too, since Python code may pass anything: a max_tokens of 2.5 would never be reached."""
        for name, bounds in BOUNDS.items():
            check_type = check_integer if name in INTEGERS else check_number
            check_type(name, getattr(self, name))
            check_bounds(name, getattr(self, name), bounds)
        for name in ("return_hidden_states", "return_routed_experts"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} is {getattr(self, name)!r:.100}, but must be true or false")
        if not isinstance(self.grammar, Grammar | None):
            raise InvalidRequest(f"grammar is {self.grammar!r:.100}, but must be a jaxsgl.Grammar")
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

    @property
    def wants_states(self) -> bool:
        """Whether hidden states or experts of its tokens are wanted."""
        return self.return_hidden_states or self.return_routed_experts

    @property
    def edits_logits(self) -> bool:
        """Whether logits change before a token is chosen: penalties, bias, or stop tokens held back by min_tokens."""
        return self.penalizes or bool(self.logit_bias) or self.bans_stop_tokens

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
