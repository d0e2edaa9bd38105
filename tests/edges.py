"""Random requests of every protocol with fields at the edges of their types: bounds, overflows, NaN, nothing, too much.

Fields and types come from the descriptions that the protocols have of themselves (OpenAPI, protobuf descriptors, the
hints of `SamplingParams`), so that a new field is covered without being listed here.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import types
import typing
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
from google.protobuf.descriptor import MethodDescriptor

from jaxsgl.requests.request import Request, SamplingParams
from tests.junk_grpc import METHODS, sensible
from tests.junk_http import GOOD_BODIES
from tests.junk_messages import spoil

INTS = tuple(sorted({
    sign * (1 << bits) + more for bits in (0, 1, 7, 15, 16, 31, 32, 53, 63, 64, 100) for sign in (1, -1)
    for more in (-1, 0, 1)
}))  # fmt: skip
FLOATS = (
    0.0, -0.0, 5e-324, -5e-324, 1e-310, 1e-46, 1e-45, 1e-38, 1e-30, 1e-7, 0.5, 1.0, 1.0 - 2**-53, 1.0 - 2**-25,
    1.0 + 2**-52, 1.5, 2.0, -2.0, 100.0, 1e4, 3.4e38, 3.5e38, 1.7e308, -1.7e308, math.nan, math.inf, -math.inf,
)  # fmt: skip
TEXTS = ("", "a", "\0", "42", "é🎉", "\ufffd", "\ud800", "a\udfffb", "x" * 256, "x" * 257, "{{ 1 }}", "\u202e")
COUNTS = (0, 1, 2, 3, 16, 17, 64, 65, 300, 301, 1024, 1025, 5000)
GENERATING = ("/v1/completions", "/v1/chat/completions", "/generate", "/v1/responses")
POOLING = ("/v1/embeddings", "/v1/score", "/v1/rerank", "/classify", "/encode")
TOKENIZING = ("/tokenize", "/detokenize")
GENERATE = [method for method in METHODS if method.name == "Generate"]
WRONG_TYPE = 0.1  # share of values
OTHER_NAMES = {"rid"}  # two requests may not have the same id at the same time


@dataclass(frozen=True)
class HttpSet:
    """A body for a path."""

    path: str
    body: bytes


@dataclass(frozen=True)
class GrpcSet:
    """A message for a method."""

    method: MethodDescriptor
    message: bytes


def random_set(rng: random.Random, openapi: dict[str, Any]) -> HttpSet | GrpcSet:
    """A request of any protocol."""
    if rng.random() < 0.4:
        return grpc_set(rng)
    paths = rng.choices((GENERATING, POOLING, TOKENIZING), (0.8, 0.15, 0.05))[0]
    return http_set(rng, openapi, rng.choice(paths))


def http_set(rng: random.Random, openapi: dict[str, Any], path: str) -> HttpSet:
    """A good body in which one to three fields, also of objects in it, have been set to edges of their types."""
    schemas = openapi["components"]["schemas"]
    content = openapi["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body = json.loads(json.dumps(GOOD_BODIES[path])) | ({"stream": True} if rng.random() < 0.2 else {})
    for name in OTHER_NAMES:
        body.pop(name, None)
    for _ in range(rng.randint(1, 3)):
        target, schema = body, _resolved(content, schemas)
        if "sampling_params" in schema["properties"] and rng.random() < 0.7:
            target = body.setdefault("sampling_params", {})
            if not isinstance(target, dict):
                continue
            schema = schemas["SamplingBody"]
        name = rng.choice([name for name in schema["properties"] if name not in OTHER_NAMES])
        target[name] = _of_schema(rng, schema["properties"][name], schemas, depth=0)
    return HttpSet(path, json.dumps(body).encode())


def grpc_set(rng: random.Random) -> GrpcSet:
    """A good message in which one to three fields have been set to edges of their types."""
    method = rng.choice(GENERATE)
    message = sensible(method)
    for _ in range(rng.randint(1, 3)):
        spoil(rng, message)
    return GrpcSet(method, message.SerializeToString())


def offline_set(rng: random.Random) -> Callable[[], Request]:
    """Makes a request as `jaxsgl.LLM` does, when it is called; it may be refused."""
    hints = typing.get_type_hints(SamplingParams)
    names = rng.sample(SamplingParams.__struct_fields__, rng.randint(1, 4))
    fields = {"max_tokens": 4} | {name: _of_hint(rng, hints[name]) for name in names}
    prompt = [5, 6, 7] if rng.random() < 0.8 else [rng.choice(INTS) for _ in range(rng.choice(COUNTS[:5]))]
    priority = rng.choice(INTS) if rng.random() < 0.2 else 0
    return lambda: Request("offline", prompt, SamplingParams(**fields), priority)


def _of_schema(rng: random.Random, schema: dict[str, Any], schemas: dict[str, Any], depth: int) -> Any:
    """A value of the type that a JSON schema describes, mostly."""
    if rng.random() < WRONG_TYPE or depth > 5:
        return rng.choice((None, True, rng.choice(INTS), rng.choice(FLOATS), rng.choice(TEXTS), [], {}, [[]], [None]))
    schema = _resolved(schema, schemas)
    if "anyOf" in schema:
        return _of_schema(rng, rng.choice(schema["anyOf"]), schemas, depth + 1)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    match schema.get("type"):
        case "integer":
            return rng.choice((*_bounds(schema), *INTS))
        case "number":
            return rng.choice((*_bounds(schema), *FLOATS, *INTS))
        case "boolean":
            return rng.random() < 0.5
        case "string":
            return rng.choice(TEXTS)
        case "array":
            item = _of_schema(rng, schema.get("items", {}), schemas, depth + 1)
            return [item] * rng.choice(COUNTS if not isinstance(item, list | dict) else COUNTS[:5])
        case "object" if "properties" in schema:
            return {
                name: _of_schema(rng, of, schemas, depth + 1)
                for name, of in schema["properties"].items()
                if name in schema.get("required", ()) or rng.random() < 0.3
            }
        case "object":
            values = schema.get("additionalProperties")
            of = values if isinstance(values, dict) else {}
            keys = rng.sample(range(1000), min(rng.choice(COUNTS), 400))
            return {
                f"{rng.choice(INTS) if rng.random() < 0.02 else key}": _of_schema(rng, of, schemas, depth + 1)
                for key in keys
            }
    return rng.choice((None, "a", 5, {"a": rng.choice(INTS)}))


def _bounds(schema: dict[str, Any]) -> list[float]:
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    return [schema[name] + more for name in names if name in schema for more in (-1, 0, 0, 1)]


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        found: dict[str, Any] = schemas[schema["$ref"].rpartition("/")[2]]
        return found
    return schema


def _of_hint(rng: random.Random, hint: Any) -> Any:
    """A value of the type of a Python hint, mostly."""
    if rng.random() < WRONG_TYPE:
        return rng.choice((None, True, rng.choice(INTS), rng.choice(FLOATS), rng.choice(TEXTS), (), {}, "abc", [5.5]))
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return _of_hint(rng, rng.choice(arguments))
    if typing.get_origin(hint) is tuple:
        return (_of_hint(rng, arguments[0]),) * rng.choice(COUNTS)
    if typing.get_origin(hint) is dict:
        keys = (rng.choice((*range(1000), *INTS, None, 0.5, "5", True)) for _ in range(rng.choice(COUNTS)))
        return {key: _of_hint(rng, arguments[1]) for key in keys}
    small = (0, 1, 2, 3, 4, 20, 21)
    return {
        int: lambda: rng.choice((*small, *INTS)),
        float: lambda: rng.choice(FLOATS),
        bool: lambda: rng.random() < 0.5,
        str: lambda: rng.choice(TEXTS),
    }.get(hint, lambda: None)()


def path_of(method: MethodDescriptor) -> str:
    """The method's path on a channel."""
    return f"/{method.containing_service.full_name}/{method.name}"


