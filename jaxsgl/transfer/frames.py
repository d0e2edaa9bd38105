"""What a prefill and a decode worker say to each other, and its bytes.

    decode   Open         Grant                        Ack    Fail ends a room from either side
    prefill        Media         Pages, Rows .. Done          Ping says that a worker lives

A frame is a fixed head, a message as MessagePack, and for `Pages`, `Media` and `Rows` the bytes they are about, unless
those lie in memory that the other side reads: `Memory` says where, and `Taken` when it has read (nixl.py). Frames
follow the greeting of both sides (greeting.py). Knows neither sockets nor requests: wires carry frames (tcp.py),
scheduler/disagg/ decides what is said.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

PROTOCOL = 6
MAX_MESSAGE_BYTES = 1 << 16
FRAME_BYTES = 16 << 20  # of pages in a frame, or one page if that is larger
_MAGIC = 0x4C47534A
_HEAD = struct.Struct("<IIQ")
HEAD_BYTES = _HEAD.size


class WireError(Exception):
    """The other side sent what this protocol doesn't know."""


class Room(msgspec.Struct, frozen=True, array_like=True):
    """Names the two legs of one request. Gateways draw the number at random, so the prompt's hash tells twins apart."""

    number: int
    prompt_hash: int


def room_of(number: int, prompt_ids: Sequence[int] | npt.NDArray[np.int32]) -> Room:
    """Returns the room of a request. Images are compared when it is opened, since decode may not have them."""
    return Room(number, zlib.crc32(np.asarray(prompt_ids, dtype=np.int32).tobytes()))


