"""Answers /v1/completions: continues prompts given as texts or token ids; with echo, also scores them.

`Choices` turns pieces into choices: the echoed prompt and its log-probabilities come before the first text. With
best_of, more samples of each prompt are generated than the answer has, which are the likeliest of them; only whole
answers have that, since a stream can't take text back. routes.py calls `answer_completions`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from typing import cast

from msgspec import UNSET
from msgspec.structs import replace
from starlette.responses import Response

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.generation import FrontEnd, ServedModel, prompted_all
from jaxsgl.frontend.http.bodies import in_rooms, options_of, refuse_prompt_scores_in_rooms, truncation_of
from jaxsgl.frontend.http.calls import DONE, EventStream, check_num_choices, event, pieces, start_all, whole
from jaxsgl.frontend.http.openai.logprobs import Echo, Logprobs, LogprobsWriter, joined, prompt_logprobs, with_top
from jaxsgl.frontend.http.openai.replies import (
    AnswerHead,
    StatesCollector,
    TextChoice,
    UsageCounter,
    json_response,
    new_head,
)
from jaxsgl.frontend.http.openai.schemas import CompletionRequest, sampling_of
from jaxsgl.messages.replies import TokenLogprob
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.text.infill import end_ids
from jaxsgl.text.prompts import IdsPrompt, Prompt, TextPrompt
from jaxsgl.text.sample import Piece
from jaxsgl.text.tokenizer import Tokenizer, Truncation

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def answer_completions(front_end: FrontEnd, body: CompletionRequest, adapter: str = "") -> Response:
    """Returns the whole answer or its stream, of the model with `adapter`.

    Raises `InvalidRequest`, and as `Generator.start`.
    """
    model = front_end.generator.model
    tokenizer = model.tokenizer
    sampling = _sampling(body, model)
    truncation = truncation_of(body, model.info.limits, sampling.max_tokens or 1)
    prompts = prompts_of(body.prompt, body.add_special_tokens is not False, truncation, body.suffix or "")
    check_num_choices(len(prompts), sampling.n)
    options = in_rooms(options_of(body, [adapter] * len(prompts)), body)
    refuse_prompt_scores_in_rooms(options, sampling)
    head = new_head("cmpl", "text_completion", adapter or front_end.config.model_name, body.rid)
    requests = await front_end.generator.prepare_all(prompted_all(prompts, sampling, head.id, options))
    echoed = await _echoed(front_end, body, prompts, requests)
    answered = _answered(body, requests)
    n = answered[0].sampling.n
    usage = UsageCounter(body.stream_options, [len(request.prompt_ids) for request in requests], n)
    choices = Choices(tokenizer, answered, echoed, body, usage)
    if body.stream:
        return EventStream(_stream(front_end, requests, choices, head, usage))
    return json_response(await _whole(front_end, requests, answered, choices, head, usage))


def prompts_of(
    given: str | list[str] | list[int] | list[list[int]],
    with_special: bool,
    truncation: Truncation | None = None,
    suffix: str = "",
) -> list[Prompt]:
    """Returns the prompts of a body: one or several, texts or token ids. The tokenizer's start token is for texts.

    Raises `InvalidRequest` for a suffix of token ids.
    """
    if isinstance(given, str):
        given = [given]
    if suffix and not (given and isinstance(given[0], str)):
        raise InvalidRequest(
            "suffix is given with token ids: send texts, or the tokens to fill in the middle with the ids"
        )
    if not given or isinstance(given[0], int):  # not copied: there may be millions
        return [IdsPrompt(cast(list[int], given), truncation=truncation)]
    several = cast(list[str | list[int]], given)
    return [
        TextPrompt(one, with_special, truncation=truncation, suffix=suffix)
        if isinstance(one, str)
        else IdsPrompt(one, truncation=truncation)
        for one in several
    ]


def _sampling(body: CompletionRequest, model: ServedModel) -> SamplingParams:
    """Returns how all samples are generated. Raises `InvalidRequest`."""
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise InvalidRequest("max_tokens is 0, which asks for nothing: set it to 1 and more, or echo to true")
    num_samples = num_samples_of(body)
    # The engine samples at least one token; `Choices` drops it.
    asked = [body.prompt_logprobs, body.logprobs if body.echo else None]
    of_prompt = max((num_top for num_top in asked if num_top is not None), default=None)
    sampling = sampling_of(body, max(1, max_tokens), body.logprobs, of_prompt, model.sampling_defaults)
    if num_samples > sampling.n:
        sampling = replace(sampling, n=num_samples, logprobs=body.logprobs or 0)
    if not body.suffix:
        return sampling
    if body.echo:
        raise InvalidRequest("suffix and echo are both given, but the prompt's tokens are no text then: leave echo out")
    return with_infill_ends(sampling, model.tokenizer)


def with_infill_ends(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Returns `sampling` that also ends where a middle does. Raises `InvalidRequest` if the model knows no middle."""
    ends = () if sampling.ignore_eos else end_ids(tokenizer)
    return replace(sampling, stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *ends))))


