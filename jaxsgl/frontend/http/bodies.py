"""Reads bodies: strictly parsed JSON, the field types that OpenAI's and SGLang's APIs share, and `SamplingParams`.

A body that is no JSON text by RFC 8259 is refused before a schema looks at it. Limits of numbers are those of
jaxsgl/requests/request.py. Knows no endpoint; the schemas and routes of both APIs use it.
"""

from __future__ import annotations

import asyncio
import codecs
import functools
import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi.routing import APIRoute
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import CoreSchema, PydanticCustomError, from_json
from pydantic_core.core_schema import no_info_before_validator_function
from starlette.requests import Request
from starlette.responses import Response

from jaxsgl.config.engine import Limits
from jaxsgl.config.features import BOOTSTRAP_PORT
from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.generation import MAX_REQUEST_ID_CHARS, RequestOptions
from jaxsgl.frontend.legs import rendezvous
from jaxsgl.logs import OF_CLIENTS
from jaxsgl.preprocess.sources import MAX_FRAMES
from jaxsgl.requests.request import (
    BOUNDS,
    LOGIT_BIAS_BOUNDS,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_CHARS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_STOP_REGEX_CHARS,
    MAX_STOP_REGEXES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    PRIORITY_BOUNDS,
    Bounds,
    SamplingParams,
    room_of_prompt,
)
from jaxsgl.text.tokenizer import Truncation

logger = logging.getLogger(__name__)

MAX_INT = 2**31 - 1
MAX_TEXTS = 1024  # and prompts of other kinds
SMALL_BODY = 1 << 16  # bytes, which parse in a few milliseconds whatever they hold
MAX_QUOTES_OF_FILES = 1 << 17  # of a body that is larger than what may be other than files
MIN_FILE_BYTES = 1 << 16
MAX_PARTS = 1 << 16  # lists, objects and members of a body
MAX_STRINGS = 1 << 18  # of a body whose texts hold brackets
_CUT = "EOF"  # begins pydantic's error at the end of a text


class _StrictRequest(Request):
    """Parses its JSON with pydantic: no NaN, no lone surrogates, at most 200 levels, numbers of at most 4300 digits.

    Python's parser accepts NaN and lone surrogates, which then fail where a text is encoded or an answer is written.
    """

    async def json(self) -> Any:
        """Returns the parsed body. Raises `ValueError`."""
        encoding = self.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise InvalidRequest(f"it is compressed (content-encoding: {encoding:.20}): send it as it is, or in gzip")
        body = (await self.body()).removeprefix(codecs.BOM_UTF8)  # which programs of Windows write before a text
        if len(body) <= SMALL_BODY:
            return from_json(body, allow_inf_nan=False)
        check_num_parts(without_files(body, self.state.max_plain_bytes))
        await asyncio.sleep(0)
        parsed = from_json(body, allow_inf_nan=False)
        await asyncio.sleep(0)  # checking it takes as long as parsing: other calls run in between
        return parsed


def without_files(body: bytes, max_bytes: int) -> bytes:
    """Returns a JSON text without the long texts in it that are read as fast as they are copied: files in base64.

    Raises `InvalidRequest` for more than `max_bytes` of anything else: two of them may be a number, of 20 ns to parse.
    """
    if len(body) <= max_bytes:
        return body
    if body.count(b'"') <= MAX_QUOTES_OF_FILES:
        body = b'"'.join([b"" if _is_file(text) else text for text in body.split(b'"')])
    if len(body) > max_bytes:
        raise InvalidRequest(
            f"it has {len(body)} bytes besides files of {MIN_FILE_BYTES >> 10} KiB and more in base64, but may have "
            f"{max_bytes} (--max-request-bytes): send less at once"
        )
    return body


def _is_file(text: bytes) -> bool:
    """Whether what stands between two quotes is long, has no escapes, and holds few values if it is no string."""
    if len(text) < MIN_FILE_BYTES or not text.isascii():
        return False
    return b"\\" not in text and b" " not in text and text.count(b",") <= MAX_FRAMES


