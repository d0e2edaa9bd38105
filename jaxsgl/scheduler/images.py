"""Images of requests in extend steps: which rows of the pool of embeddings they have, and when the tower runs for them.

A chunk that reaches into an image needs the image's rows. They are locked from the launch of the first such chunk until
the launch of the last one: steps run in order on the device, so the rows may then be written by a later call of the
tower. A request between two chunks therefore holds at most the image that its next chunk begins in, which it needs no
further row to finish; so requests that wait for rows never wait for each other.

`ImageBudget` is for plans and reads only; `Images` carries out. Both exist only if the model has a vision tower.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.build import Work
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.patches import EncodeInputs, EncodePart, TowerCapacity, pack
from jaxsgl.cache.embeddings import EmbeddingRows, HeldImage
from jaxsgl.cache.pages import IntArray
from jaxsgl.errors import EngineUnavailable
from jaxsgl.messages.load import Totals
from jaxsgl.requests.media import MediaItem
from jaxsgl.scheduler.engine_ops import EngineOps
from jaxsgl.scheduler.kept_images import KeptImages
from jaxsgl.scheduler.latency import Latency
from jaxsgl.scheduler.plan import Ahead, Chunk
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.sliced_image import SlicedImage

SHARED_CALL_PATCHES = 4096  # images share a call of the tower up to so many on a device; a larger one has its own


class ImageBudget:
    """What the images of one plan's chunks take of the pool."""

    def __init__(self, images: Images, latency: Latency | None) -> None:
        self._images, self._latency = images, latency
        self._coming: set[bytes] = set()  # images whose rows are made, or copied back, before the step
        self._coming_s = self._taken_s = 0.0
        self._left = images.pool.num_available
        self._taken: set[bytes] = set()
        self._ahead: tuple[Req, int] | None = None
        if images.sliced is not None and latency is not None:
            self._go_on(images.sliced.req, images.sliced.index, latency)
        elif images.sliced is not None:
            self._left += images.sliced.item.length  # it is dropped if others need its rows

    @property
    def ahead(self) -> Ahead | None:
        """What is encoded ahead, before a step that decodes."""
        if self._ahead is None or self._latency is None:
            return None
        req, index = self._ahead
        return Ahead(req, index, self._images.layers_in_time(req.media[index], self._latency))

    def _go_on(self, req: Req, index: int, latency: Latency) -> None:
        """Takes the time of some layers."""
        self._ahead = req, index
        self._coming_s += latency.for_encoding_s

    def longest_chunk(self, req: Req, start: int, count: int) -> int:
        """At most `count`: tokens from `start` on whose images find rows, besides those that are taken.

        If the time of a step is bounded, they also end before an image whose rows would come too late.
        """
        left = self._left
        seen: set[bytes] = set()
        for place, (index, item) in enumerate(items_of(req, start, start + count)):
            if self._latency is not None and not self._has_time(item):
                has_rows = self._has_rows(req, index, item)
                fits = has_rows or item.length <= left
                if self._ahead is None and not place and fits and self._is_slow(item, self._latency):
                    self._go_on(req, index, self._latency)
                    self._left -= 0 if has_rows else item.length
                    self._taken.add(item.digest)
                return max(item.offset - start, 0)
            if not self._has_rows(req, index, item) and item.digest not in seen:
                seen.add(item.digest)
                left -= item.length
                if left < 0:
                    return max(item.offset - start, 0)
        return count

    def _has_time(self, item: MediaItem) -> bool:
        """Whether the image's rows are in the pool, or come in time; notes that they come."""
        images, latency = self._images, self._latency
        assert latency is not None
        held = images.pool.find(item.digest)
        if item.digest in self._coming or (held is not None and held.encoded):
            return True
        if images.is_kept(item):
            seconds = latency.restore_s(item.length)
        elif not images.may_encode(item):
            return True  # its request fails when the step is built
        elif self._is_slow(item, latency):
            return False
        else:
            seconds = latency.encode_s(item.num_patches)
        if self._coming and (seconds is None or self._coming_s + seconds > latency.for_encoding_s):
            return False
        self._coming.add(item.digest)
        self._coming_s += seconds or 0.0
        return True

    def _is_slow(self, item: MediaItem, latency: Latency) -> bool:
        """Whether the image is encoded in parts, ahead of the step that reads it."""
        if not self._images.is_sliced(item) or self._images.is_kept(item):
            return False
        seconds = latency.encode_s(item.num_patches)
        return seconds is None or seconds > latency.for_encoding_s or self._images.is_under_way(item)

    def take_seconds(self) -> float:
        """Seconds that images take beyond those that were taken before."""
        seconds, self._taken_s = self._coming_s - self._taken_s, self._coming_s
        return seconds

    def take(self, req: Req, start: int, count: int) -> None:
        """Takes rows for the images of a chunk."""
        for index, item in items_of(req, start, start + count):
            if not self._has_rows(req, index, item):
                self._left -= item.length
            self._taken.add(item.digest)

    def _has_rows(self, req: Req, index: int, item: MediaItem) -> bool:
        """Whether the image has rows that no other image can take."""
        if self._latency is None and self._images.is_under_way(item):
            return item.digest in self._taken
        held = self._images.pool.find(item.digest)
        is_locked = (held is not None and held.num_locks > 0) or self._images.holds(req, index)
        return is_locked or item.digest in self._taken


