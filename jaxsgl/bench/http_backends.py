"""The backend for HTTP: OpenAI's completions and chat, and SGLang's /generate. Request bodies, and how events are read.

Prompts are token ids where the protocol and the server take them. Other servers get words: short and common ones, each
about one token in most vocabularies. The server's usage says how many tokens they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from jaxsgl.bench.backend import FLUSH_WAIT_S, Answer, BackendError, Served, Turn
from jaxsgl.bench.http_stream import HttpServer

WORDS = """
the of and to in is was for on that by with as at from it an be this are or his not but had which one he you all new
time may who two more there has will no her they some can out up been other when their year first also day we so only
into over said these people after most about city now like between many then
"""


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Meta(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: dict[str, Any] | None = None


class _Native(msgspec.Struct):
    text: str = ""
    output_ids: msgspec.Raw = msgspec.Raw(b"[]")  # all so far: read once, at the end
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: Any = None


class _Names(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Names]


class _Info(msgspec.Struct):
    vocab_size: int | None = None


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Reset(msgspec.Struct):
    success: bool = True


_read_chunk = msgspec.json.Decoder(_Chunk).decode
_read_native = msgspec.json.Decoder(_Native).decode


def read_openai(answer: Answer, now_s: float, data: bytes) -> None:
    """Reads an event of completions or chat. Its number of tokens is known only if the server reports usage in it."""
    chunk = _read_chunk(data)
    if chunk.error is not None:
        answer.error = str(chunk.error)
        return
    text, num_tokens = "", 0
    if chunk.usage is not None:
        details, num_tokens = chunk.usage.prompt_tokens_details, chunk.usage.completion_tokens
        cached_len = (details and details.cached_tokens) or 0
        answer.count(chunk.usage.prompt_tokens, num_tokens, cached_len)
    for choice in chunk.choices:
        delta = choice.delta
        text += choice.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)) or ""
        if choice.finish_reason is not None:
            answer.ended = True
            if choice.finish_reason in ("abort", "error"):
                answer.error = f"the server ended it: {choice.finish_reason}"
    answer.add(now_s, text, num_tokens)


def read_native(answer: Answer, now_s: float, data: bytes) -> None:
    """Reads an event of /generate, which holds the whole text so far."""
    event = _read_native(data)
    if event.error is not None:
        answer.error = str(event.error)
        return
    meta = event.meta_info
    answer.count(meta.prompt_tokens, meta.completion_tokens, meta.cached_tokens)
    answer.add(now_s, event.text, meta.completion_tokens)
    del answer.texts[:-1]
    if meta.finish_reason is not None:
        if meta.finish_reason.get("type") == "abort":
            answer.error = f"the server ended it: {meta.finish_reason}"
        ids: list[int] = msgspec.json.decode(event.output_ids)
        answer.output_ids = ids if len(ids) == meta.completion_tokens else []


def completions_body(turn: Turn, model: str, ignore_eos: bool) -> dict[str, Any]:
    """The request body for /v1/completions."""
    return {"prompt": turn.prompt_ids(), **_common(turn, model, ignore_eos)}


def words_body(turn: Turn, model: str, ignore_eos: bool) -> dict[str, Any]:
    """The request body for /v1/completions of a server that takes no token ids."""
    return {"prompt": " ".join(text for _, text in _texts(turn)), **_common(turn, model, ignore_eos)}


def chat_body(turn: Turn, model: str, ignore_eos: bool) -> dict[str, Any]:
    """The request body for /v1/chat/completions: outputs are the assistant's messages, prompts are the user's."""
    messages = [{"role": role, "content": text} for role, text in _texts(turn)]
    return {"messages": messages, **_common(turn, model, ignore_eos)}


def native_body(turn: Turn, model: str, ignore_eos: bool) -> dict[str, Any]:
    """The request body for /generate."""
    sampling = {"temperature": 0.0, "max_new_tokens": turn.output_len, "ignore_eos": ignore_eos}
    return {"input_ids": turn.prompt_ids(), "sampling_params": sampling, "stream": True}


def _texts(turn: Turn) -> Iterator[tuple[str, str]]:
    """The pieces of the prompt as (role, words)."""
    answers, words = iter(turn.answers), WORDS.split()
    for piece in turn.pieces:
        if piece is None:
            yield "assistant", next(answers).text
        else:
            yield "user", " ".join(words[id % len(words)] for id in piece)


def _common(turn: Turn, model: str, ignore_eos: bool) -> dict[str, Any]:
    return {
        "model": model,
        "max_tokens": turn.output_len,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **({"ignore_eos": True} if ignore_eos else {}),
    }


@dataclass(frozen=True)
class Dialect:
    """A protocol over HTTP.

    Attributes:
      path: of the request.
      body: makes the request body from turn, model and ignore_eos.
      read: reads an event into an answer, with the time it arrived.
      needs_ids: whether prompts need the token ids of earlier outputs.
      words_body: like `body`, for servers that take no token ids; None if all servers take what `body` makes.
    """

    path: str
    body: Callable[[Turn, str, bool], dict[str, Any]]
    read: Callable[[Answer, float, bytes], None]
    needs_ids: bool
    words_body: Callable[[Turn, str, bool], dict[str, Any]] | None = None


DIALECTS = {
    "openai": Dialect("/v1/completions", completions_body, read_openai, needs_ids=True, words_body=words_body),
    "openai-chat": Dialect("/v1/chat/completions", chat_body, read_openai, needs_ids=False),
    "sglang": Dialect("/generate", native_body, read_native, needs_ids=True),
}


class HttpBackend:
    """A `Backend` over HTTP.

    Args:
      server: address of the server.
      dialect: the protocol.
      model: name of the model for the server; None for the first one that /v1/models lists.
      ignore_eos: whether outputs go on after EOS tokens.
    """

    def __init__(self, server: HttpServer, dialect: Dialect, model: str | None, ignore_eos: bool) -> None:
        self._server = server
        self._dialect = dialect
        self._model = model
        self._ignore_eos = ignore_eos

    async def describe(self) -> Served:
        """Asks /v1/models, /get_model_info if there is one, and for a completion of one token, to see what works."""
        try:
            if self._model is None:
                models = msgspec.json.decode(await self._server.call("GET", "/v1/models"), type=_Models)
                self._model = models.data[0].id
        except (OSError, IndexError, msgspec.DecodeError) as error:
            raise BackendError(f"no model is known: {error!r}; is the server up? Else name it with --model") from None
        try:
            info = msgspec.json.decode(await self._server.call("GET", "/get_model_info"), type=_Info)
        except (OSError, msgspec.DecodeError):
            info = _Info()
        otherwise = self._dialect.words_body
        if otherwise is None or await self._takes_ids():
            return Served(self._model, info.vocab_size)
        self._dialect = replace(self._dialect, body=otherwise, needs_ids=False)
        return Served(self._model, info.vocab_size, words=True)

    async def generate(self, turn: Turn, answer: Answer) -> None:
        """As `Backend` says."""
        complete = False
        try:
            if self._dialect.needs_ids:
                for earlier in turn.answers:
                    await self._tokenize(earlier)
            body = msgspec.json.encode(self._dialect.body(turn, self._model or "default", self._ignore_eos))
            read = self._dialect.read
            answer.sent_s = answer.end_s = time.monotonic()
            complete = await self._server.stream(
                self._dialect.path, body, lambda now_s, data: read(answer, now_s, data)
            )
        except (OSError, msgspec.DecodeError) as error:
            answer.error = answer.error or str(error)
        answer.finish(complete)

    async def flush_cache(self) -> None:
        """As `Backend` says."""
        try:
            await self._server.call("POST", f"/flush_cache?timeout={FLUSH_WAIT_S}")
        except OSError as error:
            if not await self._reset_prefix_cache():
                raise BackendError(f"the cache was not flushed: {error}") from None

    async def close(self) -> None:
        """Does nothing: each request has its own connection."""

    async def _takes_ids(self) -> bool:
        """Whether prompts may be token ids. Raises `BackendError` if a prompt of words fails too."""
        if not await self._refusal([1]):
            return True
        told = await self._refusal(WORDS.split()[0])
        if told:
            raise BackendError(f"nothing is completed: {told}")
        return False

    async def _refusal(self, prompt: list[int] | str) -> str:
        """The error of a completion of one token after `prompt`; empty if it worked."""
        try:
            fields = {"model": self._model, "prompt": prompt, "max_tokens": 1}
            await self._server.call("POST", self._dialect.path, fields)
        except OSError as error:
            return str(error)
        return ""

    async def _reset_prefix_cache(self) -> bool:
        """Flushes as vLLM in its development mode does:

        it may fail with status 200, and older versions send no body.
        """
        try:
            told = await self._server.call("POST", "/reset_prefix_cache")
            return msgspec.json.decode(told or b"{}", type=_Reset).success
        except (OSError, msgspec.DecodeError):
            return False

    async def _tokenize(self, earlier: Answer) -> None:
        """Asks the server for the ids of an output: completions don't report them, and the next prompt needs them."""
        if not earlier.output_ids and earlier.text:
            text = earlier.text  # `content`: llama.cpp's server, which says that anything else has no tokens
            fields = {"model": self._model, "prompt": text, "content": text, "add_special_tokens": False}
            told = await self._server.call("POST", "/tokenize", fields)
            earlier.output_ids = msgspec.json.decode(told, type=_Tokens).tokens
