"""SGLang's POST /generate: continues prompts, whole or as a stream whose events each hold all text so far.

A body's prompts, pictures and sampling parameters become one request per prompt. A `Writer` collects each choice of the
answer: text, ids and `meta_info`, all of it in each event of a stream. admin.py has what operators and trainers call;
app.py includes the router.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from jaxsgl.config.engine import DEFAULT_WEIGHT_VERSION
from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.adapters import adapters_of
from jaxsgl.frontend.generation import FrontEnd, Prompted
from jaxsgl.frontend.http.bodies import (
    StrictJson,
    in_rooms,
    options_of,
    refuse_others,
    sampling_params,
)
from jaxsgl.frontend.http.calls import (
    DONE,
    EventStream,
    check_num_choices,
    event,
    pieces,
    start_all,
    while_connected,
    whole,
)
from jaxsgl.frontend.http.grammars import grammar_of
from jaxsgl.frontend.http.openai.completions import without_output
from jaxsgl.frontend.http.openai.logprobs import MIN_LOGPROB, name_of
from jaxsgl.frontend.http.openai.replies import encode, experts_text, json_response
from jaxsgl.frontend.http.sglang.schemas import GenerateBody, SamplingBody
from jaxsgl.messages.replies import TokenLogprob
from jaxsgl.preprocess.sources import ImageSource, SoundSource, Source, VideoSource
from jaxsgl.requests.outputs import StatesSpec, TokenStates, hidden_states
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.text.prompts import IdsPrompt, Prompt, TextPrompt
from jaxsgl.text.sample import End, Piece, Speculated
from jaxsgl.text.tokenizer import Tokenizer

# SGLang's fields that change the answer and that aren't built. Empty or false, they ask for nothing.
NOT_BUILT = frozenset({"session_params"})
_HAS_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:")

Given: TypeAlias = "str | list[str | list[str] | None] | None"
SourceT = TypeVar("SourceT", bound=Source)
ValueT = TypeVar("ValueT")


def router(front_end: FrontEnd) -> APIRouter:
    """Returns the endpoint, for `front_end`."""
    router = APIRouter(route_class=StrictJson, tags=["sglang"])

    @router.post("/generate")
    @while_connected
    async def generate(body: GenerateBody) -> Response:
        """Continues prompts, as SGLang does: an object for one choice, a list for several, prompt by prompt."""
        requests, start_lens = await _requests(front_end, body)
        keep_outputs = [params.max_new_tokens > 0 for params in _each(body, len(requests))]
        tokenizer = front_end.generator.model.tokenizer if body.return_text_in_logprobs else None
        n = requests[0].sampling.n
        alone = n == 1 and not _is_batch(body)
        states = front_end.generator.model.info.limits.states
        if body.stream and requests[0].sampling.wants_states:
            raise InvalidRequest("hidden states and experts come with whole answers: leave stream out")
        speculates = front_end.config.engine.speculation.is_on
        writers = [
            Writer(
                request,
                UNSET if alone or not body.stream else number * n + sample,
                start_len,
                tokenizer,
                states,
                speculates,
                keep_output,
            )
            for number, (request, start_len, keep_output) in enumerate(
                zip(requests, start_lens, keep_outputs, strict=True)
            )
            for sample in range(n)
        ]
        if body.stream:
            return EventStream(_stream(front_end, requests, writers, body.data_parallel_rank))
        return json_response(await _whole(front_end, requests, writers, alone, body.data_parallel_rank))

    return router


async def _requests(front_end: FrontEnd, body: GenerateBody) -> tuple[list[Request], list[int | None]]:
    """Returns one request per prompt, all of them checked, and its first token to score. Raises `InvalidRequest`."""
    refuse_others(body, NOT_BUILT)
    prompts = _with_media(_prompts(body), body)
    each = _each(body, len(prompts))
    _check_counts(prompts, each)
    ids = _ids(body.rid, prompts)
    scores = _scores(body, len(prompts))
    samplings = [_sampling(body, params, of_one) for params, of_one in zip(each, scores, strict=True)]
    options = in_rooms(options_of(body, adapters_of(front_end, None, body.lora_path, len(prompts))), body)
    requests = await front_end.generator.prepare_all(list(map(Prompted, prompts, samplings, ids, options)))
    start_lens = [of_one.start_len for of_one in scores]
    for request, start_len in zip(requests, start_lens, strict=True):
        if start_len is not None and start_len >= len(request.prompt_ids):
            raise InvalidRequest(
                f"logprob_start_len is {start_len}, but the prompt has {len(request.prompt_ids)} tokens, the first of "
                "which is 0: lower it, or send -1 for none"
            )
    return requests, start_lens


def _each(body: GenerateBody, num_prompts: int) -> list[SamplingBody]:
    """Returns the sampling parameters of each prompt."""
    given = body.sampling_params if body.sampling_params is not None else SamplingBody()
    return given if isinstance(given, list) else [given] * num_prompts


def _is_batch(body: GenerateBody) -> bool:
    given = body.input_ids if body.text is None else body.text
    return isinstance(given, list) and bool(given) and not isinstance(given[0], int)


def _prompts(body: GenerateBody) -> list[Prompt]:
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("the request needs either text or input_ids: send one of them")
    if body.text is not None:
        return [TextPrompt(text) for text in ([body.text] if isinstance(body.text, str) else body.text)]
    given = body.input_ids or []
    if not given or isinstance(given[0], int):  # not copied: there may be millions
        return [IdsPrompt(given)]
    return [IdsPrompt(ids) for ids in given]


def _with_media(prompts: Sequence[Prompt], body: GenerateBody) -> list[Prompt]:
    """Returns `prompts` with the pictures, videos and sounds of `body`. Raises `InvalidRequest`."""
    if body.image_data is None and body.video_data is None and body.audio_data is None:
        return list(prompts)
    several = len(prompts) > 1 or _is_batch(body)
    images = _of_prompts("image_data", body.image_data, len(prompts), several, _image)
    videos = _of_prompts("video_data", body.video_data, len(prompts), several, _video)
    sounds = _of_prompts("audio_data", body.audio_data, len(prompts), several, _sound)
    return [
        replace(prompt, media=(*of_images, *of_videos, *of_sounds))
        for prompt, of_images, of_videos, of_sounds in zip(prompts, images, videos, sounds, strict=True)
    ]


def _of_prompts(
    name: str, given: Given, num_prompts: int, several: bool, source_of: Callable[[str, str], SourceT]
) -> list[list[SourceT]]:
    """Returns the pictures of each prompt. Of one prompt, a list holds its pictures; of several, one entry for each."""
    if given is None:
        return [[] for _ in range(num_prompts)]
    if isinstance(given, str):
        return [[source_of(name, given)]] * num_prompts  # one object, which is loaded once
    if several:
        if len(given) != num_prompts:
            raise InvalidRequest(f"{name} has {len(given)} entries for {num_prompts} prompts: send one per prompt")
        entries: list[str | list[str] | None] = given
    else:
        entries = [_flat(name, given)]
    return [
        [source_of(name, file) for file in ([entry] if isinstance(entry, str) else entry or [])] for entry in entries
    ]


def _flat(name: str, given: list[str | list[str] | None]) -> list[str]:
    """Returns the files of one prompt, which may come as a list of one list."""
    if len(given) == 1 and isinstance(given[0], list):
        return given[0]
    files = [entry for entry in given if isinstance(entry, str)]
    if len(files) != len(given):
        raise InvalidRequest(f"{name} has lists in it, but there is one prompt: send a list of URLs or base64")
    return files


def _image(name: str, file: str) -> ImageSource:
    return ImageSource(_url(file, "image/png"))


def _video(name: str, file: str) -> VideoSource:
    return VideoSource(_url(file, "video/mp4"))


def _sound(name: str, file: str) -> SoundSource:
    return SoundSource(_url(file, "audio/wav"))


def _url(file: str, media_type: str) -> str:
    """Returns a URL as it is, and base64 as a data: URL."""
    return file if _HAS_SCHEME.match(file[:64]) else f"data:{media_type};base64,{file}"


def _check_counts(prompts: Sequence[Prompt], each: Sequence[SamplingBody]) -> None:
    if len(each) != len(prompts):
        raise InvalidRequest(f"sampling_params has {len(each)} entries for {len(prompts)} prompts: send one per prompt")
    n = each[0].n
    if any(params.n != n for params in each):
        raise InvalidRequest("n differs between the entries of sampling_params: send such prompts apart")
    check_num_choices(len(prompts), n)


def _ids(rid: str | list[str] | None, prompts: Sequence[Prompt]) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in prompts]
    if isinstance(rid, str):
        return [rid] if len(prompts) == 1 else [f"{rid}_{number}" for number in range(len(prompts))]
    if len(rid) != len(prompts):
        raise InvalidRequest(f"rid has {len(rid)} entries for {len(prompts)} prompts: send one per prompt")
    return rid


class _Scores(NamedTuple):
    """Log-probabilities that a prompt asks for.

    Attributes:
      top: likely tokens at each place; None: there are no log-probabilities.
      start_len: place of the first prompt token that has one, or None.
      named: tokens that have one at each output token.
    """

    top: int | None = None
    start_len: int | None = None
    named: tuple[int, ...] = ()


def _scores(body: GenerateBody, num_prompts: int) -> list[_Scores]:
    """Returns what each prompt asks for; as in SGLang, nothing without return_logprob. Raises `InvalidRequest`."""
    wanted = _of_each("return_logprob", body.return_logprob, num_prompts)
    start_lens = _of_each("logprob_start_len", body.logprob_start_len, num_prompts)
    tops = _of_each("top_logprobs_num", body.top_logprobs_num, num_prompts)
    named = _named_ids(body, num_prompts)
    if any(named) and not any(wanted):
        raise InvalidRequest("token_ids_logprob is given, but return_logprob is not true: set it to true")
    each: list[_Scores] = []
    for is_wanted, start_len, top, ids in zip(wanted, start_lens, tops, named, strict=True):
        start_len = None if start_len == -1 else start_len
        if is_wanted and ids and start_len is not None:
            raise InvalidRequest("token_ids_logprob is for output tokens alone: leave logprob_start_len at -1")
        each.append(_Scores(top or 0, start_len, ids) if is_wanted else _Scores())
    return each


def _of_each(name: str, given: ValueT | list[ValueT] | None, num_prompts: int) -> list[ValueT | None]:
    """Returns a field's value for each prompt. Raises `InvalidRequest`."""
    if not isinstance(given, list):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise InvalidRequest(f"{name} has {len(given)} entries for {num_prompts} prompts: send one, or one per prompt")
    return list(given)