class Images:
    """Locks rows, and has images encoded.

    Args:
      pool: rows.
      capacity: of tower and pool.
      buckets: shapes of calls.
      totals: counts.
      ops: of the engine.

    Attributes:
      kept: rows in host memory; None: there are none.
      sliced: an image of which some layers are computed; None: there is none.
    """

    def __init__(
        self, pool: EmbeddingRows, capacity: TowerCapacity, buckets: BucketSet, totals: Totals, ops: EngineOps
    ) -> None:
        self.pool = pool
        self._capacity, self._buckets, self._totals = capacity, buckets, totals
        self._num_layers = capacity.shape.num_layers
        self._locks: dict[Req, dict[int, HeldImage]] = {}  # by the image's place among the request's
        self._to_encode: dict[bytes, tuple[MediaItem, HeldImage]] = {}
        self._to_restore: dict[bytes, HeldImage] = {}  # instead, in the step that is launched now
        self.kept = KeptImages(capacity.host_bytes, ops) if capacity.host_bytes else None
        self.sliced: SlicedImage | None = None

    def is_sliced(self, item: MediaItem) -> bool:
        """Whether the image may be encoded in parts."""
        return self._capacity.sliced_from is not None and self._capacity.is_sliced(
            self._buckets.encode_of(item.num_patches)
        )

    def is_under_way(self, item: MediaItem) -> bool:
        """Whether some layers of the image are computed."""
        return self.sliced is not None and self.sliced.item.digest == item.digest

    def layers_in_time(self, item: MediaItem, latency: Latency) -> int:
        """Layers of an image that may come before a step: one at least."""
        seconds, num_layers = latency.encode_s(self._buckets.encode_of(item.num_patches).num_patches), self._num_layers
        return 1 if not seconds else min(max(int(latency.for_encoding_s * num_layers / seconds), 1), num_layers)

    def placed(self, work: Work, req: Req) -> Work:
        """`work` with the rows of its images, which are locked for `req`; those that are not encoded will be."""
        start, stop = work.start, work.start + len(work.token_ids)
        rows: IntArray | None = None
        for index, item in items_of(req, start, stop):
            self._use(item)
            image = self._lock(req, index, item)
            if rows is None:
                rows = np.zeros(stop - start, np.int32)
            first, end = max(item.offset, start), min(item.stop, stop)
            rows[first - start : end - start] = image.rows[first - item.offset : end - item.offset]
        return replace(work, pool_rows=rows)

    def with_calls(self, inputs: StepInputs, ahead: Ahead | None) -> StepInputs:
        """The batch with the calls of the tower that must come before it, and with the part of one that is `ahead`."""
        if self._to_encode and self.kept is not None:
            self._restore(self.kept)
        parts = [] if ahead is None else [self._part(ahead)]
        if self.sliced is not None and self.sliced.item.digest in self._to_encode:
            parts.append(self.sliced.next_part())  # the step needs it
            self._is_encoded(*self._to_encode.pop(self.sliced.item.digest))
            self.sliced = None
        calls = self._calls() if self._to_encode else []
        return replace(inputs, encodes=(*parts, *calls)) if parts or calls else inputs

    def launched(self, chunks: Iterable[Chunk]) -> int:
        """Counts the step's calls as launched, and unlocks the images whose last chunk is.

        Returns how many embeddings are copied back from host memory before the step.
        """
        num_restored = sum(len(image.rows) for image in self._to_restore.values())
        for item, image in self._to_encode.values():
            self._is_encoded(item, image)
        self._to_encode.clear()
        for image in self._to_restore.values():
            image.encoded = True
            self._totals.restored_images += 1
        self._to_restore.clear()
        for chunk in chunks:
            locks = self._locks.get(chunk.req)
            if locks is None:
                continue
            for index in [index for index in locks if chunk.req.media[index].stop <= chunk.req.kv_len]:
                self.pool.unlock(locks.pop(index))
            if not locks:
                del self._locks[chunk.req]
        return num_restored

    def left(self, req: Req) -> None:
        """Unlocks what a request holds that ends, or goes back to the queue."""
        for image in self._locks.pop(req, {}).values():
            if self.sliced is not None and self.sliced.rows is image:
                self.sliced = None
            self.pool.unlock(image)
            if image.num_locks == 0:
                self._to_encode.pop(image.digest, None)

    def budget(self, latency: Latency | None) -> ImageBudget:
        """What a plan may take; `latency` is given if its step must end in time."""
        return ImageBudget(self, latency)

    def holds(self, req: Req, index: int) -> bool:
        """Whether the request has locked rows of its image `index`."""
        return index in self._locks.get(req, ())

    def is_kept(self, item: MediaItem) -> bool:
        """Whether the rows of the image are in host memory."""
        return self.kept is not None and self.kept.host.find(item.digest) is not None

    def may_encode(self, item: MediaItem) -> bool:
        """Whether the tower would make its rows, which are not in host memory then."""
        return self._capacity.encodes and not self.is_kept(item)

    def retire(self) -> None:
        """Lets no later request find what is encoded now; see `EmbeddingRows.retire`."""
        self._drop_sliced()
        self.pool.retire()
        if self.kept is not None:
            self.kept.retire()

    def flush(self) -> None:
        """Drops every image that no request needs."""
        self.pool.flush()
        if self.kept is not None:
            self.kept.host.flush()

    def check(self) -> None:
        """Raises AssertionError if a row or a lock is lost."""
        if self.kept is not None:
            self.kept.host.check()
        self.pool.check([image for locks in self._locks.values() for image in locks.values()])

    def _use(self, item: MediaItem) -> None:
        """Lets others leave host memory before the image.

        Raises `EngineUnavailable` if its rows came from another server, and weights were exchanged since.
        """
        if self.kept is not None:
            self.kept.host.used(item.digest)
        held = self.pool.find(item.digest)
        if not (self._capacity.encodes or (held is not None and held.encoded) or self.is_kept(item)):
            raise EngineUnavailable(
                "the weights were exchanged while the request ran, and a decode server can't encode its images again: "
                "send the request again"
            )

    def _lock(self, req: Req, index: int, item: MediaItem) -> HeldImage:
        locks = self._locks.setdefault(req, {})
        image = locks.get(index)
        if image is None:
            if self.sliced is not None and self.pool.find(item.digest) is None:
                self._make_room(item.length)
            image = locks[index] = self.pool.lock(item.digest, item.length)
        if not image.encoded:
            self._to_encode[item.digest] = (item, image)
        return image

    def _restore(self, kept: KeptImages) -> None:
        """Copies back what is in host memory, in place of encoding it."""
        for digest, (_, image) in list(self._to_encode.items()):
            if kept.restore(image):
                self._to_restore[digest] = image
            if digest in self._to_restore or not self._capacity.encodes:
                del self._to_encode[digest]

    def _part(self, ahead: Ahead) -> EncodePart:
        """The next layers of the image, whose rows are locked for the request."""
        item = ahead.req.media[ahead.place]
        if self.sliced is None:
            locks = self._locks.setdefault(ahead.req, {})
            if ahead.place not in locks:
                locks[ahead.place] = self.pool.lock(item.digest, item.length)
            rows = locks[ahead.place]
            call = pack([[(item, rows.rows)]], self._buckets.encode_of(item.num_patches), self._capacity)
            self.sliced = SlicedImage(ahead.req, ahead.place, item, rows, call, self._num_layers)
        assert self.sliced.item.digest == item.digest, "two images are encoded in parts"
        part = self.sliced.next_part(ahead.num_layers)
        if part.is_last:
            self._is_encoded(item, self.sliced.rows)
            self._drop_sliced()  # a request that waits must not keep rows from those before it in the order
        return part

    def _is_encoded(self, item: MediaItem, image: HeldImage) -> None:
        """Counts an image whose rows are written before the step that is launched now."""
        image.encoded = True
        self._totals.encoded_images += 1
        self._totals.encoded_patches += item.num_patches
        if self.kept is not None:
            self.kept.encoded(image)

    def _make_room(self, num_tokens: int) -> None:
        """Drops the image that is encoded in parts if others need its rows and no request decodes."""
        if self.pool.num_available < num_tokens:
            self._drop_sliced()

    def _drop_sliced(self) -> None:
        """Forgets the image that is encoded in parts, and unlocks its rows."""
        if self.sliced is not None:
            locks = self._locks[self.sliced.req]
            self.pool.unlock(locks.pop(self.sliced.index))
            if not locks:
                del self._locks[self.sliced.req]
            self.sliced = None

    def _calls(self) -> list[EncodeInputs]:
        waiting = [(item, image.rows) for item, image in self._to_encode.values()]
        calls = []
        for bins in share_out(waiting, self._capacity.num_bins, self._capacity.max_patches):
            most = max(sum(item.num_patches for item, _ in images) for images in bins)
            calls.append(pack(bins, self._buckets.encode_of(most), self._capacity))
        return calls


def items_of(req: Req, start: int, stop: int) -> list[tuple[int, MediaItem]]:
    """The images that tokens start .. stop - 1 reach into, with their places among the request's."""
    return [(i, item) for i, item in enumerate(req.media) if item.offset < stop and item.stop > start]


def share_out(
    images: Sequence[tuple[MediaItem, IntArray]], num_bins: int, max_patches: int
) -> list[list[list[tuple[MediaItem, IntArray]]]]:
    """Calls of the tower for `images`: for each, those of each of `num_bins` devices.

    The largest image that is left goes to the device that has least, so that the loads of the devices of a call differ
    by one image at most, unless one has no room for another image.
    """
    left = sorted(images, key=lambda image: -image[0].num_patches)
    calls = []
    while left:
        most = min(max(SHARED_CALL_PATCHES, left[0][0].num_patches), max_patches)
        bins: list[list[tuple[MediaItem, IntArray]]] = [[] for _ in range(num_bins)]
        loads, rest = [0] * num_bins, []
        for image in left:
            b = loads.index(min(loads))
            if bins[b] and loads[b] + image[0].num_patches > most:
                rest.append(image)
                continue
            bins[b].append(image)
            loads[b] += image[0].num_patches
        calls.append(bins)
        left = rest
    return calls
