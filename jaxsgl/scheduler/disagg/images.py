"""Images of requests over disaggregation: how decode gets what the gateway gave prefill alone, and the embeddings.

Gateways that speak gRPC send decode the expanded tokens of a prompt, but not its images. Decode then opens the room
without a hash of them, and prefill sends them without their pixels: decode names its cached pages by their digests, and
places tokens by their grids.

Decode has no vision tower, but computes less than a page of each prompt, and what it can't find of one that was
retracted or whose pages were evicted, so it needs the embeddings of all images of a request for as long as that lives.
It holds them in host memory from its grant on, and names those in it that it lacks. Prefill sends them as its tower
makes them (prefill_side.py). Called by the two state machines of this package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from jaxsgl.cache.embeddings import HostImages
from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.media import (
    MediaItem,
    MediaLimits,
    check_media,
    images_hash,
    num_placeholders,
    pack_images,
    unpack_images,
    without_pixels,
)
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.disagg.rooms import Send
from jaxsgl.transfer.frames import FRAME_BYTES, Media, Room
from jaxsgl.transfer.wire import Bytes, Peer


def hash_for_prefill(request: Request, limits: MediaLimits | None) -> int | None:
    """What decode says of the images of `request`; None if its prompt stands for some that it came without."""
    if limits is not None and not request.media and num_placeholders(request.prompt_ids, limits):
        return None
    return images_hash(request.media)


def of_source(media: tuple[MediaItem, ...], source: str) -> tuple[MediaItem, ...]:
    """Returns `media` under other digests for each `Request.kv_source`, so that embeddings from there stay apart."""
    if not source:
        return media
    return tuple(
        msgspec.structs.replace(item, digest=hashlib.sha256(f"{source}\n".encode() + item.digest).digest())
        for item in media
    )


def send_images(peer: Peer, room: Room, media: Sequence[MediaItem]) -> list[Send]:
    """Sends `media` in parts, without their pixels."""
    data = np.frombuffer(pack_images(without_pixels(media)), dtype=np.uint8)
    starts = range(0, len(data), FRAME_BYTES)
    return [Send(peer, Media(room, start, len(data)), data[start : start + FRAME_BYTES]) for start in starts]


class Lacking:
    """Requests that wait for their images, and what has come of them."""

    def __init__(self, limits: MediaLimits | None) -> None:
        self.limits = limits
        self._parts: dict[Room, bytearray] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def add(self, room: Room) -> None:
        """The images of `room` are asked for."""
        self._parts[room] = bytearray()

    def discard(self, room: Room) -> None:
        """The images of `room` are here, or needed no longer."""
        self._parts.pop(room, None)

    def taken(self, media: Media, payload: Bytes, prompt_ids: list[int]) -> tuple[MediaItem, ...] | None:
        """The images, once the last part has come. Parts come in order; twice the same are one.

        Raises:
          InvalidRequest: they are more than a request may have, or not those that its prompt stands for.
        """
        got = self._parts.get(media.room)
        if got is None or media.start != len(got):
            return None
        assert self.limits is not None
        if media.total > self.limits.max_packed_bytes:
            raise InvalidRequest(
                f"the request's images have {media.total} bytes, but may have {self.limits.max_packed_bytes}: send "
                "fewer or smaller ones"
            )
        got += payload.data
        if len(got) < media.total:
            return None
        images = unpack_images(got)
        check_media(images, prompt_ids, self.limits)
        return images


class LackingRows:
    """What decode holds of images in host memory, and what has come of rows that it lacks.

    Args:
      host: rows in host memory.
      row_bytes: of a token's embedding.
    """

    def __init__(self, host: HostImages, row_bytes: int) -> None:
        self.host = host
        self._row_bytes = row_bytes
        self._lacking: dict[Room, dict[int, MediaItem]] = {}
        self._parts: dict[Room, dict[int, list[Bytes]]] = {}

    def too_large(self, request: Request) -> str | None:
        """Why host memory can't ever hold the images of `request`; None: it can."""
        num_bytes = sum(self._bytes_of(request).values())
        if num_bytes <= self.host.limit_bytes:
            return None
        return (
            f"the embeddings of the request's images have {num_bytes} bytes, but host memory holds "
            f"{self.host.limit_bytes}: send fewer or smaller images, or raise --mm-host-mib"
        )

    def hold(self, request: Request, room: Room, most_bytes: int) -> tuple[int, ...] | None:
        """Holds the images of `request`; the places of those that are lacking. None if there is no room now.

        Nor is there if more than `most_bytes` are lacking.
        """
        if not request.media:
            return ()
        images = self._bytes_of(request)
        if sum(size for digest, size in images.items() if self.host.find(digest) is None) > most_bytes:
            return None
        if not self.host.hold(request.request_id, images):
            return None
        missing: dict[bytes, int] = {}
        for place, item in enumerate(request.media):
            if self.host.find(item.digest) is None:
                missing.setdefault(item.digest, place)
        self._lacking[room] = {place: request.media[place] for place in missing.values()}
        self._parts[room] = {}
        return tuple(missing.values())

    def bytes_to_come(self, room: Room) -> int:
        """Bytes of rows that a room lacks."""
        return sum(item.num_rows for item in self._lacking.get(room, {}).values()) * self._row_bytes

    def came(self, room: Room, place: int, part: Bytes) -> bool:
        """Takes bytes of an image; False if they are not those of one that is lacking."""
        item = self._lacking.get(room, {}).get(place)
        if item is None:
            return False
        parts = self._parts[room].setdefault(place, [])
        parts.append(part)
        return sum(part.nbytes for part in parts) <= item.num_rows * self._row_bytes

    def ended(self, room: Room, usable: bool) -> None:
        """Nothing more comes for `room`; what has come is kept if its weights are those of now, and so `usable`."""
        lacking, parts = self._lacking.pop(room, {}), self._parts.pop(room, {})
        for place, item in lacking.items() if usable else ():
            rows = np.concatenate(parts[place]) if place in parts else np.empty(0, np.uint8)
            if rows.nbytes == item.num_rows * self._row_bytes:
                self.host.put(item.digest, rows.reshape(item.num_rows, self._row_bytes))

    def _bytes_of(self, request: Request) -> dict[bytes, int]:
        return {item.digest: item.num_rows * self._row_bytes for item in request.media}