def _named_ids(body: GenerateBody, num_prompts: int) -> list[tuple[int, ...]]:
    """Returns the tokens of `token_ids_logprob` for each prompt. Raises `InvalidRequest`."""
    given = body.token_ids_logprob
    if not given:
        return [()] * num_prompts
    if isinstance(given[0], int):
        return [tuple(given)] * num_prompts
    if len(given) != num_prompts:
        raise InvalidRequest(
            f"token_ids_logprob has {len(given)} lists for {num_prompts} prompts: send one list, or one per prompt"
        )
    return [tuple(ids) for ids in given]


def _sampling(body: GenerateBody, params: SamplingBody, scores: _Scores) -> SamplingParams:
    if params.min_new_tokens > params.max_new_tokens:
        raise InvalidRequest(
            f"sampling_params.min_new_tokens is {params.min_new_tokens}, but must be max_new_tokens="
            f"{params.max_new_tokens} at most"
        )
    return sampling_params(
        params,
        max_tokens=max(1, params.max_new_tokens),  # the engine samples at least one token; `Writer` drops it
        min_tokens=params.min_new_tokens,
        seed=params.sampling_seed,
        include_stop_str_in_output=params.no_stop_trim,
        logprobs=scores.top,
        logprob_token_ids=scores.named,
        prompt_logprobs=None if scores.start_len is None else scores.top,
        grammar=grammar_of(params),
        return_hidden_states=bool(body.return_hidden_states),
        return_routed_experts=bool(body.return_routed_experts),
    )


