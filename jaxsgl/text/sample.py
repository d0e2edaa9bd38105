"""One sample of a request: the engine's replies in, pieces of text and ids out, cut at stop strings.

`StopStrings` holds back text that may be the beginning of a stop string and lets all other text through at once; a
match of stop_regex (stop_regex.py) ends the text before it gets there. `Sample` owns what is held back of one sample,
and decides where its text ends; `Speculated` adds up what became of its drafts. Never knows a protocol or a process:
servers (generation.py) and the offline `LLM` feed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from jaxsgl.config.engine import DEFAULT_WEIGHT_VERSION
from jaxsgl.messages.replies import Reply, Run, TokenLogprob
from jaxsgl.requests.outputs import TokenStates
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.text.detokenizer import Detokenizer
from jaxsgl.text.stop_regex import StopRegex
from jaxsgl.text.tokenizer import Tokenizer


@dataclass
class Speculated:
    """Steps that verified drafts of one sample; those in which it had none are not counted.

    Attributes:
      histogram: such steps by how many of their drafts are in the output.
      draft_tokens: drafts of them.
      accepted_prediction_tokens, rejected_prediction_tokens: drafts that the request's prediction gave, by whether they
        are in the output.
    """

    histogram: list[int] = field(default_factory=list)
    draft_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    def add(self, run: Run, num_tokens: int) -> None:
        """Counts the drafts of a step, from whose first token on the output has `num_tokens`."""
        kept = min(run.kept, num_tokens)
        self.histogram += [0] * (kept + 1 - len(self.histogram))
        self.histogram[kept] += 1
        self.draft_tokens += run.drafted
        if run.of_prediction:
            self.accepted_prediction_tokens += kept
            self.rejected_prediction_tokens += run.drafted - kept

    @property
    def num_steps(self) -> int:
        """Steps that verified drafts."""
        return sum(self.histogram)

    @property
    def accepted_tokens(self) -> int:
        """Drafts in the output."""
        return sum(kept * steps for kept, steps in enumerate(self.histogram))

    @property
    def accept_length(self) -> float:
        """Tokens of such a step on average: the drafts that it kept, and the one that it sampled; 0 without a step."""
        return 1 + self.accepted_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def accept_rate(self) -> float:
        """Share of the drafts that is in the output."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0


class End(msgspec.Struct, frozen=True):
    """How a sample ended.

    `matched_stop` is the EOS token, stop token or stop string that ended it, if one did. `speculated` is what became of
    its drafts.
    """

    reason: FinishReason
    matched_stop: int | str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    speculated: Speculated = msgspec.field(default_factory=Speculated)

    def stop_reason(self, sampling: SamplingParams) -> int | str | None:
        """Which of the request's own stops ended it, as in vLLM; None at the model's EOS tokens and other ends."""
        matched = self.matched_stop
        return matched if isinstance(matched, str) or matched in sampling.stop_token_ids else None


class Piece(msgspec.Struct, frozen=True):
    """The text and ids of sample `index` since its previous piece; its last piece holds the end.

    Attributes:
      logprobs: of each of `token_ids`, if asked for.
      prompt_logprobs: of the prompt's tokens except the first, if asked for; in the first piece of sample 0.
      cached_tokens: prompt tokens that were found in the prefix cache.
      weight_version: of the weights that computed the last of `token_ids`.
      states: of the tokens since the piece before, if asked for.
    """

    text: str
    token_ids: list[int]
    end: End | None
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    cached_tokens: int = 0
    weight_version: str = DEFAULT_WEIGHT_VERSION
    states: tuple[TokenStates, ...] = ()

    @property
    def num_scores(self) -> int:
        """Log-probabilities that it holds, those of other likely tokens included, and numbers of states."""
        each = (self.logprobs, self.prompt_logprobs or ())
        of_states = sum(len(part.hidden) + len(part.experts) for part in self.states) // 4
        return of_states + sum(len(scored) * scored[0].num_scores for scored in each if scored)