def check_num_parts(body: bytes) -> None:
    """Raises `InvalidRequest` for JSON of too many lists, objects and members, each of which takes a microsecond.

    Millions of numbers are fine, and so are brackets inside of texts.
    """
    if _num_parts(body) <= MAX_PARTS:
        return
    body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if body.count(b'"') <= 2 * MAX_STRINGS and _num_parts(b"".join(body.split(b'"')[::2])) <= MAX_PARTS:
        return
    raise InvalidRequest(f"it holds more than {MAX_PARTS} lists, objects and members of objects: send less at once")


def _num_parts(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{") + body.count(b":")


class StrictJson(APIRoute):
    """A route whose body is parsed strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wraps FastAPI's handler."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


def _take_whole(schema: Any) -> Any:
    """Lets the integers of pydantic's `schema` be 16.0; not in lists, which may hold millions of token ids.

    Pydantic asks for the schema of a class again wherever another one has it, and gives what was returned before.
    """
    match schema["type"]:
        case "function-before" if schema["function"]["function"] is _whole:
            return schema
        case "int":
            return no_info_before_validator_function(_whole, schema)
        case "model-fields":
            for field in schema["fields"].values():
                field["schema"] = _take_whole(field["schema"])
        case "union":
            schema["choices"] = [each if isinstance(each, tuple) else _take_whole(each) for each in schema["choices"]]
        case "model" | "nullable" | "default" | "function-before" | "function-wrap" | "function-after":
            schema["schema"] = _take_whole(schema["schema"])
    return schema


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Body(BaseModel):
    """The base of all objects in bodies. Unknown fields are kept aside, so that some can be refused."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Lets integers be written as 16.0, since JSON Schema, and so most clients, tell them by their values."""
        schema = handler(source)
        _take_whole(handler.resolve_ref_schema(schema))
        return schema


def cut_object(text: str) -> dict[str, Any] | None:
    """Returns the JSON object that `text` holds, as far as it came before max_tokens or its client cut it.

    Nothing and null are an empty one: so clients spell the arguments of a call without any.

    None: it is none, or holds NaN, half a surrogate pair or a number of thousands of digits.
    """
    try:
        read = from_json(text or "{}", allow_inf_nan=False)
    except ValueError as error:
        if not str(error).startswith(_CUT):
            return None
        read = from_json(text, allow_inf_nan=False, allow_partial="trailing-strings")
    if read is None:
        return {}
    return read if isinstance(read, dict) else None


def with_clients_names(error: ValidationError, names: Mapping[str, str], places: Sequence[int]) -> InvalidRequest:
    """Returns what a client reads of a chat that was made of its body and is refused.

    `names` are chat's fields by another name in the body; `places` are those of the chat's tools in the body's list.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    name, *rest = first["loc"]
    if name == "tools" and rest:
        rest = [places[int(rest[0])], *(part for part in rest[1:] if part != "function")]
    param = ".".join(names.get(str(part), str(part)) for part in (name, *rest))
    refused = InvalidRequest(f"{param}: {first['msg']}")
    refused.param = param
    return refused


def one_error(words: str) -> WrapValidator:
    """Makes a union that fails say `words`, instead of an error for each of its members."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("union", "{words}", {"words": words}) from None

    return WrapValidator(validate)


def within(bounds: Bounds, description: str | None = None) -> Any:
    """Returns the pydantic field of a number in `bounds`."""
    if bounds.above_low:
        return Field(gt=bounds.low, le=bounds.high, description=description)
    return Field(ge=bounds.low, le=bounds.high, description=description)


Count = Annotated[int, Field(ge=0, le=MAX_INT)]
CacheSalt = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_CACHE_SALT_CHARS,
        description="cached prefixes are shared with requests of an equal salt alone",
    ),
]
Priority = Annotated[int, within(PRIORITY_BOUNDS, "ignored unless the server schedules by priority")]
RequestId = Annotated[str, Field(min_length=1, max_length=MAX_REQUEST_ID_CHARS)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
TextList = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
IdLists = Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
Speculative = Annotated[
    bool,
    Field(description="false: no token is guessed, (--speculative-algorithm); the answer stays the same"),
]
LoraPath = Annotated[str, Field(description="the name of a LoRA adapter, if model does not name one")]
LoraPaths = Annotated[
    str | Annotated[list[str | None], Field(max_length=MAX_TEXTS, fail_fast=True)],
    one_error("must be a text, or a list with one or null for each prompt"),
    Field(description="the name of a LoRA adapter, or one for each prompt; null is none"),
]
TopLogprobs = Annotated[int, within(BOUNDS["logprobs"])]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, within(LOGIT_BIAS_BOUNDS)]],
    Field(max_length=MAX_LOGIT_BIAS),
]
Stop = Annotated[
    str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)],
    one_error(f"must be a text, or a list of up to {MAX_STOP_STRINGS} texts"),
]
Pattern = Annotated[str, Field(min_length=1, max_length=MAX_STOP_REGEX_CHARS)]
StopRegex = Annotated[
    Pattern | Annotated[list[Pattern], Field(max_length=MAX_STOP_REGEXES)],
    one_error(f"must be a pattern of 1 to {MAX_STOP_REGEX_CHARS} characters, or a list of up to {MAX_STOP_REGEXES}"),
    Field(description="the answer ends where its text matches; Rust's syntax without lookaround"),
]
StopTokenIds = Annotated[TokenIds, Field(max_length=MAX_STOP_TOKEN_IDS)]
LogprobTokenIds = Annotated[TokenIds, Field(min_length=1, max_length=MAX_LOGPROB_TOKEN_IDS)]
AllowedTokenIds = Annotated[TokenIds, Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
BadWords = Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)]