# The statuses that may answer: not 5xx or 422, INTERNAL, UNKNOWN, UNAVAILABLE or FAILED_PRECONDITION.
HTTP_STATUSES = frozenset({200, 400, 404, 413, 429})
GRPC_CODES = frozenset({
    grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND,
})  # fmt: skip
PATIENCE_S = 120.0


async def statuses_of(
    http: httpx.AsyncClient, channel: grpc.aio.Channel, sets: Sequence[HttpSet | GrpcSet], at_once: int
) -> Counter[object]:
    """How often each status answers, `at_once` sets being open at a time; fails at the first that should not come."""
    places = asyncio.Semaphore(at_once)

    async def send(sent: HttpSet | GrpcSet) -> object:
        async with places:
            status = await status_of(http, channel, sent)
        assert status in HTTP_STATUSES | GRPC_CODES, f"{status}: {sent}"
        return status

    return Counter(await asyncio.gather(*map(send, sets)))


async def status_of(http: httpx.AsyncClient, channel: grpc.aio.Channel, sent: HttpSet | GrpcSet) -> object:
    """The HTTP status or gRPC code that answers a set; fails at an answer that says that the server failed."""
    if isinstance(sent, HttpSet):
        answer = await http.post(sent.path, content=sent.body, headers={"content-type": "application/json"})
        assert "server_error" not in answer.text, f"{answer.text}: {sent}"
        return answer.status_code
    call = channel.unary_stream(path_of(sent.method))(sent.message, timeout=PATIENCE_S)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
