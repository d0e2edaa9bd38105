"""Patterns that end an answer where its text matches: SGLang's stop_regex, in time linear in the text.

llguidance follows each pattern byte by byte as an automaton that it makes while it goes, so a client's pattern can't go
back and forth over the text. How large the automaton may get and how long a sample may take are bounded. sample.py
feeds the text; front ends compile patterns before, in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

from jaxsgl.errors import InvalidRequest

MAX_KNOWN = 256
CPU_S, CPU_S_PER_CHAR = 0.05, 2e-5  # that a sample's patterns may take: other requests wait meanwhile
MAX_REASON_CHARS = 200


class StopRegex:
    """Finds the first place in a text, which comes in pieces, where a match of one of `patterns` ends.

    The text ends there, with the match. Raises `InvalidRequest` for what is no pattern.

    Attributes:
      matched: the pattern that ended the text.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = patterns
        self._matchers = [compiled(pattern).deep_copy() for pattern in patterns]
        self._num_chars, self._seconds = 0, 0.0
        self.matched: str | None = None

    def feed(self, text: str, may_match: bool = True) -> str:
        """Returns `text` up to the end of a match. Nothing may be fed after one. Raises `InvalidRequest` at limits.

        `may_match`: whether a match may end in `text`. One that ends later may begin there in any case.
        """
        if not self._matchers or not text:
            return text
        start_s = time.thread_time()
        content = text.encode(errors="replace")
        end = len(content)
        for pattern, matcher in zip(self._patterns, self._matchers, strict=True):
            for place in range(end):
                if not matcher.consume_token(content[place]):
                    raise InvalidRequest(f"stop_regex {pattern!r} can't be followed any further: simplify it")
                if may_match and matcher.is_accepting():
                    if self.matched is None or place + 1 < end:
                        end, self.matched = place + 1, pattern
                    break
        self._num_chars += len(text)
        self._seconds += time.thread_time() - start_s
        if self._seconds > CPU_S + CPU_S_PER_CHAR * self._num_chars:
            raise InvalidRequest(
                f"stop_regex took {self._seconds:.2f} s for {self._num_chars} characters, for which others wait: "
                "simplify it"
            )
        return text if self.matched is None else content[:end].decode(errors="ignore")


def check_patterns(patterns: Sequence[str]) -> None:
    """Raises `InvalidRequest` for what is no pattern; takes a millisecond for each that isn't known yet."""
    for pattern in patterns:
        compiled(pattern)


@lru_cache(MAX_KNOWN)
def compiled(pattern: str) -> Any:
    """Returns the matcher of texts that end with `pattern`, at the beginning. Raises `InvalidRequest`."""
    from llguidance import LLMatcher

    tokenizer, limits = _bytes()
    for text in (pattern, f"(?s:.*)(?:{pattern})"):  # alone too: parentheses must close
        try:
            matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(text), log_level=0, limits=limits)
        except ValueError as error:
            raise InvalidRequest(f"stop_regex {pattern!r} can't be used: {str(error)[:MAX_REASON_CHARS]}") from None
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())[:MAX_REASON_CHARS]
            raise InvalidRequest(f"stop_regex {pattern!r} can't be used: {reason}")
    if matcher.is_accepting():
        raise InvalidRequest(f"stop_regex {pattern!r} matches the empty text, where any answer would end: change it")
    return matcher


@cache
def _bytes() -> tuple[Any, Any]:
    """The vocabulary of single bytes, and limits with which a byte takes milliseconds at most."""
    from llguidance import LLParserLimits, LLTokenizer

    limits = LLParserLimits(
        max_items_in_row=1_000,
        initial_lexer_fuel=100_000,
        step_lexer_fuel=4_000,
        step_max_items=1_000,
        max_lexer_states=5_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )
    return LLTokenizer("byte"), limits