class StopStrings:
    """Finds the first of `strings` in a text that comes in pieces, however it is cut.

    The first stop string to be complete ends the text, as if the text were read character by character.

    Attributes:
      matched: the stop string that was found and ended the text.
    """

    def __init__(self, strings: Sequence[str], keep: bool) -> None:
        """`keep` leaves the stop string in the text that comes out."""
        self._strings = strings
        self._keep = keep
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, may_match: bool = True) -> str:
        """Returns the text that certainly comes before any stop string. Nothing may be fed after a match.

        `may_match`: whether a stop string may end in `text`. One that ends later may begin there in any case.
        """
        if not self._strings:
            return text
        pending = self._held + text
        if may_match and (found := self._found(pending, len(self._held))):
            end, start, self.matched = min(found)  # complete first; of several, the longest
            self._held = ""
            return pending[: end if self._keep else start]
        split = len(pending) - self._hold_len(pending)
        self._held = pending[split:]
        return pending[:split]

    def finish(self) -> str:
        """Returns what was held back; called at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _found(self, text: str, known: int) -> list[tuple[int, int, str]]:
        """(end, start, stop string) of those in `text` that don't end within its first `known` characters."""
        starts = ((text.find(stop, max(known - len(stop) + 1, 0)), stop) for stop in self._strings)
        return [(start + len(stop), start, stop) for start, stop in starts if start >= 0]

    def _hold_len(self, text: str) -> int:
        """Returns the length of the longest end of `text` that is the beginning of a stop string."""
        longest = 0
        for stop in self._strings:
            for length in range(min(len(text), len(stop) - 1), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class Sample:
    """Turns replies into pieces. Nothing may be taken after the end.

    `detokenizer` is a new one, which goes on behind the prompt.
    """

    def __init__(self, request: Request, index: int, detokenizer: Detokenizer) -> None:
        self._request = request
        self._sampling = request.sampling
        self._index = index
        self._detokenizer = follow(detokenizer, request)
        self._stops = StopStrings(self._sampling.stop, self._sampling.include_stop_str_in_output)
        self._regex = StopRegex(self._sampling.stop_regex)
        self._ends_in_text = bool(self._sampling.stop or self._sampling.stop_regex)
        self._speculated = Speculated()
        self._run: Run | None = None  # the last one: it is counted once it is known how much of it the output has
        self._before_run = 0
        self.num_tokens = 0
        self.ended = False

    def take(self, replies: Sequence[Reply], weight_version: str = DEFAULT_WEIGHT_VERSION) -> Piece:
        """Returns the piece that `replies` (at least one) make. A stop string may end it before the last of them."""
        texts: list[str] = []
        ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        scored: tuple[TokenLogprob, ...] | None = None
        states: list[TokenStates] = []
        end: End | None = None
        for reply in replies:
            if reply.run is not None:
                self._next_run(reply.run)
            for part in _token_by_token(reply) if self._ends_in_text else (reply,):
                ids += part.token_ids
                self.num_tokens += len(part.token_ids)
                if part.logprob is not None:
                    logprobs.append(part.logprob)
                if part.prompt_logprobs is not None:
                    scored = part.prompt_logprobs
                if part.states is not None:
                    states.append(part.states)
                texts.append(self._text_of(part))
                end = self._end_with(part)
                if end is not None:
                    break
            if end is not None:
                break
        self.ended = end is not None
        told = self._index, tuple(logprobs), scored, replies[-1].cached_tokens, weight_version, tuple(states)
        return Piece("".join(texts), ids, end, *told)

    def _text_of(self, reply: Reply) -> str:
        """Returns the text that comes out with `reply`. A stop token gives none, unless the stop is to be left in."""
        visible = reply.token_ids
        if reply.finish_reason is FinishReason.STOP and not self._sampling.include_stop_str_in_output:
            visible = visible[:-1]
        text = self._detokenizer.feed(visible)
        if reply.finish_reason is not None:
            text += self._detokenizer.finish()
        may_match = self.num_tokens > self._sampling.min_tokens
        text = self._stops.feed(self._regex.feed(text, may_match), may_match)
        if reply.finish_reason is not None or self._regex.matched is not None:
            text += self._stops.finish()
        return text

    def _next_run(self, run: Run | None) -> None:
        """Counts the run before `run`, whose tokens come next."""
        if self._run is not None:
            self._speculated.add(self._run, self.num_tokens - self._before_run)
        self._run, self._before_run = run, self.num_tokens

    def _end_with(self, reply: Reply) -> End | None:
        matched: int | str | None = self._stops.matched if self._stops.matched is not None else self._regex.matched
        reason = FinishReason.STOP if matched is not None else reply.finish_reason
        if reason is None:
            return None
        if matched is None and reason is FinishReason.STOP and reply.token_ids:
            matched = reply.token_ids[-1]
        self._next_run(None)
        return End(
            reason, matched, len(self._request.prompt_ids), reply.cached_tokens, self.num_tokens, self._speculated
        )


def detokenizer_of(
    tokenizer: Tokenizer, sampling: SamplingParams, visible: frozenset[int] = frozenset()
) -> Detokenizer:
    """Returns a detokenizer for one sample: special tokens have text if they are `visible`, or all shall have it."""
    return tokenizer.detokenizer(visible if sampling.skip_special_tokens else tokenizer.special_ids)


def follow(detokenizer: Detokenizer, request: Request) -> Detokenizer:
    """Returns `detokenizer`, whose text goes on where the prompt of `request` ends, unless that is an image."""
    if not request.media or request.media[-1].stop < len(request.prompt_ids):
        detokenizer.follow(request.prompt_ids)
    return detokenizer


def _token_by_token(reply: Reply) -> list[Reply]:
    """Splits `reply` into parts of one token: a stop string ends the sample at the very token that completes it."""
    if len(reply.token_ids) <= 1:
        return [reply]
    *others, last = reply.token_ids
    before = [replace(reply, token_ids=(token_id,), finish_reason=None) for token_id in others]
    return [*before, replace(reply, token_ids=(last,))]


def join(pieces: Sequence[Piece]) -> Piece:
    """Joins all pieces of one sample into one."""
    return Piece(
        text="".join(piece.text for piece in pieces),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        end=pieces[-1].end,
        index=pieces[-1].index,
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        prompt_logprobs=next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None), None),
        cached_tokens=pieces[-1].cached_tokens,
        weight_version=pieces[-1].weight_version,
        states=tuple(part for piece in pieces for part in piece.states),
    )