def _answered(body: CompletionRequest, requests: list[Request]) -> list[Request]:
    """Returns the requests as if the samples that are returned were all."""
    sampling, n = requests[0].sampling, body.n or 1
    if sampling.n <= n:
        return requests
    sampling = replace(sampling, n=n, logprobs=body.logprobs)
    return [replace(request, sampling=sampling) for request in requests]


async def _echoed(
    front_end: FrontEnd, body: CompletionRequest, prompts: list[Prompt], requests: list[Request]
) -> list[Echo] | None:
    """Returns the prompts' texts if the answer is to hold them."""
    if not body.echo:
        return None
    before = behind = 0
    if isinstance(prompts[0], TextPrompt) and prompts[0].add_special_tokens:  # so are the others
        before, behind = front_end.generator.model.tokenizer.num_added()
    with_names = body.skip_special_tokens is False
    echoed: list[Echo] = []
    for prompt, request in zip(prompts, requests, strict=True):
        ids = request.prompt_ids
        if isinstance(prompt, TextPrompt) and prompt.truncation is None:
            echoed.append(Echo(prompt.text, range(before, len(ids) - behind)))
        else:
            text = await front_end.generator.decode(ids, with_names)
            echoed.append(Echo(text, range(len(ids)) if with_names else None))
    return echoed


async def _whole(
    front_end: FrontEnd,
    requests: list[Request],
    answered: list[Request],
    choices: Choices,
    head: AnswerHead,
    usage: UsageCounter,
) -> bytes:
    async with start_all(front_end.generator, requests) as generations:
        all_samples = await whole(generations)

    samples, num_dropped = likeliest(all_samples, requests[0].sampling.n, answered[0].sampling.n)
    usage.add_dropped(num_dropped)
    states = StatesCollector(answered, front_end.generator.model.info.limits.states)

    def write() -> bytes:
        all_choices: list[TextChoice] = []
        for number, piece in enumerate(samples):
            states.add(number, piece)
            all_choices.append(replace(choices.whole(number, piece), hidden_states=states.hidden(number)))
        return head.answer(all_choices, usage.total, samples[-1].weight_version, states.extension())

    return await front_end.generator.off_loop(sum(sample.num_scores for sample in samples), write)


