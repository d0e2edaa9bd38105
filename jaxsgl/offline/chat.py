"""Conversations of `LLM.chat`: OpenAI's messages as mappings, whose pictures, videos and sounds are objects or files.

Owns what a turn may hold; media.py reads the files, the tokenizer renders the turns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jaxsgl.errors import InvalidRequest
from jaxsgl.offline.media import content_of, sound_of, video_of
from jaxsgl.preprocess.sources import File, ImageFile
from jaxsgl.text.tokenizer import Turn

Conversation: TypeAlias = Sequence[Mapping[str, Any]]

_KEYS = {"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"}


def conversations_of(given: Any) -> list[Conversation]:
    """Returns one conversation, or many, as a list of them. Raises `InvalidRequest`."""
    several = _as_list(given, "conversations are")
    if several and isinstance(several[0], Mapping):
        return [several]
    return [_as_list(turns, "a conversation is") for turns in several]


def _as_list(given: Any, what: str) -> list[Any]:
    fits = hasattr(given, "__len__") and hasattr(given, "__iter__") and not isinstance(given, str | bytes | Mapping)
    if not fits:
        raise InvalidRequest(f"{what} of type {type(given).__name__}, but a conversation is a list of turns: write "
                             '[{"role": "user", "content": ...}], or call generate')  # fmt: skip
    return list(given)


def read_chat(turns: Sequence[Mapping[str, Any]]) -> tuple[list[Turn], list[File]]:
    """Returns `turns` as chat templates take them, and their files. Raises `InvalidRequest`.

    Texts of several parts are joined by line breaks, as servers do, unless there are media among them.
    """
    files: list[File] = []
    return [_turn(turn, files) for turn in turns], files


def _turn(turn: Any, files: list[File]) -> Turn:
    if not isinstance(turn, Mapping):
        raise InvalidRequest(f'a turn is a {type(turn).__name__}, but must be {{"role": ..., "content": ...}}')
    if not ("role" in turn and ("content" in turn or turn.get("tool_calls"))) or set(turn) - _KEYS:
        raise InvalidRequest(f"a turn has the keys {sorted(turn)}, but needs role and content, or tool_calls, and may "
                             "have name, reasoning_content and tool_call_id")  # fmt: skip
    read = {key: value for key, value in turn.items() if value is not None}
    read["content"] = _content(turn.get("content"), files)
    if calls := turn.get("tool_calls"):
        read["tool_calls"] = [_call(call) for call in calls]
    return read


def _content(content: Any, files: list[File]) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"a content is a {type(content).__name__}, but must be a text or a list of parts")
    parts = [_part(part, files) for part in content]
    return "\n".join(part["text"] for part in parts) if all(part["type"] == "text" for part in parts) else parts


def _call(call: Any) -> dict[str, Any]:
    """Returns a call with its arguments as an object, which is what templates expect."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
        raise InvalidRequest('a call must be as {"id": ..., "function": {"name": ..., "arguments": ...}}, not '
                             f"{call!r:.200}")  # fmt: skip
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(
            f"the arguments of the call of {function['name']} are no JSON object: give one, or its text"
        )
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def _part(part: Any, files: list[File]) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise InvalidRequest(f'a part is a {type(part).__name__}, but must be as {{"type": "text", "text": ...}}')
    kind = part.get("type")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise InvalidRequest('a part is of type text without a text: give {"type": "text", "text": ...}')
        return {"type": "text", "text": part["text"]}
    if kind not in ("image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio"):
        raise InvalidRequest(
            f"a part is of type {kind!r}, but must be text, image, image_url, video, video_url, audio, audio_url or "
            "input_audio"
        )
    given, fps = part.get(kind), part.get("fps")
    if kind == "input_audio":
        if not (isinstance(given, Mapping) and isinstance(given.get("data"), str)):
            raise InvalidRequest('a part is of type input_audio without data: give {"data": base64, "format": ...}')
        files.append(sound_of(f"data:;base64,{given['data']}"))
        return {"type": "audio", "audio": ""}
    if isinstance(given, Mapping):
        fps = given.get("fps", fps)
        given = given.get("url")
    if kind.startswith("image"):
        files.append(ImageFile(content_of(given)))
        return {"type": "image"}
    if kind.startswith("audio"):
        files.append(sound_of(given))
        return {"type": "audio", "audio": ""}
    files.append(video_of(given, _fps(fps)))
    return {"type": "video"}


def _fps(given: Any) -> float | None:
    if given is None:
        return None
    if isinstance(given, bool) or not (isinstance(given, int | float) and 0.001 <= given <= 1000):
        raise InvalidRequest(f"fps is {given!r:.100}, but must be a number of 0.001 to 1000")
    return float(given)