class Truncated(Body):
    """A body whose prompts may be cut, as in vLLM."""

    truncate_prompt_tokens: (
        Annotated[
            int, Field(ge=-1, le=MAX_INT, description="the most tokens of a prompt; -1: as many as there is room for")
        ]
        | None
    ) = None
    truncation_side: (
        Annotated[
            Literal["left", "right"],
            Field(description="where longer prompts are cut; default: left of those that are continued, else right"),
        ]
        | None
    ) = None


def truncation_of(body: Truncated, limits: Limits, num_new: int = 0) -> Truncation | None:
    """Returns how prompts are cut that context and pool must hold with `num_new` new tokens, or None if they aren't.

    Raises `InvalidRequest`.
    """
    asked = body.truncate_prompt_tokens
    if asked is None:
        return None
    room = room_of_prompt(asked, limits)
    if asked == -1 and num_new >= room:
        raise InvalidRequest(
            f"truncate_prompt_tokens is -1, but max_tokens={num_new} leaves no room of the {room} tokens that a "
            "request may have: lower max_tokens"
        )
    side = body.truncation_side or ("left" if num_new else "right")
    return Truncation(room - num_new if asked == -1 else asked, first=side == "right")


_MOST_SHOWN = 20  # unknown fields of a body that the log names
_CODE = "the code of a client is never run; use logit_bias, allowed_token_ids, bad_words or a grammar"
_TENSORS = "prompts are texts and token ids"
# Fields of other servers that are never taken, and why.
NEVER_TAKEN = {
    "audio": "answers are text",
    "custom_logit_processor": _CODE,
    "input_embeds": _TENSORS,
    "logits_processors": _CODE,
    "prompt_embeds": _TENSORS,
    "use_beam_search": "ask for n samples with logprobs",
}


def refuse_others(body: Body, not_built: Set[str] = frozenset()) -> None:
    """Raises `InvalidRequest` if `body` sets an unknown field that is never taken, or one of `not_built`.

    Empty or false, it asks for nothing. The log names others at level debug: they are ignored, and may be mistyped.
    """
    for name, value in (body.model_extra or {}).items():
        if value and name in NEVER_TAKEN:
            raise InvalidRequest(f"{name} is not taken ({NEVER_TAKEN[name]}): leave it out")
        if value and name in not_built:
            raise InvalidRequest(f"{name} isn't taken here: leave it out")
    ignored = (name for name in body.model_extra or {} if name not in ROOM_FIELDS)
    if shown := ", ".join(itertools.islice(ignored, _MOST_SHOWN)):
        logger.debug("fields that have no meaning here are ignored: %.300s", shown, extra=OF_CLIENTS)