async def _stream(
    front_end: FrontEnd, requests: list[Request], choices: Choices, head: AnswerHead, usage: UsageCounter
) -> AsyncGenerator[bytes, None]:
    def events(number: int, piece: Piece) -> bytes:
        def chunk(choice: TextChoice) -> bytes:
            version = None if choice.finish_reason is None else piece.weight_version
            return event(head.answer([choice], usage.in_chunk(choice.index), version))

        return b"".join(map(chunk, choices.updates(number, piece)))

    def last_events() -> bytes:
        last = [TextChoice(number, "", hidden_states=hidden) for number, hidden in states.all_hidden()]
        chunks = [event(head.answer([choice], usage.in_chunk(choice.index))) for choice in last]
        return b"".join(chunks) + event(head.answer([], usage.in_chunk(0), sglext=states.extension()))

    states = StatesCollector(requests, front_end.generator.model.info.limits.states)
    off_loop, scored = front_end.generator.off_loop, requests[0].sampling.logprobs is not None
    async with (
        start_all(front_end.generator, requests) as generations,
        contextlib.aclosing(pieces(generations, requests[0].sampling.n)) as numbered,
    ):
        async for number, piece in numbered:
            states.add(number, piece)
            data = await off_loop(piece.num_scores, partial(events, number, piece)) if scored else events(number, piece)
            if data:
                yield data
    if requests[0].sampling.wants_states:
        yield await off_loop(states.num_numbers, last_events)
    yield usage.last_chunk(head) + DONE


