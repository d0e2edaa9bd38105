"""From a prompt to pieces of text: what all client protocols share.

Tokenizes and checks a prompt, submits it, and turns the engine's replies into pieces of text and ids. Knows no
protocol: gRPC (service.py) and whatever comes beside it call this.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

from jaxsgl.errors import EngineUnavailable, InvalidRequest
from jaxsgl.frontend.detokenizer import Detokenizer
from jaxsgl.frontend.engine_client import EngineClient, ReplyStream
from jaxsgl.frontend.prompts import Prompt, tokenize
from jaxsgl.frontend.tokenizer import Tokenizer
from jaxsgl.messages import EngineInfo, Reply
from jaxsgl.request import FinishReason, Request, SamplingParams, check_request

MAX_REQUEST_ID_CHARS = 256

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """What is known once the engine is ready."""

    info: EngineInfo
    tokenizer: Tokenizer


@dataclass(frozen=True)
class End:
    """How a generation ended. `matched_stop_token` is the EOS or stop token, if that was why."""

    reason: FinishReason
    matched_stop_token: int | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Piece:
    """What is new since the last piece; the last one holds the end."""

    text: str
    token_ids: list[int]
    end: End | None


class Generation:
    """One running request, as an asynchronous iterator of pieces."""

    def __init__(self, request: Request, stream: ReplyStream, detokenizer: Detokenizer) -> None:
        self._request = request
        self._stream = stream
        self._detokenizer = detokenizer
        self.num_tokens = 0
        self._ended = False

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Piece:
        """Raises `InvalidRequest` if the scheduler refused the request, `EngineUnavailable` if the engine is gone."""
        if self._ended:
            raise StopAsyncIteration
        replies = await self._stream.next()
        last = replies[-1]
        if last.error is not None:
            raise InvalidRequest(last.error)
        ids = [token_id for reply in replies for token_id in reply.token_ids]
        self.num_tokens += len(ids)
        if last.finish_reason is None:
            return Piece(self._detokenizer.feed(ids), ids, None)
        self._ended = True
        end = self._end(last, last.finish_reason, ids)
        visible = ids if end.matched_stop_token is None else ids[:-1]
        return Piece(self._detokenizer.feed(visible) + self._detokenizer.finish(), ids, end)

    async def whole(self) -> Piece:
        """Waits for the end and returns everything as one piece."""
        texts: list[str] = []
        ids: list[int] = []
        end: End | None = None
        async for piece in self:
            texts.append(piece.text)
            ids += piece.token_ids
            end = piece.end
        return Piece("".join(texts), ids, end)

    def _end(self, last: Reply, reason: FinishReason, new_ids: list[int]) -> End:
        return End(
            reason=reason,
            matched_stop_token=new_ids[-1] if reason is FinishReason.STOP and new_ids else None,
            prompt_tokens=len(self._request.prompt_ids),
            cached_tokens=last.cached_tokens,
            completion_tokens=self.num_tokens,
        )


class Generator:
    """Serves prompts with one model. Long prompts are tokenized in `threads`."""

    def __init__(self, client: EngineClient, threads: Executor) -> None:
        self._client = client
        self._threads = threads
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
        self._client.accept()

    async def prepare(self, prompt: Prompt, sampling: SamplingParams, request_id: str) -> Request:
        """Tokenizes and checks. Raises `InvalidRequest`, or `EngineUnavailable` until the engine is ready."""
        model = self.model
        if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS:
            raise InvalidRequest(
                f"request_id has {len(request_id)} characters, but must have 1 to {MAX_REQUEST_ID_CHARS}"
            )
        limits = model.info.limits
        ids = await tokenize(prompt, model.tokenizer, limits.context_length, self._threads)
        request = Request(request_id, ids, sampling)
        check_request(request, limits)
        return request

    @contextlib.contextmanager
    def start(self, request: Request) -> Iterator[Generation]:
        """Submits a prepared request; leaving the block before its end aborts it. Errors as `EngineClient.open`."""
        start_s = time.monotonic()
        with self._client.open(request) as stream:
            generation = Generation(request, stream, self.model.tokenizer.detokenizer())
            try:
                yield generation
            finally:
                logger.debug(
                    "request %s: %d prompt tokens, %d new, %s, %.3f s",
                    stream.engine_id,
                    len(request.prompt_ids),
                    generation.num_tokens,
                    "ended" if stream.ended else "left by the client",
                    time.monotonic() - start_s,
                )
