"""Images of requests that the gateway gave the prefill worker alone: how decode gets them, and how legs compare theirs.

Gateways that speak gRPC send decode the expanded tokens of a prompt, but not its images. Decode then opens the room
without a hash of them, and prefill sends them without their pixels: decode names its cached pages by their digests, and
places tokens by their grids. Embeddings come later (rows.py). Called by the two state machines of this package.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

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
