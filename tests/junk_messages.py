"""Malformed protobuf messages, built from descriptors: every field, at the edges of its type."""

from __future__ import annotations

import math
import random
import struct
from typing import Any, TypeVar

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

MAX_DEPTH = 4
TEXTS = (
    "",
    "a",
    "42",
    "-1",
    "stop",
    "\0",
    "é🎉\u202e",
    "\ufffd",
    "%s{}\\\n",
    "../../etc/passwd",
    "x" * 300,
    "user",
    "all",
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1.5, math.nan, math.inf, -math.inf, 1e-45, 3.4e38, -3.4e38)
COUNTS = (0, 1, 1, 2, 3, 70, 400)  # of repeated fields

MessageT = TypeVar("MessageT", bound=Message)
_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def request_class(method: MethodDescriptor) -> type[Message]:
    return message_factory.GetMessageClass(method.input_type)


def junk_message(rng: random.Random, kind: type[MessageT], density: float, depth: int = 0) -> MessageT:
    """A valid message in which each field is set with the probability `density`."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if rng.random() < density:
            _fill(rng, message, field, density, depth)
    return message


def spoil(rng: random.Random, message: Message) -> None:
    """Sets one field, somewhere in the message, to anything."""
    field: Any = rng.choice(list(message.DESCRIPTOR.fields))
    if field.message_type is not None and not field.is_repeated and rng.random() < 0.8 and field.message_type.fields:
        spoil(rng, getattr(message, field.name))
    else:
        _fill(rng, message, field, density=0.3, depth=2)


def junk_bytes(rng: random.Random, message: Message) -> bytes:
    """No message, or one that is cut or has bytes that were changed, or unknown fields."""
    data = bytearray(message.SerializeToString())
    match rng.randrange(4):
        case 0:
            return rng.randbytes(rng.randrange(200))
        case 1:
            return bytes(data[: rng.randrange(len(data) + 1)])
        case 2:
            for _ in range(rng.randrange(1, 5)):
                data.insert(rng.randrange(len(data) + 1), rng.randrange(256))
    return bytes(data) + b"\xfa\x7f" + struct.pack("B", 3) + b"abc"


def _fill(rng: random.Random, message: Any, field: Any, density: float, depth: int) -> None:
    target = getattr(message, field.name)
    if _is_map(field):
        key, value = field.message_type.fields
        for _ in range(rng.choice(COUNTS)):
            if value.message_type is None:
                target[_scalar(rng, key)] = _scalar(rng, value)
            elif depth < MAX_DEPTH:
                target[_scalar(rng, key)].CopyFrom(_inner(rng, value.message_type, density, depth))
    elif field.message_type is not None:
        if depth < MAX_DEPTH:
            for _ in range(rng.choice(COUNTS[:4]) if field.is_repeated else 1):
                inner = _inner(rng, field.message_type, density, depth)
                target.add().CopyFrom(inner) if field.is_repeated else target.CopyFrom(inner)
    elif field.is_repeated:
        target.extend(_scalar(rng, field) for _ in range(rng.choice(COUNTS)))
    else:
        setattr(message, field.name, _scalar(rng, field))


def _inner(rng: random.Random, of: Descriptor, density: float, depth: int) -> Message:
    return junk_message(rng, message_factory.GetMessageClass(of), max(density, 0.3), depth + 1)


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _scalar(rng: random.Random, field: Any) -> Any:
    kind = field.cpp_type
    if kind in _BITS:
        low, high = _BITS[kind]
        edges = (low, low + 1, high - 1, high, 2**31 - 1, 2**16, 1024)
        return max(low, min(high, rng.choice((*edges, *range(10), rng.randrange(256), -1))))
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice((0, 1, 2, 77, -1))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice(COUNTS))
    return rng.choice(TEXTS)