class Geometry(msgspec.Struct, frozen=True):
    """What two workers must have in common to share KV pages.

    Attributes:
      page_size: tokens of a page.
      dtype: of the KV pool.
      page_shape: of one page on the host, `[layers, 2, K, page_size, H]`.
      page_bytes: its size.
      weights: a name of the model, whose weights of now each request's version names.
      image_row_bytes: of the embedding of an image's token; 0: it takes no images.
      backend: how the bytes travel, "tcp" or "nixl".
    """

    page_size: int
    dtype: str
    page_shape: tuple[int, ...]
    page_bytes: int
    weights: str
    image_row_bytes: int = 0
    backend: str = "tcp"

    def mismatch(self, other: Geometry) -> str | None:
        """Returns in words what differs between this worker and `other`, with both values; None if nothing does."""
        for name, text, way_out in (
            ("page_size", "the page size", "give both the same --page-size"),
            ("dtype", "the KV cache's dtype", "give both the same --dtype and --kv-cache-dtype"),
            ("page_shape", "the shape of a KV page", "serve the same model on both"),
            ("page_bytes", "the bytes of a KV page", "serve the same model on both"),
            ("weights", "the model", "serve the same model on both"),
            ("backend", "the transfer backend", "give both the same --disaggregation-transfer-backend"),
        ):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{text} is {mine} here, but {theirs} there: {way_out}"
        mine, theirs = self.image_row_bytes, other.image_row_bytes
        if mine and theirs and mine != theirs:
            text = "the bytes of the embedding of an image's token are"
            return f"{text} {mine} here, but {theirs} there: give both the same --dtype"
        return None

    @property
    def max_payload_bytes(self) -> int:
        """Of one frame."""
        return max(self.page_bytes, FRAME_BYTES)

    @property
    def pages_per_frame(self) -> int:
        """At most."""
        return max(FRAME_BYTES // self.page_bytes, 1)


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Decode has the request of `room`, and will grant memory for its pages.

    `images` is the hash of the request's images (`images_hash`). None: it came without those that its prompt stands
    for, and prefill is to send them.
    """

    room: Room
    images: int | None = 0


class Media(msgspec.Struct, frozen=True, tag="media"):
    """Bytes from `start` on, which follow, of the images of the request of `room`: `total` bytes, see `pack_images`."""

    room: Room
    start: int
    total: int


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """Decode has memory for pages first_page .. first_page + num_pages - 1 of the prompt; it has those before already.

    `weight_version` is that of the weights which are to compute them, and of the request's adapter. `images` are the
    places, among the request's images, of those whose embeddings decode lacks.
    """

    room: Room
    first_page: int
    num_pages: int
    weight_version: str
    images: tuple[int, ...] = ()


class Pages(msgspec.Struct, frozen=True, tag="pages"):
    """Pages first_page .. first_page + num_pages - 1 of the prompt, whose bytes follow."""

    room: Room
    first_page: int
    num_pages: int


class Rows(msgspec.Struct, frozen=True, tag="rows"):
    """Bytes of the embeddings of image `image` of the request, which follow. Those of an image come in order."""

    room: Room
    image: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The prompt is computed by weights of `weight_version`, and all pages up to `end_page` were sent.

    So were the embeddings of all images that decode lacks, unless other weights have come meanwhile. Prefill had the
    first `cached_tokens` of the prompt in its cache.
    """

    room: Room
    end_page: int
    weight_version: str
    cached_tokens: int = 0


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """Decode has all pages."""

    room: Room


class Fail(msgspec.Struct, frozen=True, tag="fail"):
    """The sender has given `room` up, because of `text`; decode perhaps before it opened that.

    `kind` is the value of the `RefusalKind` that the client gets; None if the client has left.
    """

    room: Room
    text: str
    kind: str | None = None


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """The sender lives."""


class Memory(msgspec.Struct, frozen=True, tag="memory"):
    """Payloads of the sender lie from `address` on, in slots of `slot_bytes`; NIXL finds that by `metadata`."""

    metadata: bytes
    address: int
    slot_bytes: int


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    """The oldest payload that the sender of this hasn't said this of needs its slot no more."""


Message: TypeAlias = Open | Media | Grant | Pages | Rows | Done | Ack | Fail | Ping | Memory | Taken

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


class Head(NamedTuple):
    """Sizes in bytes of what follows."""

    message_bytes: int
    payload_bytes: int


def encode(message: Message, payload_bytes: int = 0) -> bytes:
    """Returns the frame of `message` without its payload, which must follow."""
    body = _encoder.encode(message)
    return _HEAD.pack(_MAGIC, len(body), payload_bytes) + body


def decode_head(data: bytes | bytearray | memoryview, max_payload_bytes: int) -> Head:
    """Reads the first `HEAD_BYTES` of a frame.

    Raises:
      WireError: they are of another program, or announce more than a frame may hold.
    """
    magic, message_bytes, payload_bytes = _HEAD.unpack(data)
    if magic != _MAGIC:
        raise WireError(f"what came begins with {bytes(data[:4])!r}, which is no frame of a prefill or decode worker")
    if message_bytes > MAX_MESSAGE_BYTES or payload_bytes > max_payload_bytes:
        raise WireError(
            f"a frame of {message_bytes} + {payload_bytes} bytes came, but {MAX_MESSAGE_BYTES} + {max_payload_bytes} "
            "are the most"
        )
    return Head(message_bytes, payload_bytes)


def decode(body: bytes | bytearray | memoryview, payload_bytes: int, page_bytes: int) -> Message:
    """Reads a message whose payload has `payload_bytes`, where a page has `page_bytes`.

    Raises:
      WireError: it is malformed, or the sizes disagree.
    """
    try:
        message: Message = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"a message is malformed: {error}") from None
    if isinstance(message, Media):
        if not 0 < message.start + payload_bytes <= message.total or message.start < 0 or not payload_bytes:
            raise WireError(f"{payload_bytes} bytes follow {message}")
        return message
    if isinstance(message, Rows):
        if not payload_bytes:
            raise WireError(f"no bytes follow {message}")
        return message
    num_pages = message.num_pages if isinstance(message, Pages) else 0
    if num_pages < 0 or num_pages * page_bytes != payload_bytes:
        raise WireError(f"{payload_bytes} bytes follow {message}, but a page has {page_bytes}")
    return message


def page_frames(room: Room, first_page: int, data: np.ndarray, per_frame: int) -> list[tuple[Pages, np.ndarray]]:
    """Cuts `data [n, ...]`, pages of `room` from `first_page` on, into frames; the bytes of each are a view of it."""
    flat = np.ascontiguousarray(data).reshape(len(data), -1).view(np.uint8) if len(data) else data
    return [
        (Pages(room, first_page + start, len(flat[start : start + per_frame])), flat[start : start + per_frame])
        for start in range(0, len(data), per_frame)
    ]