class Choices:
    """The choices of one HTTP request while their pieces arrive."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        requests: Sequence[Request],
        echoed: Sequence[Echo] | None,
        body: CompletionRequest,
        usage: UsageCounter,
    ) -> None:
        """Args: one request per prompt; `echoed` are the prompts, if choices begin with them.

        `body` says what choices hold; of a max_tokens of 0 the prompt alone. `usage` counts the tokens of the choices
        that are returned.
        """
        sampling = requests[0].sampling
        self._tokenizer = tokenizer
        self._usage = usage
        self._requests = requests
        self._echoed = echoed
        self._keep_output = body.max_tokens != 0
        self._ids = bool(body.return_token_ids)
        self._num_top_of_prompt = body.prompt_logprobs
        self._n = sampling.n
        self._started = [False] * (len(requests) * self._n)
        self._writers: list[LogprobsWriter] | None = None
        if sampling.logprobs is not None:
            as_ids = bool(body.return_tokens_as_token_ids)
            self._writers = [LogprobsWriter(tokenizer, request, as_ids) for request in requests for _ in range(self._n)]
        self._wait_for_scores = self._writers is not None and echoed is not None
        self._prompt_scores: dict[int, Sequence[TokenLogprob | None]] = {}  # by prompt
        self._held: dict[int, list[tuple[int, Piece]]] = {}  # by prompt: pieces that arrived before its scores

    def whole(self, number: int, piece: Piece) -> TextChoice:
        """Returns choice `number` from all its tokens. Must be called with sample 0 of a prompt before its others."""
        (choice,) = self.updates(number, piece)
        return choice

    def updates(self, number: int, piece: Piece) -> Iterator[TextChoice]:
        """Yields what a stream sends now that `piece` of choice `number` has arrived; it is counted in the usage.

        Yields nothing for a piece without text, and several choices when the scores of an echoed prompt arrive with
        sample 0 after pieces of other samples.
        """
        for of_one in self._ready(number, piece):
            choice = self._choice(*of_one)
            if choice is not None:
                yield choice

    def _ready(self, number: int, piece: Piece) -> list[tuple[int, Piece]]:
        """Returns the pieces that can be answered now. With scores of the prompt, other samples wait for sample 0."""
        if not self._wait_for_scores:
            return [(number, piece)]
        prompt, sample = divmod(number, self._n)
        ready = [(number, piece)]
        if prompt not in self._prompt_scores:
            if sample != 0:
                self._held.setdefault(prompt, []).append((number, piece))
                return []
            unknown = [None] * (len(self._requests[prompt].prompt_ids) - 1)  # if the request was aborted before
            scores = piece.prompt_logprobs
            most = self._requests[prompt].sampling.logprobs or 0
            self._prompt_scores[prompt] = unknown if scores is None else with_top(scores, most)
            ready += self._held.pop(prompt, [])
        return ready

    def _choice(self, number: int, piece: Piece) -> TextChoice | None:
        prompt = number // self._n
        if not self._keep_output:
            piece = without_output(piece)
        self._usage.add(number, piece)
        text = piece.text
        scores: Logprobs | None = None
        starts = not self._started[number]
        self._started[number] = True
        if starts and self._echoed is not None:
            text = self._echoed[prompt].text + text
        if self._writers is not None:
            writer = self._writers[number]
            echoed = self._prompt(prompt, writer) if starts and self._echoed is not None else None
            scores = writer.output(piece.token_ids, piece.logprobs)
            scores = scores if echoed is None else joined(echoed, scores)
        choice = TextChoice(number, text, scores)
        if self._ids:
            choice.token_ids = piece.token_ids
            choice.prompt_token_ids = self._requests[prompt].prompt_ids if starts else UNSET
        if self._num_top_of_prompt is not None and number % self._n == 0:
            ids = self._requests[prompt].prompt_ids
            choice.prompt_logprobs = prompt_logprobs(
                self._tokenizer, ids, piece.prompt_logprobs, self._num_top_of_prompt
            )
        if piece.end is not None:
            choice.finish_reason, choice.matched_stop = piece.end.reason.value, piece.end.matched_stop
            choice.stop_reason = piece.end.stop_reason(self._requests[prompt].sampling)
        elif not text and scores is None and not self._ids:
            return None
        return choice

    def _prompt(self, prompt: int, writer: LogprobsWriter) -> Logprobs:
        assert self._echoed is not None
        return writer.prompt(self._requests[prompt].prompt_ids, self._prompt_scores[prompt], self._echoed[prompt])


def without_output(piece: Piece) -> Piece:
    """Returns `piece` as if the client had asked for the prompt alone."""
    end = piece.end
    if end is not None:
        reason = end.reason if end.reason is FinishReason.ABORT else FinishReason.LENGTH
        end = replace(end, reason=reason, matched_stop=None, completion_tokens=0)
    return replace(piece, text="", token_ids=[], logprobs=(), end=end)


def num_samples_of(body: CompletionRequest) -> int:
    """Returns how many samples of each prompt are generated. Raises `InvalidRequest`."""
    n = body.n or 1
    if body.best_of is None:
        return n
    if body.best_of < n:
        raise InvalidRequest(f"best_of is {body.best_of}, but n={n} of so many samples can't be returned: raise it")
    if body.stream and body.best_of > n:
        raise InvalidRequest(
            f"best_of is {body.best_of} and n={n}, but which samples are the best shows when all have ended: leave "
            "stream out, or best_of"
        )
    return n if body.max_tokens == 0 else body.best_of  # nothing is generated then


def likeliest(samples: Sequence[Piece], num_samples: int, n: int) -> tuple[list[Piece], int]:
    """Returns `n` of each prompt's `num_samples` samples, the likeliest first, and the tokens of all the others.

    The likeliest has the highest mean log-probability of its tokens, as OpenAI has it; of equal ones the first. What
    sample 0 says about the prompt stands in the first of each prompt then. All samples must have log-probabilities,
    unless all are returned.
    """
    if n == num_samples:
        return list(samples), 0
    chosen: list[Piece] = []
    num_dropped = 0
    for start in range(0, len(samples), num_samples):
        of_prompt = samples[start : start + num_samples]
        best, *others = sorted(of_prompt, key=_mean_logprob, reverse=True)
        num_dropped += sum(len(piece.token_ids) for piece in others[n - 1 :])
        first = of_prompt[0]
        end = best.end and first.end and replace(best.end, cached_tokens=first.end.cached_tokens)
        chosen += [replace(best, prompt_logprobs=first.prompt_logprobs, end=end), *others[: n - 1]]
    return chosen, num_dropped


def _mean_logprob(piece: Piece) -> float:
    """Returns minus infinity for a sample that was aborted before its first token."""
    if not piece.logprobs:
        return -math.inf
    return sum(of_token.logprob for of_token in piece.logprobs) / len(piece.logprobs)
