"""From a prompt to pieces of text: the work that all client protocols share.

Tokenizes and checks a prompt, submits it, and turns the engine's replies into pieces of text and ids. Never knows a
protocol: the services of grpc and the endpoints of http call it, and get it in a `FrontEnd`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from jaxsgl import logs
from jaxsgl.config.features import ALL_IN_ONE
from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import EngineUnavailable, InvalidRequest, Overloaded, RequestFailed, TimedOut
from jaxsgl.frontend.access import Access, cache_namespace
from jaxsgl.frontend.engines.link import ReplyStream
from jaxsgl.frontend.engines.replicas import Replicas
from jaxsgl.frontend.legs import PrefillHosts, leg_sampling
from jaxsgl.frontend.metrics.measurements import Metrics, Timing
from jaxsgl.frontend.profiles import Profiles
from jaxsgl.frontend.tracing import NO_TRACER, Tracer
from jaxsgl.frontend.workers.channel import Counts
from jaxsgl.messages.replies import EngineInfo, RefusalKind, Reply
from jaxsgl.requests.media import MediaItem
from jaxsgl.requests.outputs import Pooled, Pooling
from jaxsgl.requests.request import (
    Rendezvous,
    Request,
    SamplingParams,
    check_cache_salt,
    check_num_scores,
    check_request,
)
from jaxsgl.text.detokenizer import Detokenizer, NoText
from jaxsgl.text.dialects import Dialect
from jaxsgl.text.prompts import IdsPrompt, Prompt, encode_prediction, num_bad_chars, tokenize_all, with_bad_word_ids
from jaxsgl.text.sample import End, Piece, Sample, detokenizer_of, join
from jaxsgl.text.stop_regex import check_patterns
from jaxsgl.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxsgl.frontend.media.loader import MediaLoader

MAX_REQUEST_ID_CHARS = 256
INLINE_SCORES = 1000  # that an endpoint may write out on the event loop: a few milliseconds
REQUESTS_A_TURN = 64  # that a call may check or submit in one turn of the event loop: a few milliseconds
TOKENS_LIKE_A_REQUEST = 1000  # to check so many tokens takes as long as to check a request

TEXT_ALONE = (
    "the request has images, videos or sounds, but the model takes text alone: leave them out, or ask a server whose "
    "model has a tower for them"
)

ResultT = TypeVar("ResultT")

_REFUSALS = {
    RefusalKind.INVALID: InvalidRequest,
    RefusalKind.OVERLOADED: Overloaded,
    RefusalKind.WAITED: EngineUnavailable,  # as in SGLang: gateways send it to another worker then
    RefusalKind.RAN: TimedOut,
    RefusalKind.FAILED: RequestFailed,
    RefusalKind.PEER: EngineUnavailable,
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """The model being served, known once the engine is ready.

    `dialect` is how it writes reasoning and calls; `media` prepares pictures, videos and sounds, or is None
    if it takes text alone. `sampling_defaults` are fields of `SamplingParams` for requests that leave them out.
    """

    info: EngineInfo
    tokenizer: Tokenizer
    dialect: Dialect = field(default_factory=Dialect)
    media: MediaLoader | None = None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RequestOptions:
    """What is asked of a prompt apart from its sampling parameters; made once of a body.

    Attributes:
      priority: as in `Request`.
      cache_salt: prefixes are shared with requests of the same tenant and of an equal salt alone.
      adapter: the name of a LoRA adapter; "" for none.
      room: where the prefill and the decode leg meet, or None if there is one leg.
      pooling: what to pool instead of generating tokens, or None.
      speculative: as in `Request`.
      prediction: a text that is expected as the output; "": none is.
    """

    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    room: Rendezvous | None = None
    pooling: Pooling | None = None
    speculative: bool = True
    prediction: str = ""


@dataclass(frozen=True)
class Prompted:
    """One prompt of a call, and all that is asked of it."""

    prompt: Prompt
    sampling: SamplingParams
    request_id: str
    options: RequestOptions = RequestOptions()


def prompted_all(
    prompts: Sequence[Prompt], sampling: SamplingParams, call_id: str, options: Sequence[RequestOptions]
) -> list[Prompted]:
    """Returns the prompts of a call that are all sampled alike. One alone has the call's id, several are numbered."""
    ids = [call_id] if len(prompts) == 1 else [f"{call_id}-{number}" for number in range(len(prompts))]
    return [
        Prompted(prompt, sampling, each_id, of_one)
        for prompt, each_id, of_one in zip(prompts, ids, options, strict=True)
    ]


