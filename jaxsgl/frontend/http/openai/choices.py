"""From pieces to the choices of a completion: the echoed prompt before the first text, and log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from jaxsgl.frontend.http.openai.logprobs import LogprobsWriter, joined
from jaxsgl.frontend.http.openai.replies import Logprobs, TextChoice
from jaxsgl.frontend.http.openai.usage import UsageCounter
from jaxsgl.messages import TokenLogprob
from jaxsgl.request import FinishReason, Request
from jaxsgl.text.sample import Piece
from jaxsgl.text.tokenizer import Tokenizer


class Choices:
    """All choices of one HTTP request, while their pieces come."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        requests: Sequence[Request],
        echoed: Sequence[str] | None,
        keep_output: bool,
        usage: UsageCounter,
    ) -> None:
        """`requests` one per prompt; `echoed` their texts, if choices begin with them; `usage` counts what is told."""
        sampling = requests[0].sampling
        self._usage = usage
        self._requests = requests
        self._echoed = echoed
        self._keep_output = keep_output
        self._n = sampling.n
        self._started = [False] * (len(requests) * self._n)
        self._writers = [LogprobsWriter(tokenizer) for _ in self._started] if sampling.logprobs is not None else None
        self._wait_for_scores = self._writers is not None and echoed is not None
        self._prompt_scores: dict[int, Sequence[TokenLogprob | None]] = {}  # by prompt
        self._held: dict[int, list[tuple[int, Piece]]] = {}  # by prompt: pieces that come before the prompt's scores

    def whole(self, number: int, piece: Piece) -> TextChoice:
        """Choice `number`, all of it; sample 0 of each prompt comes first."""
        (choice,) = self.news(number, piece)
        return choice

    def news(self, number: int, piece: Piece) -> Iterator[TextChoice]:
        """What there is to say now that `piece` of choice `number` has come; what is yielded has been counted.

        Nothing for a piece without text; several things when the scores of an echoed prompt come with sample 0, after
        pieces of other samples.
        """
        for of_one in self._ready(number, piece):
            choice = self._choice(*of_one)
            if choice is not None:
                yield choice

    def _ready(self, number: int, piece: Piece) -> list[tuple[int, Piece]]:
        """What need not wait for the scores of its prompt (any more)."""
        if not self._wait_for_scores:
            return [(number, piece)]
        prompt, sample = divmod(number, self._n)
        ready = [(number, piece)]
        if prompt not in self._prompt_scores:
            if sample != 0:
                self._held.setdefault(prompt, []).append((number, piece))
                return []
            unknown = [None] * (len(self._requests[prompt].prompt_ids) - 1)  # of a request that was aborted before
            self._prompt_scores[prompt] = piece.prompt_logprobs if piece.prompt_logprobs is not None else unknown
            ready += self._held.pop(prompt, [])
        return ready

    def _choice(self, number: int, piece: Piece) -> TextChoice | None:
        prompt = number // self._n
        if not self._keep_output:
            piece = _without_output(piece)
        self._usage.add(number, piece)
        text = piece.text
        scores: Logprobs | None = None
        starts = not self._started[number]
        self._started[number] = True
        if starts and self._echoed is not None:
            text = self._echoed[prompt] + text
        if self._writers is not None:
            writer = self._writers[number]
            echoed = self._prompt(prompt, writer) if starts and self._echoed is not None else None
            scores = writer.output(piece.token_ids, piece.logprobs)
            scores = scores if echoed is None else joined(echoed, scores)
        if piece.end is not None:
            return TextChoice(number, text, scores, piece.end.reason.value, piece.end.matched_stop)
        return TextChoice(number, text, scores) if text or scores is not None else None

    def _prompt(self, prompt: int, writer: LogprobsWriter) -> Logprobs:
        assert self._echoed is not None
        return writer.prompt(self._requests[prompt].prompt_ids, self._prompt_scores[prompt], len(self._echoed[prompt]))


def _without_output(piece: Piece) -> Piece:
    """As if the prompt alone had been asked for."""
    end = piece.end
    if end is not None:
        reason = end.reason if end.reason is FinishReason.ABORT else FinishReason.LENGTH
        end = replace(end, reason=reason, matched_stop=None, completion_tokens=0)
    return replace(piece, text="", token_ids=[], logprobs=(), end=end)
