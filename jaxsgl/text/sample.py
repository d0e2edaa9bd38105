"""One sample of a request: the engine's replies in, pieces of text and ids out, cut at stop strings.

Owns the sample's text so far and decides where a stop string ends it. Knows no protocol and no process: the
asynchronous front end (generation.py) and the offline `LLM` feed it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from jaxsgl.messages import Reply, TokenLogprob
from jaxsgl.request import FinishReason, Request
from jaxsgl.text.detokenizer import Detokenizer


class End(msgspec.Struct, frozen=True):
    """How a sample ended. `matched_stop` is the EOS or stop token, or the stop string, if that was why."""

    reason: FinishReason
    matched_stop: int | str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Piece(msgspec.Struct, frozen=True):
    """What is new of sample `index` since its last piece; its last one holds the end.

    Attributes:
      logprobs: of each of `token_ids`, if asked for.
      prompt_logprobs: of the prompt's tokens but the first, if asked for; in the first piece of sample 0.
      cached_tokens: prompt tokens that were found in the prefix cache.
    """

    text: str
    token_ids: list[int]
    end: End | None
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    cached_tokens: int = 0


class StopStrings:
    """Reads one text up to the first of `strings`.

    Attributes:
      matched: the stop string that was found; the text has ended with it.
    """

    def __init__(self, strings: Sequence[str], keep: bool) -> None:
        """`keep`: the stop string is part of the text that comes out."""
        self._strings = strings
        self._keep = keep
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Returns what can be said for certain to belong to the text. Nothing may be fed after a match."""
        if not self._strings:
            return text
        pending = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._strings if (start := pending.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)  # complete first; of several, the longest
            self._held = ""
            return pending[: end if self._keep else start]
        split = len(pending) - self._hold_len(pending)
        self._held = pending[split:]
        return pending[:split]

    def finish(self) -> str:
        """Returns what was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _hold_len(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = min(len(text), max(map(len, self._strings), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._strings):
                return length
        return 0


class Sample:
    """Turns replies into pieces. Nothing may be taken after the end."""

    def __init__(self, request: Request, index: int, detokenizer: Detokenizer) -> None:
        self._request = request
        self._sampling = request.sampling
        self._index = index
        self._detokenizer = detokenizer
        self._stops = StopStrings(self._sampling.stop, self._sampling.include_stop_str_in_output)
        self.num_tokens = 0
        self.ended = False

    def take(self, replies: Sequence[Reply]) -> Piece:
        """The piece that `replies` (at least one) make. A stop string ends it before their end."""
        texts: list[str] = []
        ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        scored: tuple[TokenLogprob, ...] | None = None
        end: End | None = None
        parts = [part for reply in replies for part in _token_by_token(reply)] if self._sampling.stop else replies
        for reply in parts:
            ids += reply.token_ids
            self.num_tokens += len(reply.token_ids)
            if reply.logprob is not None:
                logprobs.append(reply.logprob)
            if reply.prompt_logprobs is not None:
                scored = reply.prompt_logprobs
            texts.append(self._text_of(reply))
            end = self._end_with(reply)
            if end is not None:
                break
        self.ended = end is not None
        cached_tokens = replies[-1].cached_tokens
        return Piece("".join(texts), ids, end, self._index, tuple(logprobs), scored, cached_tokens)

    def _text_of(self, reply: Reply) -> str:
        """Text that comes out with `reply`; a stop token has none, unless the stop is to be left in."""
        visible = reply.token_ids
        if reply.finish_reason is FinishReason.STOP and not self._sampling.include_stop_str_in_output:
            visible = visible[:-1]
        text = self._detokenizer.feed(visible)
        if reply.finish_reason is not None:
            text += self._detokenizer.finish()
        if self.num_tokens <= self._sampling.min_tokens:
            return text  # no stop string is looked for
        text = self._stops.feed(text)
        if reply.finish_reason is not None:
            text += self._stops.finish()
        return text

    def _end_with(self, reply: Reply) -> End | None:
        matched: int | str | None = self._stops.matched
        reason = FinishReason.STOP if matched is not None else reply.finish_reason
        if reason is None:
            return None
        if matched is None and reason is FinishReason.STOP and reply.token_ids:
            matched = reply.token_ids[-1]
        return End(reason, matched, len(self._request.prompt_ids), reply.cached_tokens, self.num_tokens)


def _token_by_token(reply: Reply) -> list[Reply]:
    """`reply` in parts of one token, since a stop string ends the sample at the very token that completes it."""
    if len(reply.token_ids) <= 1:
        return [reply]
    *others, last = reply.token_ids
    before = [replace(reply, token_ids=(token_id,), finish_reason=None) for token_id in others]
    return [*before, replace(reply, token_ids=(last,))]


def join(pieces: Sequence[Piece]) -> Piece:
    """All pieces of one sample as one."""
    return Piece(
        text="".join(piece.text for piece in pieces),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        end=pieces[-1].end,
        index=pieces[-1].index,
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        prompt_logprobs=next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None), None),
        cached_tokens=pieces[-1].cached_tokens,
    )
