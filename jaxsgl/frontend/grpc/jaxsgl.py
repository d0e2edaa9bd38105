"""The gRPC service `jaxsgl.v1.Jaxsgl`, our own: text, token ids or chat messages in, text and ids out.

Converts between the service's messages and ours; generation.py does the work. Never knows processes or tokenizers. The
asyncio gRPC server calls it.
"""

from __future__ import annotations

import functools
import platform
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

import grpc

import jaxsgl
from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.generation import FrontEnd, Prompted, RequestOptions, ServedModel
from jaxsgl.frontend.grpc.interceptors import answers_errors, counts_errors, write
from jaxsgl.frontend.pooling import PoolingCall, pool, spec_of
from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc
from jaxsgl.messages.replies import TokenLogprob
from jaxsgl.preprocess.sources import ImageSource, Source, VideoSource
from jaxsgl.requests.grammar import Grammar
from jaxsgl.requests.outputs import Pooling, check_dimensions, embedding_of
from jaxsgl.requests.request import FinishReason, SamplingParams, check_counts
from jaxsgl.text.prompts import ChatPrompt, IdsPrompt, Prompt, TextPrompt
from jaxsgl.text.sample import Piece, Speculated
from jaxsgl.text.tokenizer import Turn

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Jaxsgl"].full_name
_LIBRARIES = ("jax", "jaxlib", "flax", "transformers", "tokenizers", "grpcio", "protobuf", "numpy")
_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}

_OPTIONAL_PARAMS = tuple(
    field.name for field in pb.SamplingParams.DESCRIPTOR.fields if field.has_presence and field.message_type is None
)