async def _whole(
    front_end: FrontEnd, requests: Sequence[Request], writers: Sequence[Writer], alone: bool, rank: int | None
) -> bytes:
    """Returns the answer: an object for a choice that is `alone`, otherwise a list."""
    async with start_all(front_end.generator, requests, rank) as generations:
        samples = await whole(generations)

    def write() -> bytes:
        choices = [writer.add(piece) for writer, piece in zip(writers, samples, strict=True)]
        return encode(choices[0] if alone else choices)

    return await front_end.generator.off_loop(sum(sample.num_scores for sample in samples), write)


async def _stream(
    front_end: FrontEnd, requests: Sequence[Request], writers: Sequence[Writer], rank: int | None
) -> AsyncGenerator[bytes, None]:
    async with (
        start_all(front_end.generator, requests, rank) as generations,
        contextlib.aclosing(pieces(generations, requests[0].sampling.n)) as numbered,
    ):
        async for number, piece in numbered:
            writer = writers[number]
            if piece.num_scores or writer.num_scores:
                writer.num_scores += piece.num_scores  # each event repeats them all
                yield await front_end.generator.off_loop(writer.num_scores, partial(_event, writer, piece))
            else:
                yield _event(writer, piece)
    yield DONE


def _event(writer: Writer, piece: Piece) -> bytes:
    return event(encode(writer.add(piece)))


