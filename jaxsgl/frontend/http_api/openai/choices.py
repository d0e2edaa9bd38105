"""From pieces to the choices of a completion: the echoed prompt before the first text, log-probabilities, the usage."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from jaxsgl.frontend.http_api.openai.logprobs import LogprobsWriter, joined
from jaxsgl.frontend.http_api.openai.replies import Logprobs, TextChoice, Usage
from jaxsgl.frontend.sample import Piece
from jaxsgl.frontend.tokenizer import Tokenizer
from jaxsgl.messages import TokenLogprob
from jaxsgl.request import FinishReason, Request


class Choices:
    """All choices of one HTTP request, while their pieces come.

    Attributes:
      usage: of the choices that have ended.
    """

    def __init__(
        self, tokenizer: Tokenizer, requests: Sequence[Request], echoed: Sequence[str] | None, keep_output: bool
    ) -> None:
        """`requests` one per prompt; `echoed` their texts, if choices begin with them."""
        sampling = requests[0].sampling
        self.usage = Usage()
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

    def news(self, number: int, piece: Piece) -> list[TextChoice]:
        """What there is to say now that `piece` of choice `number` has come.

        Nothing for a piece without text; several things when the scores of an echoed prompt come with sample 0, after
        pieces of other samples.
        """
        if not self._wait_for_scores:
            choice = self._choice(number, piece)
            return [] if choice is None else [choice]
        prompt, sample = divmod(number, self._n)
        ready = [(number, piece)]
        if prompt not in self._prompt_scores:
            if sample != 0:
                self._held.setdefault(prompt, []).append((number, piece))
                return []
            unknown = [None] * (len(self._requests[prompt].prompt_ids) - 1)  # of a request that was aborted before
            self._prompt_scores[prompt] = piece.prompt_logprobs if piece.prompt_logprobs is not None else unknown
            ready += self._held.pop(prompt, [])
        return [choice for of_one in ready if (choice := self._choice(*of_one)) is not None]

    def _choice(self, number: int, piece: Piece) -> TextChoice | None:
        prompt, sample = divmod(number, self._n)
        if not self._keep_output:
            piece = _without_output(piece)
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
            self.usage.add(piece.end, sample)
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