class Pause:
    """Lets other calls run between the parts of a loop over many requests."""

    def __init__(self) -> None:
        self._done = 0

    async def after(self, num_requests: int) -> None:
        """Ends the turn of the event loop if enough was done in it."""
        self._done += num_requests
        if self._done >= REQUESTS_A_TURN:
            self._done = 0
            await asyncio.sleep(0)


class Generation:
    """One running request, as an asynchronous iterator of pieces of its samples.

    Attributes:
      ends: the ends of samples, in the order in which they came.
      pooled: the answer to a request for pooling, once it has ended.
    """

    def __init__(
        self, request: Request, stream: ReplyStream, new_detokenizer: Callable[[], Detokenizer], timing: Timing
    ) -> None:
        self._stream = stream
        self._timing = timing
        self._samples = [Sample(request, index, new_detokenizer()) for index in range(request.sampling.n)]
        self._pieces: deque[Piece] = deque()
        self.ends: list[End] = []
        self.pooled: Pooled | None = None

    @property
    def num_tokens(self) -> int:
        """Output tokens of all samples so far."""
        return sum(sample.num_tokens for sample in self._samples)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Piece:
        """Waits for the next piece.

        Raises:
          InvalidRequest: the scheduler refused the request.
          Overloaded: the scheduler's queue is full, or too many replies were left unread.
          TimedOut: the request took too long.
          RequestFailed: the engine failed at this request.
          EngineUnavailable: the engine is gone, or let the request wait for too long.
        """
        while not self._pieces:
            if len(self.ends) == len(self._samples):
                raise StopAsyncIteration
            try:
                self._take(await self._stream.next())
            except Exception as error:
                self._timing.failed(error)
                raise
        return self._pieces.popleft()

    async def whole(self) -> list[Piece]:
        """Waits for the end and returns each sample as one piece, in the order of the samples."""
        pieces: list[list[Piece]] = [[] for _ in self._samples]
        async for piece in self:
            pieces[piece.index].append(piece)
        return [join(of_sample) for of_sample in pieces]

    def _take(self, replies: list[Reply]) -> None:
        """Makes a piece for each sample with replies. A sample that a stop string ended is ended in the engine too."""
        of_sample: dict[int, list[Reply]] = {}
        for reply in replies:
            if reply.refusal is not None:
                raise _REFUSALS[reply.refusal.kind](reply.refusal.text)
            if reply.pooled is not None:
                self.pooled = reply.pooled
            if reply.times is not None:
                self._timing.engine_times(reply.index, reply.times)
            of_sample.setdefault(reply.index, []).append(reply)
        for index, news in of_sample.items():
            sample = self._samples[index]
            if not sample.ended:
                piece = sample.take(news, self._stream.weight_version)
                self._pieces.append(piece)
                if piece.token_ids:
                    self._timing.tokens(index, len(piece.token_ids))
                if piece.end is not None:
                    self.ends.append(piece.end)
                    self._timing.sample_ended(index, piece.end)
                    self._stream.end_sample(index)