Scored: TypeAlias = tuple[float | None, int, str | None]  # log-probability, token id, its text if asked for
Tops: TypeAlias = list[list[Scored] | None]


class MetaInfo(msgspec.Struct):
    """Facts about one choice so far. `cached_tokens` and `e2e_latency` (seconds) are known at its end.

    So is what became of its drafts, on servers that speculate: steps that verified some, the tokens of such a step on
    average, the share of drafts in the output, such steps by how many of their drafts are there, and both numbers.
    """

    id: str
    prompt_tokens: int
    weight_version: str = DEFAULT_WEIGHT_VERSION
    finish_reason: dict[str, Any] | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    e2e_latency: float | UnsetType = UNSET
    input_token_logprobs: list[Scored] | UnsetType = UNSET
    output_token_logprobs: list[Scored] | UnsetType = UNSET
    input_top_logprobs: Tops | UnsetType = UNSET
    output_top_logprobs: Tops | UnsetType = UNSET
    output_token_ids_logprobs: Tops | UnsetType = UNSET
    hidden_states: list[Any] | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET
    spec_verify_ct: int | UnsetType = UNSET
    spec_accept_length: float | UnsetType = UNSET
    spec_accept_rate: float | UnsetType = UNSET
    spec_accept_histogram: list[int] | UnsetType = UNSET
    spec_accept_token_num: int | UnsetType = UNSET
    spec_draft_token_num: int | UnsetType = UNSET


