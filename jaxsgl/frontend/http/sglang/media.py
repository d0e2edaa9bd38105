"""SGLang's image_data and video_data: which pictures belong to which prompt. routes.py calls `with_media`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.http.sglang.schemas import GenerateBody
from jaxsgl.preprocess.sources import ImageSource, Source, VideoSource
from jaxsgl.text.prompts import Prompt

_HAS_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:")

Given: TypeAlias = "str | list[str | list[str] | None] | None"
SourceT = TypeVar("SourceT", bound=Source)


def with_media(prompts: Sequence[Prompt], body: GenerateBody) -> list[Prompt]:
    """Returns `prompts` with the pictures and videos of `body`. Raises `InvalidRequest`."""
    if body.image_data is None and body.video_data is None:
        return list(prompts)
    several = len(prompts) > 1 or _is_batch(body)
    images = _of_prompts("image_data", body.image_data, len(prompts), several, _image)
    videos = _of_prompts("video_data", body.video_data, len(prompts), several, _video)
    return [
        replace(prompt, media=(*of_images, *of_videos))
        for prompt, of_images, of_videos in zip(prompts, images, videos, strict=True)
    ]


def _is_batch(body: GenerateBody) -> bool:
    given = body.input_ids if body.text is None else body.text
    return isinstance(given, list) and bool(given) and not isinstance(given[0], int)


def _of_prompts(
    name: str, given: Given, num_prompts: int, several: bool, source_of: Callable[[str, str], SourceT]
) -> list[list[SourceT]]:
    """Returns the pictures of each prompt. Of one prompt, a list holds its pictures; of several, one entry for each."""
    if given is None:
        return [[] for _ in range(num_prompts)]
    if isinstance(given, str):
        entries: list[str | list[str] | None] = [given] * num_prompts
    elif several:
        if len(given) != num_prompts:
            raise InvalidRequest(f"{name} has {len(given)} entries for {num_prompts} prompts: send one per prompt")
        entries = given
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


def _url(file: str, media_type: str) -> str:
    """Returns a URL as it is, and base64 as a data: URL."""
    return file if _HAS_SCHEME.match(file[:64]) else f"data:{media_type};base64,{file}"
