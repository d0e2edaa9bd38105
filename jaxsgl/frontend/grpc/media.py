"""Pictures and videos in our own gRPC service: messages to sources. jaxsgl.py calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.preprocess.sources import ImageSource, Source, VideoSource
from jaxsgl.text.prompts import ChatPrompt
from jaxsgl.text.tokenizer import Turn


def source_of(media: pb.Media) -> Source:
    """Returns what a message names. Raises `InvalidRequest`."""
    if bool(media.data) + bool(media.url) + bool(media.frames) != 1:
        raise InvalidRequest("media has none or several of data, url and frames: set one")
    fps = media.fps or None
    if fps is not None and not 0 < fps <= 1000:
        raise InvalidRequest(f"fps is {fps}, but must be above 0, up to 1000")
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
    parts: list[dict[str, Any]] = []
    for part in message.parts:
        if part.WhichOneof("part") == "media":
            media.append(source_of(part.media))
            parts.append({"type": "image" if isinstance(media[-1], ImageSource) else "video"})
        else:
            parts.append({"type": "text", "text": part.text})
    return {"role": message.role, "content": parts}