class Generator:
    """Serves prompts with one model.

    Long prompts are tokenized in `threads`; `metrics` counts each request; a request that takes longer than `timeout_s`
    seconds is ended; `mode` says which leg of requests this server computes, `prefill_hosts` where prefill may be.
    Unless it `speculates`, predictions are of no use, and are not read. Each request ends with a line at `log_level`,
    and with a span of `tracer`.
    """

    def __init__(
        self,
        engine: Replicas,
        threads: Executor,
        metrics: Metrics,
        timeout_s: float,
        mode: str = ALL_IN_ONE,
        prefill_hosts: Sequence[str] = (),
        speculates: bool = False,
        log_level: int = logging.DEBUG,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._engine = engine
        self._mode = mode
        self._speculates = speculates
        self._prefill_hosts = PrefillHosts(prefill_hosts)
        self._threads = threads
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._log_level = log_level
        self._tracer = tracer
        self._model: ServedModel | None = None

    @property
    def model(self) -> ServedModel:
        """The model being served. Raises `EngineUnavailable` until the engine is ready."""
        if self._model is None:
            raise EngineUnavailable("the engine is still starting: try again later")
        return self._model

    def serve(self, model: ServedModel) -> None:
        """Lets requests in."""
        self._model = model
        self._engine.accept()

    async def prepare(self, prompted: Prompted) -> Request:
        """Tokenizes and checks. Raises `InvalidRequest`, or `EngineUnavailable` until the engine is ready."""
        (request,) = await self.prepare_all([prompted])
        return request

    async def prepare_all(self, prompteds: Sequence[Prompted]) -> list[Request]:
        """Tokenizes and checks all prompts of one call, like `prepare`. Other calls go on meanwhile.

        The prompts of a call are either all for pooling, or none of them.
        """
        logs.name_unnamed_request(prompteds[0].request_id)
        start_s = self._metrics.clock()
        with self._metrics.counting_errors():
            model = self.model
            for prompted in prompteds:
                _check_id(prompted.request_id)
                if prompted.sampling.stop or prompted.sampling.stop_regex:
                    model.tokenizer.check_text_comes_back()
            samplings = await self._read_samplings([prompted.sampling for prompted in prompteds])
            try:
                read = await self._read_all(
                    [prompted.prompt for prompted in prompteds], 1 if prompteds[0].options.pooling is None else 0
                )
            except InvalidRequest:
                with self.telling_other_legs(self._unread(prompteds, samplings)):
                    raise
            predictions = [await self._read_prediction(prompted.options.prediction) for prompted in prompteds]
            limits, requests, pause = model.info.limits, list[Request](), Pause()
            for prompted, sampling, (ids, media), prediction in zip(
                prompteds, samplings, read, predictions, strict=True
            ):
                requests.append(self._request(prompted, sampling, ids, media, prediction))
            with self.telling_other_legs(requests):
                for request in requests:
                    check_request(request, limits)
                    await pause.after(1 + len(request.prompt_ids) // TOKENS_LIKE_A_REQUEST)
                check_num_scores(requests, limits)
            self._metrics.prepare_s.observe(self._metrics.clock() - start_s, len(requests))
            return requests

    def _unread(self, prompteds: Sequence[Prompted], samplings: Sequence[SamplingParams]) -> list[Request]:
        """The legs of prompts of a call that could not be read, as far as the ids are known, by which rooms are named.

        Contexts of the two servers may differ, and gateways send ids.
        """
        legs = [
            (prompted, sampling, list(prompted.prompt.ids))
            for prompted, sampling in zip(prompteds, samplings, strict=True)
            if prompted.options.room is not None and isinstance(prompted.prompt, IdsPrompt)
        ]
        return [self._request(prompted, sampling, ids, (), []) for prompted, sampling, ids in legs]

    @contextlib.contextmanager
    def telling_other_legs(self, requests: Sequence[Request]) -> Iterator[None]:
        """Has the servers of the other legs of a call told of an `InvalidRequest` that leaves this block.

        They would wait for this leg until their time is up.
        """
        try:
            yield
        except InvalidRequest as error:
            for request in requests:
                if request.room is not None:
                    own_id = f"{request.request_id}-refused"  # a request may be refused since its id is in use
                    refused = msgspec.structs.replace(request, request_id=own_id, media=(), refused=str(error))
                    with (
                        contextlib.suppress(InvalidRequest, EngineUnavailable),
                        self._engine.open(refused, request.rank),
                    ):
                        pass
            raise

    async def _read_samplings(self, samplings: Sequence[SamplingParams]) -> Sequence[SamplingParams]:
        """Checks patterns, and returns `samplings` with the tokens of their bad words."""
        for patterns in {sampling.stop_regex for sampling in samplings if sampling.stop_regex}:
            await asyncio.get_running_loop().run_in_executor(self._threads, check_patterns, patterns)
        work = partial(with_bad_word_ids, samplings, self.model.tokenizer)
        return await self.off_loop(num_bad_chars(samplings), work)

    async def _read_prediction(self, text: str) -> list[int]:
        """Returns the ids of what is expected as the output."""
        if not text or not self._speculates:
            return []
        model = self.model
        work = partial(encode_prediction, text, model.tokenizer, model.info.limits.context_length)
        return await self.off_loop(len(text), work)

    def _request(
        self,
        prompted: Prompted,
        sampling: SamplingParams,
        ids: list[int],
        media: tuple[MediaItem, ...],
        prediction_ids: list[int],
    ) -> Request:
        """With a room, the request has the parameters of this server's leg. Raises `InvalidRequest`."""
        options = prompted.options
        if options.room is not None:
            if self._mode == "decode":
                self._prefill_hosts.check(options.room.host)
            sampling = leg_sampling(sampling, self._mode)
        check_cache_salt(options.cache_salt)  # its namespace is short, whatever it is
        return Request(
            prompted.request_id,
            ids,
            sampling,
            options.priority,
            cache_namespace(options.cache_salt),
            options.room,
            media,
            pooling=options.pooling,
            adapter=options.adapter,
            speculative=options.speculative,
            prediction_ids=prediction_ids,
        )

    async def tokenize_all(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Returns the ids of each of `prompts`; the context must have room for a token more.

        Raises `InvalidRequest`, or `EngineUnavailable` until the engine is ready.
        """
        return [ids for ids, _ in await self._read_all(prompts, 1)]

    async def _read_all(
        self, prompts: Sequence[Prompt], least_output: int
    ) -> list[tuple[list[int], tuple[MediaItem, ...]]]:
        """The ids and media of `prompts`; the context must have room for `least_output` (0 or 1) tokens more."""
        model = self.model
        limits = model.info.limits

        async def tokenize(given: Sequence[Prompt]) -> list[list[int]]:
            return await tokenize_all(given, model.tokenizer, limits.context_length, self._threads, least_output)

        if any(prompt.media for prompt in prompts):
            if model.media is None:
                raise InvalidRequest(TEXT_ALONE)
            if any(prompt.truncation for prompt in prompts):
                raise InvalidRequest("truncate_prompt_tokens could cut pictures or sounds: leave it out")
            return await model.media.prepare_all(prompts, tokenize)
        items = (prompt.items if isinstance(prompt, IdsPrompt) else () for prompt in prompts)
        return list(zip(await tokenize(prompts), items, strict=True))

    async def off_loop(self, num_scores: int, work: Callable[[], ResultT]) -> ResultT:
        """Returns the result of `work` on `num_scores` log-probabilities or tokens: from a thread, if they are many."""
        if num_scores <= INLINE_SCORES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def decode(self, ids: list[int], with_names: bool = False) -> str:
        """Returns the text of `ids`, `with_names` of special tokens or not; empty for a model without a tokenizer."""
        tokenizer = self.model.tokenizer
        if not tokenizer.exists:
            return ""
        return await asyncio.get_running_loop().run_in_executor(self._threads, tokenizer.decode, ids, with_names)

    @contextlib.contextmanager
    def start(
        self, request: Request, text: bool = True, rank: int | None = None, visible: frozenset[int] = frozenset()
    ) -> Iterator[Generation]:
        """Submits a prepared request; leaving the block before its end aborts it. Raises what `Replicas.open` raises.

        Without `text`, pieces hold ids only, which saves the work of detokenizing; stop strings are not found then. The
        request goes to the replica `rank`, or to the one that suits it best if that is None. The special tokens of
        `visible` have their names in the text.
        """
        detokenizer = partial(detokenizer_of, self.model.tokenizer, request.sampling, visible) if text else NoText
        timing = Timing(self._metrics, request.sampling.n)
        with timing, self._open(request, rank) as stream:
            generation = Generation(request, stream, detokenizer, timing)
            if request.media:  # on their way; megabytes that this process needs no more
                msgspec.structs.force_setattr(request, "media", ())
            timer = asyncio.get_running_loop().call_later(self._timeout_s, self._time_out, stream)
            try:
                with self._tracer.request(request, generation, timing):
                    yield generation
            finally:
                timer.cancel()
                if logger.isEnabledFor(self._log_level):
                    _log_end(self._log_level, stream.engine_id, request, generation, timing)

    @contextlib.contextmanager
    def _open(self, request: Request, rank: int | None) -> Iterator[ReplyStream]:
        """As `Replicas.open`; the server of the other leg is told if it is refused."""
        with contextlib.ExitStack() as stack:
            with self.telling_other_legs([request]):
                stream = stack.enter_context(self._engine.open(request, rank))
            yield stream

    def _time_out(self, stream: ReplyStream) -> None:
        stream.fail(TimedOut(f"the request took longer than {self._timeout_s:g} s (--request-timeout-s): ask for less"))


class Peers(Protocol):
    """The other front-end processes of the same server."""

    async def counts(self) -> Counts:
        """Returns what all of them have counted so far, this one included. Raises `EngineUnavailable`."""
        ...


@dataclass(frozen=True)
class FrontEnd:
    """What the handlers of every protocol are given.

    Attributes:
      config: flags.
      access: the keys, and what they grant.
      engine: the replicas: open calls, commands, the load, and why requests are refused.
      generator: prompts to pieces of text; knows the model.
      metrics: what is counted and timed, in this process.
      profiles: orders of the profiler.
      peers: the other front-end processes, or None if there are none.
      tracer: makes spans of requests.
    """

    config: ServerConfig
    access: Access
    engine: Replicas
    generator: Generator
    metrics: Metrics
    profiles: Profiles
    peers: Peers | None = None
    tracer: Tracer = NO_TRACER

    async def num_open(self) -> int:
        """Returns the number of open calls of all front-end processes."""
        return self.engine.num_open if self.peers is None else (await self.peers.counts()).num_open


def _check_id(request_id: str) -> None:
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise InvalidRequest(f"request_id has {len(request_id)} characters, but must have 1 to {MAX_REQUEST_ID_CHARS}")


def _log_end(level: int, engine_id: str, request: Request, generation: Generation, timing: Timing) -> None:
    fields = {
        "engine_id": engine_id,
        "prompt_tokens": len(request.prompt_ids),
        "output_tokens": generation.num_tokens,
        "cached_tokens": max((end.cached_tokens for end in generation.ends), default=0),
        "finish_reason": ",".join(end.reason.value for end in generation.ends) or "unfinished",
        "queue_s": None if timing.stages is None else timing.stages.queue_s,
        "prefill_s": None if timing.stages is None else timing.stages.prefill_s,
        "first_token_s": timing.first_token_s,
        "total_s": timing.total_s,
    }
    logger.log(
        level,
        "request %(engine_id)r: %(prompt_tokens)d prompt tokens, %(cached_tokens)d cached, %(output_tokens)d new, "
        "%(finish_reason)s, %(total_s).3f s",
        fields,
        extra=fields,
    )
