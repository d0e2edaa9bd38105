"""Fake grammars in random histories: compiled between turns, in no thread, and what requests with them must yield."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxsgl.errors import InvalidRequest
from jaxsgl.messages.replies import RefusalKind
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.scheduler.grammars.queue import Answer, GrammarQueue
from jaxsgl.testing.engine import next_allowed, seed_of
from jaxsgl.testing.grammars import compile_fake


class GrammarsInTurn(GrammarQueue):
    """Compiles one grammar each time it is asked for news. With threads a history would not repeat."""

    def __init__(self, vocab_size: int, clock: Callable[[], float]) -> None:
        super().__init__(lambda grammar: compile_fake(grammar, vocab_size), timeout_s=1000.0, clock=clock)

    def _start_threads(self) -> None:
        pass

    def poll(self) -> list[tuple[str, Answer]]:
        if self._todo and not (job := self._todo.popleft()).cancelled:
            job.start_s = self._clock()
            job.answer, job.lasts = self._answer_of(job.grammar)
            self._done.append(job)
        return super().poll()

    def wait(self, timeout_s: float) -> None:
        pass


def constrained_output(
    request: Request, max_new: int, vocab_size: int, eos_ids: frozenset[int], weights: int = 0
) -> tuple[list[int], FinishReason | RefusalKind]:
    """What a request with a grammar or limits yields, and why it ends: by the rules, token by token."""
    params = request.sampling
    try:
        matcher = None if params.grammar is None else compile_fake(params.grammar, vocab_size)
    except InvalidRequest:
        return [], RefusalKind.INVALID
    fails = params.grammar is not None and params.grammar.text.endswith("fails")
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
    output: list[int] = []
    while len(output) < max_new:
        if matcher is not None and fails and len(output) >= matcher.length // 2:
            return output, RefusalKind.INVALID
        may = set(range(vocab_size)) if matcher is None else set(matcher.allowed()) - eos_ids
        accepts = matcher is None or matcher.accepts
        may = may | stops if accepts and len(output) >= params.min_tokens else may - stops
        may -= _forbidden(params, output, vocab_size)
        if not may:
            return output, FinishReason.STOP if accepts and matcher is not None else RefusalKind.INVALID
        sequence = [*request.prompt_ids, *output]
        seed = seed_of([weights] * len(sequence))
        output.append(next_allowed(sequence, set(range(vocab_size)) - may, vocab_size, seed))
        if output[-1] in stops:
            return output, FinishReason.STOP
        if matcher is not None:
            matcher.advance(output[-1])
            if matcher.ended:
                return output, FinishReason.STOP
    return output, FinishReason.LENGTH


def _forbidden(params: SamplingParams, output: Sequence[int], vocab_size: int) -> set[int]:
    """Tokens that limits don't let follow `output`."""
    others = set(range(vocab_size)) - set(params.allowed_token_ids) if params.allowed_token_ids else set()
    words = params.bad_word_ids
    return others | {last for *before, last in words if before == list(output[len(output) - len(before) :])}