def options_of(body: Body, adapters: Sequence[str]) -> list[RequestOptions]:
    """Returns the options of each prompt of `body`, by the name of its adapter.

    The salt stands under vLLM's name or SGLang's. Raises `InvalidRequest` for both.
    """
    priority = getattr(body, "priority", None) or 0
    cache_salt, extra_key = getattr(body, "cache_salt", None), getattr(body, "extra_key", None)
    if cache_salt is not None and extra_key is not None:
        raise InvalidRequest("cache_salt and extra_key are both given, but mean the same: send one of them")
    given = RequestOptions(
        priority,
        cache_salt or extra_key or "",
        speculative=getattr(body, "speculative", None) is not False,
        prediction="" if (prediction := getattr(body, "prediction", None)) is None else prediction.text,
    )
    return [replace(given, adapter=adapter) for adapter in adapters]


# Where the legs of a request meet. Gateways add them; they are no part of the API for clients, so no schema has them.
ROOM_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


def in_rooms(options: list[RequestOptions], body: Body) -> list[RequestOptions]:
    """Returns `options` with the rooms where the prefill and the decode leg of each prompt meet, if gateways add them.

    Raises `InvalidRequest`.
    """
    given = body.model_extra or {}
    if given.get("bootstrap_room") is None and given.get("bootstrap_host") is None:
        return options
    num_samples = getattr(body, "n", None) or 1
    hosts, ports, rooms = (_entries(name, given.get(name), len(options), num_samples) for name in ROOM_FIELDS)
    of_prompts = []
    for of_prompt, host, port, room in zip(options, hosts, ports, rooms, strict=True):
        if not isinstance(host, str):
            raise InvalidRequest(f"bootstrap_host is {host!r:.100}, but must be a text")
        of_prompts.append(replace(of_prompt, room=rendezvous(host, BOOTSTRAP_PORT if port is None else port, room)))
    return of_prompts


def refuse_prompt_scores_in_rooms(options: Sequence[RequestOptions], sampling: SamplingParams) -> None:
    """Raises `InvalidRequest` for log-probabilities of a prompt whose legs meet in a room, in OpenAI's form.

    Prefill's answer has them, but clients get decode's: gateways merge the two in the form of /generate alone.
    """
    if sampling.prompt_logprobs is not None and any(of_prompt.room is not None for of_prompt in options):
        raise InvalidRequest(
            "log-probabilities of the prompt (prompt_logprobs, or echo with logprobs) don't come back between prefill "
            "and decode: leave them out, or call /generate with return_logprob and logprob_start_len 0"
        )


def _entries(name: str, given: Any, num_prompts: int, num_samples: int) -> list[Any]:
    """Returns a value for each prompt. Gateways send one for all, or a list with one for each prompt or each sample.

    The samples of a prompt share a room: the first one.
    """
    if not isinstance(given, list):
        if num_prompts > 1 and name == "bootstrap_room":
            raise InvalidRequest(f"one bootstrap_room is given for {num_prompts} prompts: send a list of them")
        return [given] * num_prompts
    if len(given) == num_prompts:
        return given
    if len(given) == num_prompts * num_samples:
        return given[::num_samples]
    raise InvalidRequest(f"{name} has {len(given)} entries for {num_prompts} prompts: send one per prompt")


# From JSON's form of a field to that of `SamplingParams`.
_CONVERSIONS: dict[str, Callable[[Any], object]] = {
    "logit_bias": lambda bias: {int(token_id): added for token_id, added in bias.items()},
    "stop": lambda stop: (stop,) if isinstance(stop, str) else tuple(stop),
    "stop_regex": lambda stop: (stop,) if isinstance(stop, str) else tuple(stop),
    "stop_token_ids": tuple,
    "allowed_token_ids": tuple,
    "logprob_token_ids": tuple,
    "bad_words": tuple,
}


def sampling_params(body: Body, **renamed: object) -> SamplingParams:
    """Returns what `body` asks for. Raises `InvalidRequest`.

    Fields of `body` that are named as in `SamplingParams` are copied; None is the default. `renamed` holds the values
    of those that have another name or meaning in the API.
    """
    given: dict[str, Any] = {
        name: value for name in _same_names(type(body)) if (value := getattr(body, name)) is not None
    }
    given.update(renamed)
    for name in _CONVERSIONS.keys() & given.keys():
        given[name] = _CONVERSIONS[name](given[name])
    return SamplingParams(**given)


@functools.cache
def _same_names(body: type[Body]) -> list[str]:
    return [name for name in SamplingParams.__struct_fields__ if name in body.model_fields]