class JaxsglService(pb_grpc.JaxsglServicer):
    """The servicer."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._generator = front_end.generator
        self._engine = front_end.engine
        self._metrics = front_end.metrics

    @answers_errors
    @counts_errors
    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        """Streams pieces, or writes each sample as one reply. A cancelled call aborts the request."""
        request_id = request.request_id or uuid.uuid4().hex
        prompted = Prompted(_prompt(request), _sampling(request.sampling), request_id, _options(request))
        prepared = await self._generator.prepare(prompted)
        with self._generator.start(prepared) as generation:
            if request.stream:
                async for piece in generation:
                    await self._write(context, request_id, piece)
            else:
                for piece in await generation.whole():
                    await self._write(context, request_id, piece)

    @answers_errors
    @counts_errors
    async def Embed(self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext) -> pb.EmbedReply:
        """Returns the embedding of a prompt, or the logits of label tokens."""
        request_id = request.request_id or uuid.uuid4().hex
        dimensions = request.dimensions if request.HasField("dimensions") else None
        spec = spec_of(self._generator)
        check_dimensions(spec, dimensions)
        call = PoolingCall(request_id, (_options(request),))
        (answer,) = await pool(self._generator, [_prompt(request)], call, Pooling(tuple(request.label_ids)))
        pooled = answer.pooled
        vector = embedding_of(pooled, spec, dimensions).tolist() if pooled.hidden else ()
        usage = pb.Usage(prompt_tokens=answer.prompt_tokens, cached_tokens=answer.cached_tokens)
        return pb.EmbedReply(
            request_id=request_id, embedding=vector, logits=pooled.logits, usage=usage, log_total=pooled.log_total
        )

    async def _write(self, context: grpc.aio.ServicerContext, request_id: str, piece: Piece) -> None:
        reply = partial(_reply, request_id, piece)
        scored = piece.logprobs or piece.prompt_logprobs
        await write(context, await self._generator.off_loop(piece.num_scores, reply) if scored else reply())

    @answers_errors
    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortReply:
        """Ends a running request by its id."""
        return pb.AbortReply(found=await self._engine.abort(request.request_id))

    @answers_errors
    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext) -> pb.ModelInfo:
        """Returns what is served."""
        return _model_info(self._generator.model, self._engine.load.weight_version)


def _options(request: pb.GenerateRequest | pb.EmbedRequest) -> RequestOptions:
    options = RequestOptions(request.priority, request.cache_salt, request.adapter)
    if isinstance(request, pb.EmbedRequest):
        return options
    speculative = request.speculative if request.HasField("speculative") else True
    return replace(options, speculative=speculative, prediction=request.prediction)


def _prompt(request: pb.GenerateRequest | pb.EmbedRequest) -> Prompt:
    kind = request.WhichOneof("input")
    media = tuple(map(source_of, request.media)) if isinstance(request, pb.GenerateRequest) else ()
    if kind == "text":
        return TextPrompt(request.text, media=media)
    if kind == "token_ids":
        return IdsPrompt(request.token_ids.ids, media=media)
    if kind == "chat" and isinstance(request, pb.GenerateRequest):
        if media:
            raise InvalidRequest("the request has a chat and media: put the media into the parts of its messages")
        return chat_prompt(request.chat.messages)
    raise InvalidRequest("the request has no input: set one of text, token_ids and chat")


def _sampling(params: pb.SamplingParams) -> SamplingParams:
    check_counts(params.stop_token_ids, params.stop, params.logit_bias)
    given = {name: getattr(params, name) for name in _OPTIONAL_PARAMS if params.HasField(name)}
    return SamplingParams(
        **given,
        logit_bias=dict(params.logit_bias),
        stop_token_ids=tuple(params.stop_token_ids),
        logprob_token_ids=tuple(params.logprob_token_ids),
        stop=tuple(params.stop),
        include_stop_str_in_output=params.include_stop_str_in_output,
        ignore_eos=params.ignore_eos,
        grammar=_grammar(params.grammar) if params.HasField("grammar") else None,
    )


def _grammar(grammar: pb.Grammar) -> Grammar:
    kind = grammar.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("the grammar is of no kind: set one of its fields, or leave the grammar out")
    if kind == "choice":
        return Grammar.choice(list(grammar.choice.texts))
    return Grammar.json_object() if kind == "json_object" else Grammar(kind, getattr(grammar, kind))


def _reply(request_id: str, piece: Piece) -> pb.GenerateReply:
    reply = pb.GenerateReply(request_id=request_id, index=piece.index, text=piece.text, token_ids=piece.token_ids)
    if piece.logprobs:
        reply.logprobs.extend(map(_logprob, piece.logprobs))
    if piece.prompt_logprobs is not None:
        reply.prompt_logprobs.extend(map(_logprob, piece.prompt_logprobs))
    if piece.end is not None:
        reply.finish_reason = _FINISH_REASONS[piece.end.reason]
        reply.weight_version = piece.weight_version
        if isinstance(piece.end.matched_stop, str):
            reply.matched_stop_string = piece.end.matched_stop
        elif piece.end.matched_stop is not None:
            reply.matched_stop_token = piece.end.matched_stop
        reply.usage.prompt_tokens = piece.end.prompt_tokens
        reply.usage.cached_tokens = piece.end.cached_tokens
        reply.usage.completion_tokens = piece.end.completion_tokens
        if piece.end.speculated.num_steps:
            reply.drafts.CopyFrom(_drafts(piece.end.speculated))
    return reply


def _drafts(told: Speculated) -> pb.Drafts:
    return pb.Drafts(
        steps=told.num_steps,
        draft_tokens=told.draft_tokens,
        accepted_tokens=told.accepted_tokens,
        histogram=told.histogram,
        accepted_prediction_tokens=told.accepted_prediction_tokens,
        rejected_prediction_tokens=told.rejected_prediction_tokens,
    )


def _logprob(of_token: TokenLogprob) -> pb.TokenLogprob:
    top = (pb.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in of_token.top)
    return pb.TokenLogprob(logprob=of_token.logprob, top=top, named=of_token.named)


def _model_info(model: ServedModel, weight_version: str) -> pb.ModelInfo:
    info = model.info
    return pb.ModelInfo(
        model_path=info.model_path,
        architecture=info.architecture,
        dtype=info.dtype,
        vocab_size=info.limits.vocab_size,
        context_length=info.limits.context_length,
        pool_tokens=info.limits.pool_tokens,
        eos_token_ids=info.eos_token_ids,
        page_size=info.page_size,
        max_running_requests=info.max_running_requests,
        attention_backend=info.attention_backend,
        platform=info.platform,
        kv_bytes=info.kv_bytes,
        warmup_s=info.warmup_s,
        has_tokenizer=model.tokenizer.exists,
        has_chat_template=model.tokenizer.has_chat_template,
        versions=_versions(),
        weight_version=weight_version,
    )


@functools.cache
def _versions() -> dict[str, str]:
    libraries = {name: metadata.version(name) for name in _LIBRARIES}
    return {"jaxsgl": jaxsgl.__version__, "python": platform.python_version(), **libraries}


def source_of(media: pb.Media) -> Source:
    """Returns what a message names. Raises `InvalidRequest`."""
    if bool(media.data) + bool(media.url) + bool(media.frames) != 1:
        raise InvalidRequest("media has none or several of data, url and frames: set one")
    fps = media.fps or None
    if fps is not None and not 0.001 <= fps <= 1000:
        raise InvalidRequest(f"fps is {fps}, but must be 0.001 to 1000")
    if media.frames:
        return VideoSource(tuple(media.frames), fps)
    named = media.data or media.url
    return VideoSource(named, fps) if media.kind == pb.Media.VIDEO else ImageSource(named)


def chat_prompt(messages: Sequence[pb.ChatMessage]) -> ChatPrompt:
    """Returns the prompt of a chat. Raises `InvalidRequest`."""
    if not any(message.parts for message in messages):
        return ChatPrompt(messages)
    media: list[Source] = []
    return ChatPrompt([_turn(message, media) for message in messages], media=tuple(media))


def _turn(message: pb.ChatMessage, media: list[Source]) -> Turn:
    if not message.parts:
        return {"role": message.role, "content": message.content}
    if message.content:
        raise InvalidRequest("a message has both content and parts: set one")
    kinds = [part.WhichOneof("part") for part in message.parts]
    if None in kinds:
        raise InvalidRequest(f"part {kinds.index(None)} of a message is empty: set text or media")
    if "media" not in kinds:  # as one text, as over HTTP: templates of models for text alone know no parts
        return {"role": message.role, "content": "\n".join(part.text for part in message.parts)}
    parts: list[dict[str, Any]] = []
    for part, kind in zip(message.parts, kinds, strict=True):
        if kind == "media":
            media.append(source_of(part.media))
            parts.append({"type": "image" if isinstance(media[-1], ImageSource) else "video"})
        else:
            parts.append({"type": "text", "text": part.text})
    return {"role": message.role, "content": parts}