class Choice(msgspec.Struct):
    """One sample so far; streams of several samples hold its `index`."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET


class Writer:
    """Collects one choice while its pieces arrive.

    Args:
      request: the request that it is a sample of.
      index: the choice's number; UNSET leaves it out of the answer.
      start_len: position of the first prompt token whose log-probability is wanted, or None.
      tokenizer: gives scored tokens their texts; None leaves them out.
      states: what the server returns of single tokens.
      speculates: whether the server does.
      keep_output: false leaves the token out that is sampled though max_new_tokens is 0.

    Attributes:
      num_scores: log-probabilities so far, counted by a stream.
    """

    def __init__(
        self,
        request: Request,
        index: int | UnsetType,
        start_len: int | None,
        tokenizer: Tokenizer | None,
        states: StatesSpec | None = None,
        speculates: bool = False,
        keep_output: bool = True,
    ) -> None:
        self.num_scores = 0
        self._start_s = time.monotonic()
        self._prompt_ids = request.prompt_ids
        self._start_len = start_len
        self._tokenizer = tokenizer
        self._sampling = sampling = request.sampling
        self._states = states
        self._speculates = speculates
        self._keep_output = keep_output
        meta = MetaInfo(request.request_id, len(request.prompt_ids))
        if sampling.logprobs is not None:
            meta.input_token_logprobs, meta.output_token_logprobs = [], []
            if sampling.logprobs > 0:
                meta.input_top_logprobs, meta.output_top_logprobs = [], []
            if sampling.logprob_token_ids:
                meta.output_token_ids_logprobs = []
        self._choice = Choice("", [], meta, index)

    def add(self, piece: Piece) -> Choice:
        """Adds `piece` and returns the choice so far."""
        if not self._keep_output:
            piece = without_output(piece)
        choice, meta = self._choice, self._choice.meta_info
        choice.text += piece.text
        choice.output_ids += piece.token_ids
        meta.completion_tokens = len(choice.output_ids)
        meta.weight_version = piece.weight_version
        if meta.output_token_logprobs is not UNSET:
            meta.output_token_logprobs += self._own(piece.token_ids, piece.logprobs)
        if meta.output_top_logprobs is not UNSET:
            meta.output_top_logprobs += self._tops(piece.logprobs)
        if meta.output_token_ids_logprobs is not UNSET:
            ids = self._sampling.logprob_token_ids
            meta.output_token_ids_logprobs += [list(map(self._scored, ids, entry.named)) for entry in piece.logprobs]
        if piece.prompt_logprobs is not None and self._start_len is not None:
            self._add_prompt(piece.prompt_logprobs, self._start_len)
        if piece.end is not None:
            meta.finish_reason = _finish_reason(piece.end)
            meta.cached_tokens = piece.end.cached_tokens
            meta.e2e_latency = time.monotonic() - self._start_s
            self._add_states(meta, piece.states)
            if self._speculates:
                _add_drafts(meta, piece.end.speculated)
        return choice

    def _add_states(self, meta: MetaInfo, states: Sequence[TokenStates]) -> None:
        """Adds what was computed for tokens, in SGLang's form: hidden states of the prompt, then of each token."""
        if self._states is None or not states:
            return
        if self._sampling.return_hidden_states:
            rows = hidden_states(states, self._states).tolist()
            meta.hidden_states = [rows[: len(self._prompt_ids)], *rows[len(self._prompt_ids) :]]
        if self._sampling.return_routed_experts:
            meta.routed_experts = experts_text(states, self._states)

    def _add_prompt(self, logprobs: Sequence[TokenLogprob], start_len: int) -> None:
        """Adds the prompt's log-probabilities; its first token has none, since no token comes before it."""
        meta, ids = self._choice.meta_info, self._prompt_ids
        own: list[Scored] = [(None, ids[0], self._text(ids[0])), *self._own(ids[1:], logprobs)]
        meta.input_token_logprobs = own[start_len:]
        if meta.input_top_logprobs is not UNSET:
            meta.input_top_logprobs = [None, *self._tops(logprobs)][start_len:]

    def _own(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[Scored]:
        return [self._scored(id, entry.logprob) for id, entry in zip(ids, logprobs, strict=True)]

    def _tops(self, logprobs: Sequence[TokenLogprob]) -> Tops:
        return [[self._scored(*top) for top in entry.top] for entry in logprobs]

    def _scored(self, token_id: int, logprob: float) -> Scored:
        return max(logprob, MIN_LOGPROB), token_id, self._text(token_id)

    def _text(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else name_of(self._tokenizer, token_id)


def _add_drafts(meta: MetaInfo, told: Speculated) -> None:
    meta.spec_verify_ct = told.num_steps
    meta.spec_accept_length = told.accept_length
    meta.spec_accept_rate = told.accept_rate
    meta.spec_accept_histogram = told.histogram
    meta.spec_accept_token_num = told.accepted_tokens
    meta.spec_draft_token_num = told.draft_tokens


def _finish_reason(end: End) -> dict[str, Any]:
    if end.reason is FinishReason.LENGTH:
        return {"type": "length", "length": end.completion_tokens}
    if end.reason is FinishReason.STOP:
        return {"type": "stop", "matched": end.matched_stop}
    return {"type": "abort", "message": "the request was aborted"}
