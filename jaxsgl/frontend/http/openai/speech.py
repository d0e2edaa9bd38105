"""Answers /v1/audio/transcriptions and /v1/audio/translations: what is said in a file, as text.

Owns the form that comes and what answers look like; `text/hearing.py` says how models are asked. Forms are read into
memory, within the limit of bodies. routes.py calls it.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.generation import FrontEnd, Prompted, RequestOptions
from jaxsgl.frontend.http.bodies import MAX_INT, Body
from jaxsgl.frontend.http.calls import EventStream, event, start_all, whole
from jaxsgl.frontend.http.forms import boundary_of, read_form
from jaxsgl.frontend.http.openai.replies import encode, json_response
from jaxsgl.preprocess.mel import HOP, RATE
from jaxsgl.preprocess.sources import SoundSource
from jaxsgl.requests.media import FRAMES_OF_PATCH
from jaxsgl.requests.request import MAX_SEED, Request, SamplingParams
from jaxsgl.text.hearing import ENGLISH, language_of, transcript_prompt, translation_prompt

PATCH_S = FRAMES_OF_PATCH * HOP / RATE
_UNKNOWN = "unknown"  # the language that the model finds out, which it doesn't tell


class SpeechRequest(Body):
    """A form of /v1/audio/transcriptions or /v1/audio/translations, besides its file."""

    model: str | None = None
    language: str = ""
    to_language: str = ""
    prompt: str = ""
    response_format: Literal["json", "text", "verbose_json"] = "json"
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    stream: bool = False


def form_schema() -> dict[str, Any]:
    """The form in OpenAPI's words: FastAPI can't tell what `speech_of` reads."""
    schema = SpeechRequest.model_json_schema()
    schema["properties"] = {"file": {"type": "string", "format": "binary"}, **schema["properties"]}
    body = {"content": {"multipart/form-data": {"schema": {**schema, "required": ["file"]}}}, "required": True}
    return {"requestBody": body}


class Speech:
    """A form as it came.

    Attributes:
      body: its fields.
      content: the file.
    """

    def __init__(self, body: SpeechRequest, content: bytes) -> None:
        self.body, self.content = body, content


async def speech_of(http: HttpRequest) -> Speech:
    """Reads a form. Raises `InvalidRequest`."""
    boundary = boundary_of(http.headers.get("content-type", ""))
    data = await http.body()
    form = read_form(data, boundary)
    if form.start == form.stop:
        raise InvalidRequest("the file is empty: send a file of sound")
    for name in form.fields:
        if name.startswith("timestamp_granularities"):
            raise InvalidRequest("timestamp_granularities are given, but no times are known: leave them out")
        if name.startswith("include"):
            raise InvalidRequest("include is given, but transcripts come without log-probabilities: leave it out")
    try:
        body = SpeechRequest.model_validate_strings(form.fields, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise InvalidRequest(f"{field} of the form is {str(first['input'])!r:.100}: {first['msg']}") from None
    return Speech(body, data[form.start : form.stop])


async def answer_speech(front_end: FrontEnd, speech: Speech, adapter: str, translates: bool = False) -> Response:
    """Returns what is said, or its translation, of the model with `adapter`.

    Raises `InvalidRequest`, and as `Generator.start`.
    """
    body, model = speech.body, front_end.generator.model
    if model.media is None or model.media.settings.sound is None:
        raise InvalidRequest(
            f"the model {adapter or front_end.config.model_name} hears nothing: ask a server whose model takes sound"
        )
    if body.stream and body.response_format != "json":
        raise InvalidRequest(f"stream is true, but response_format is {body.response_format}: leave that out")
    sound, language = SoundSource(speech.content), language_of(body.language)
    if body.to_language and language_of(body.to_language) != (ENGLISH if translates else language):
        raise InvalidRequest(
            f"to_language is {body.to_language:.100}, but transcripts are in the language of the sound, and "
            "translations in English: leave it out, or chat"
        )
    if translates:
        prompt = translation_prompt(sound, language, body.prompt)
    else:
        prompt = transcript_prompt(model.tokenizer, sound, language, body.prompt)
    sampling = SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        repetition_penalty=body.repetition_penalty,
        max_tokens=body.max_completion_tokens,
        seed=None if body.seed is None else body.seed & MAX_SEED,
    )
    options = RequestOptions(adapter=adapter)
    request = await front_end.generator.prepare(Prompted(prompt, sampling, f"speech-{uuid.uuid4().hex}", options))
    seconds = PATCH_S * sum(item.filled for item in request.media)  # the media go with the request
    heard = sum(item.length for item in request.media)
    if body.stream:
        return EventStream(_stream(front_end, request, heard))
    async with start_all(front_end.generator, [request]) as generations:
        (sample,) = await whole(generations)
    assert sample.end is not None
    text = sample.text.strip()
    if body.response_format == "text":
        return PlainTextResponse(text + "\n")
    answer: dict[str, Any] = {"text": text}
    if body.response_format == "json":
        answer["usage"] = _usage(request, heard, len(sample.token_ids))
    else:
        answer |= {
            "task": "translate" if translates else "transcribe",
            "language": "english" if translates else body.language or _UNKNOWN,
            "duration": round(seconds, 2),
            "segments": None,
            "words": None,
            "usage": {"type": "duration", "seconds": round(seconds, 2)},
        }
    return json_response(encode(answer))


def _usage(request: Request, heard: int, num_new: int) -> dict[str, Any]:
    num_read = len(request.prompt_ids)
    details = {"audio_tokens": heard, "text_tokens": num_read - heard}
    return {
        "type": "tokens", "input_tokens": num_read, "input_token_details": details, "output_tokens": num_new,
        "total_tokens": num_read + num_new,
    }  # fmt: skip


async def _stream(front_end: FrontEnd, request: Request, heard: int) -> AsyncGenerator[bytes, None]:
    """OpenAI's events; white space around the text goes."""
    text, held, num_new = "", "", 0
    async with start_all(front_end.generator, [request]) as generations:
        async for piece in generations[0]:
            num_new += len(piece.token_ids)
            new = held + piece.text if text else piece.text.lstrip()
            shown = new.rstrip()
            held = new[len(shown) :]
            if shown:
                text += shown
                yield event(json.dumps({"type": "transcript.text.delta", "delta": shown}).encode())
    done = {"type": "transcript.text.done", "text": text, "usage": _usage(request, heard, num_new)}
    yield event(json.dumps(done).encode())
