"""Embeddings of images on their way from prefill to decode, whose server has no vision tower.

Decode computes less than a page of each prompt, and all of one that was retracted or whose pages were evicted, so it
needs the embeddings of all images of a request for as long as that lives. It holds them in host memory from its grant
on, and names those in it that it lacks. Prefill sends them as its tower makes them; what host memory or the pool has is
sent when the request starts, and an image that neither has is encoded again, for which its part of the prompt is
computed again. `LackingRows` is decode's part, called by its state machine, the functions are prefill's.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxsgl.cache.host_images import HostImages
from jaxsgl.requests.media import MediaItem
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.disagg.prefill import PrefillRooms
from jaxsgl.scheduler.disagg.rooms import Action
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.resources.images import Images
from jaxsgl.transfer.frames import Room
from jaxsgl.transfer.wire import Bytes


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
        return sum(item.length for item in self._lacking.get(room, {}).values()) * self._row_bytes

    def came(self, room: Room, place: int, part: Bytes) -> bool:
        """Takes bytes of an image; False if they are not those of one that is lacking."""
        item = self._lacking.get(room, {}).get(place)
        if item is None:
            return False
        parts = self._parts[room].setdefault(place, [])
        parts.append(part)
        return sum(part.nbytes for part in parts) <= item.length * self._row_bytes

    def ended(self, room: Room, usable: bool) -> None:
        """Nothing more comes for `room`; what has come is kept if its weights are those of now, and so `usable`."""
        lacking, parts = self._lacking.pop(room, {}), self._parts.pop(room, {})
        for place, item in lacking.items() if usable else ():
            rows = np.concatenate(parts[place]) if place in parts else np.empty(0, np.uint8)
            if rows.nbytes == item.length * self._row_bytes:
                self.host.put(item.digest, rows.reshape(item.length, self._row_bytes))

    def _bytes_of(self, request: Request) -> dict[bytes, int]:
        return {item.digest: item.length * self._row_bytes for item in request.media}


def started(rooms: PrefillRooms, images: Images, samples: list[Req]) -> Iterator[Action]:
    """Sends rows that are there already to a request that prefill starts, and has it compute the images of others."""
    kept = images.kept
    for req in samples:
        wanted = rooms.wanted(req.request_id)
        for item in req.media:
            if item.digest not in wanted:
                continue
            rows, held = kept.host.find(item.digest), images.pool.find(item.digest)
            if rows is not None:
                kept.host.used(item.digest)
                yield from rooms.rows(item.digest, rows)
            elif kept.is_coming(item.digest):
                continue
            elif held is not None and held.encoded:
                kept.gather(held)
            else:
                req.max_cached_tokens = min(
                    item.offset, len(req.prompt_ids) if req.max_cached_tokens is None else req.max_cached_tokens
                )


def lost_rows(rooms: PrefillRooms, images: Images, request_id: str) -> bool:
    """Whether rows that decode lacks of a request that is computed are nowhere, and don't come any more."""
    wanted, kept = rooms.wanted(request_id), images.kept
    return any(not kept.is_coming(digest, also_old=True) for digest in wanted)
