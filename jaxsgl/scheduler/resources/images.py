"""Images of requests in extend steps: which rows of the pool of embeddings they have, and when the tower runs for them.

A chunk that reaches into an image needs the image's rows. They are locked from the launch of the first such chunk until
the launch of the last one: steps run in order on the device, so the rows may then be written by a later call of the
tower. A request between two chunks therefore holds at most the image that its next chunk begins in, which it needs no
further row to finish; so requests that wait for rows never wait for each other.

`ImageDraft` is for plans and reads only; `Images` carries out. It exists only if the model sees images, and owns

    KeptImages     rows in host memory: an image is copied there once, after the step that has encoded it, and copied
                   back before a step that needs it, if its rows on the device were taken meanwhile
    SlicedImage    an image that is encoded a few layers at a time, so that tokens of running requests come in between
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.build import Work
from jaxsgl.batch.engine_api import GatherRows, RestoreRows
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.patches import EncodeInputs, EncodePart, TowerCapacity, pack
from jaxsgl.cache.embeddings import EmbeddingRows, HeldImage, HostImages, HostRows
from jaxsgl.cache.pages import IntArray
from jaxsgl.errors import EngineUnavailable
from jaxsgl.messages.replies import Totals
from jaxsgl.requests.media import MediaItem
from jaxsgl.scheduler.budget import Timing
from jaxsgl.scheduler.engine_ops import EngineOps
from jaxsgl.scheduler.plan import Action, Part, short_name
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.request_table import RequestTable
from jaxsgl.scheduler.resources.resource import Extent, PlanInTheMaking, Resource, ResourceDraft

UNBOUNDED = Timing()


@dataclass(frozen=True, slots=True)
class EncodeAhead:
    """Encode the next `num_layers` layers of the image `place` of `req`, ahead of the step that reads it."""

    verb: ClassVar[str] = "encode"
    req: Req
    place: int
    num_layers: int

    def __str__(self) -> str:
        return f"{self.num_layers} layers of {short_name(self.req)}"


@dataclass(slots=True)
class _Look:
    """What a chunk finds of its images.

    Attributes:
      num_tokens: that it may have.
      coming: images whose rows are made, or copied back, before the step, and the seconds that this takes.
      ahead: the place of the image at which it must stop, which is encoded ahead; none or one.
    """

    num_tokens: int
    coming: dict[bytes, float] = field(default_factory=dict)
    ahead: tuple[int, ...] = ()


class ImageDraft(ResourceDraft):
    """What the images of one plan's chunks take of the pool, and of the step's time if running requests wait for it."""

    def __init__(self, images: Images, plan: PlanInTheMaking) -> None:
        self._images, self._plan = images, plan
        self._ahead: tuple[tuple[Req, int], ...] = ()  # the image that is encoded ahead: none or one
        self._coming: set[bytes] = set()  # images whose rows are made, or copied back, before the step
        self._taken: set[bytes] = set()
        self._time, self._left = UNBOUNDED, 0

    @property
    def is_working(self) -> bool:
        """Whether layers of an image are encoded ahead."""
        return len(self._ahead) > 0

    def begin_step(self) -> None:
        """Goes on with the image that is encoded in parts; it is dropped if others need its rows and none decodes."""
        sliced = self._images.sliced
        self._time = self._images.time if self._plan.decoding else UNBOUNDED
        self._left = self._images.pool.num_available
        self._ahead, self.seconds = (), 0.0
        self._coming.clear()
        self._taken.clear()
        if sliced is not None and self._time.is_bounded:
            self._ahead, self.seconds = ((sliced.req, sliced.index),), self._time.for_encoding_s
        elif sliced is not None:
            self._left += sliced.item.num_rows

    def longest(self, req: Req, start: int, count: int) -> Extent:
        """Tokens from `start` on whose images find rows, besides those that are taken.

        If the time of a step is bounded, they also end before an image whose rows would come too late.
        """
        look = self._look(req, start, count)
        seconds = [*look.coming.values(), *(self._time.for_encoding_s for _ in look.ahead)]
        return Extent(look.num_tokens, sum(seconds))

    def ends(self, req: Req, start: int, count: int, preferred: int) -> int:
        """Not within an image, if its tokens see up to its end: after it, if the chunk may be as long, or before it."""
        if not self._images.sees_ahead:
            return preferred
        for _, item in items_of(req, start + preferred, start + preferred + 1):
            if item.offset < start + preferred:
                return item.stop - start if item.stop <= start + count else max(item.offset - start, 0)
        return preferred

    def least(self, req: Req, start: int) -> int:
        """An image, or its rest."""
        if not self._images.sees_ahead:
            return 1
        return max((item.stop - start for _, item in items_of(req, start, start + 1)), default=1)

    def take(self, req: Req, start: int, count: int, wanted: int) -> None:
        """Takes rows for the images of the chunk, and the time of those that it reaches or must wait for."""
        look = self._look(req, start, wanted)
        self._coming.update(look.coming)
        self.seconds += sum(look.coming.values())
        for index in look.ahead:
            item = req.media[index]
            self._left -= 0 if self._has_rows(item) else item.num_rows
            self._taken.add(item.digest)
            self._ahead = ((req, index),)
            self.seconds += self._time.for_encoding_s
        for index, item in items_of(req, start, start + count) if count else ():
            if self._images.holds_retired(req, index):
                continue  # no other request finds these rows
            if not self._has_rows(item):
                self._left -= item.num_rows
            self._taken.add(item.digest)

    def actions(self, decodes: bool) -> tuple[Action, ...]:
        """What is encoded ahead, before a step that decodes."""
        if not decodes:
            return ()
        layers_in_time = self._images.layers_in_time
        return tuple([EncodeAhead(req, index, layers_in_time(req.media[index])) for req, index in self._ahead])

    def _look(self, req: Req, start: int, count: int) -> _Look:
        left, seen, look = self._left, set[bytes](), _Look(count)
        for place, (index, item) in enumerate(items_of(req, start, start + count)):
            if self._images.holds_retired(req, index):
                continue
            has_rows = self._has_rows(item)
            seconds = self._seconds_of(item, look)
            if seconds is None:
                look.num_tokens = max(item.offset - start, 0)
                fits = has_rows or item.num_rows <= left
                if not self.is_working and not place and fits and self._is_slow(item):
                    look.ahead = (index,)
                return look
            if not self._is_there(item, look):
                look.coming[item.digest] = seconds
            if not has_rows and item.digest not in seen:
                seen.add(item.digest)
                left -= item.num_rows
                if left < 0:
                    look.num_tokens = max(item.offset - start, 0)
                    return look
        return look

    def _is_there(self, item: MediaItem, look: _Look) -> bool:
        """Whether the rows of the image are in the pool, or come anyway."""
        held = self._images.pool.find(item.digest)
        is_coming = item.digest in self._coming or item.digest in look.coming
        return is_coming or (held is not None and held.encoded) or not self._images.can_come(item)

    def _seconds_of(self, item: MediaItem, look: _Look) -> float | None:
        """Seconds until the rows of the image come, besides those of others; None if that is not in time."""
        if not self._time.is_bounded or self._is_there(item, look):
            return 0.0
        if self._images.is_kept(item):
            seconds = self._time.restore_s(item.num_rows)
        elif self._is_slow(item):
            return None
        else:
            seconds = self._time.encode_s(item.num_patches)
        coming_s = self.seconds + sum(look.coming.values())
        if (self._coming or look.coming) and (seconds is None or coming_s + seconds > self._time.for_encoding_s):
            return None
        return seconds or 0.0

    def _is_slow(self, item: MediaItem) -> bool:
        """Whether the image is encoded in parts, ahead of the step that reads it."""
        if not self._time.is_bounded or not self._images.is_sliced(item) or self._images.is_kept(item):
            return False
        seconds = self._time.encode_s(item.num_patches)
        return seconds is None or seconds > self._time.for_encoding_s or self._images.is_under_way(item)

    def _has_rows(self, item: MediaItem) -> bool:
        """Whether the image has rows that no other image can take."""
        if not self._time.is_bounded and self._images.is_under_way(item):
            return item.digest in self._taken
        held = self._images.pool.find(item.digest)
        return (held is not None and held.num_locks > 0) or item.digest in self._taken


class Images(Resource):
    """Locks rows, and has images encoded.

    Args:
      pool: rows.
      capacity: of tower and pool.
      buckets: shapes of calls.
      totals: counts.
      ops: of the engine.
      time: how long steps may take.

    Attributes:
      kept: rows in host memory.
      sees_ahead: see `Capacity`.
      sliced: an image of which some layers are computed; None: there is none.
    """

    def __init__(
        self,
        pool: EmbeddingRows,
        capacity: TowerCapacity,
        buckets: BucketSet,
        totals: Totals,
        ops: EngineOps,
        time: Timing,
        sees_ahead: bool = False,
    ) -> None:
        self.pool, self.time, self.sees_ahead = pool, time, sees_ahead
        self._capacity, self._buckets, self._totals = capacity, buckets, totals
        self._num_layers = capacity.shape.num_layers
        self._locks: dict[Req, dict[int, HeldImage]] = {}  # by the image's place among the request's
        self._locked: list[tuple[Req, int]] = []  # of those, what the chunks of the step that is being built have added
        self._to_encode: dict[bytes, tuple[MediaItem, HeldImage]] = {}
        self._to_restore: dict[bytes, HeldImage] = {}  # instead, in the step that is launched now
        self.kept = KeptImages(capacity.host_bytes, ops)
        self.sliced: SlicedImage | None = None
        self._ahead: list[EncodeAhead] = []  # of the plan that is carried out: none or one

    def is_sliced(self, item: MediaItem) -> bool:
        """Whether the image may be encoded in parts."""
        return self._capacity.sliced_from is not None and self._capacity.is_sliced(
            self._buckets.encode_of(item.num_patches)
        )

    def is_under_way(self, item: MediaItem) -> bool:
        """Whether some layers of the image are computed."""
        return self.sliced is not None and self.sliced.item.digest == item.digest

    def layers_in_time(self, item: MediaItem) -> int:
        """Layers of an image that may come before a step: one at least."""
        time, num_layers = self.time, self._num_layers
        seconds = time.encode_s(self._buckets.encode_of(item.num_patches).num_patches)
        return 1 if not seconds else min(max(int(time.for_encoding_s * num_layers / seconds), 1), num_layers)

    def draft(self, plan: PlanInTheMaking) -> ImageDraft:
        """See `Resource`."""
        return ImageDraft(self, plan)

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Files what is to be encoded ahead, which `completed` does: no layer counts as done before a step is built."""
        self._ahead = [action for action in actions if isinstance(action, EncodeAhead)]

    def placed(self, work: Work, req: Req) -> Work:
        """`work` with the rows of its images, which are locked for `req`; those that are not encoded will be."""
        start, stop = work.start, work.start + len(work.token_ids)
        rows: IntArray | None = None
        seen = np.arange(start + 1, stop + 1, dtype=np.int32) if self.sees_ahead else None
        for index, item in items_of(req, start, stop):
            self._use(item)
            image = self._lock(req, index, item)
            if rows is None:
                rows = np.zeros(stop - start, np.int32)
            first, end = max(item.offset, start), min(item.stop, stop)
            of_tokens = item.by_token(image.rows)
            rows[first - start : end - start] = of_tokens[first - item.offset : end - item.offset]
            if seen is not None:
                assert item.stop <= stop, "a chunk ends within an image that its tokens see"
                seen[first - start : end - start] = item.stop
        return replace(work, pool_rows=rows, seen=seen) if req.media else work

    def not_launched(self) -> None:
        """Unlocks what the step's chunks have locked, so that what a request holds is always encoded."""
        for req, index in self._locked:
            self._unlock(req, index)
        self._locked.clear()
        self._to_encode.clear()

    def completed(self, inputs: StepInputs) -> StepInputs:
        """The batch with the calls of the tower that must come before it, and with the part of one that is ahead."""
        parts = [self._part(ahead) for ahead in self._ahead]
        if inputs.bucket.kind in ("decode", "verify"):  # it reads no image
            return replace(inputs, encodes=tuple(parts)) if parts else inputs
        self._restore()
        if self.sliced is not None and self.sliced.item.digest in self._to_encode:
            parts.append(self.sliced.next_part())  # the step needs it
            _, image = self._to_encode.pop(self.sliced.item.digest)
            self._is_encoded(image)
            self._drop_sliced()
        calls = self._calls() if self._to_encode else []
        return replace(inputs, encodes=(*parts, *calls)) if parts or calls else inputs

    def launched(self, chunks: Sequence[Part]) -> None:
        """Counts the step's calls as launched, and unlocks the images whose last chunk is."""
        self.time.restores(sum(len(image.rows) for image in self._to_restore.values()))
        for _, image in self._to_encode.values():
            self._is_encoded(image)
        self._to_encode.clear()
        for image in self._to_restore.values():
            image.encoded = True
            self._totals.restored_images += 1
        self._to_restore.clear()
        self._locked.clear()
        for req, _ in chunks:
            for index in [index for index in self._locks.get(req, ()) if req.media[index].stop <= req.kv_len]:
                self._unlock(req, index)
        self.epoch += 1

    def left(self, req: Req, ends: bool) -> None:
        """Unlocks what a request holds."""
        for image in self._locks.pop(req, {}).values():
            self.pool.unlock(image)
        if self.sliced is not None and self.sliced.req is req:
            self._drop_sliced()

    def holds_retired(self, req: Req, index: int) -> bool:
        """Whether the rows of its image `index` that the request has locked are of weights of the past."""
        image = self._locks.get(req, {}).get(index)
        return image is not None and image.retired

    def is_kept(self, item: MediaItem) -> bool:
        """Whether the rows of the image are in host memory."""
        return self.kept.host.find(item.digest) is not None

    def can_come(self, item: MediaItem) -> bool:
        """Whether its rows can be made or copied back; otherwise the request fails when a step is built."""
        return self._capacity.encodes or self.is_kept(item)

    def retire_cached(self) -> None:
        """Lets no later request find what is encoded now; see `EmbeddingRows.retire`."""
        self._drop_sliced()
        self.pool.retire()
        self.kept.retire()

    def flush(self) -> None:
        """Drops every image that no request needs."""
        self.pool.flush()
        self.kept.host.flush()

    def check(self, requests: RequestTable) -> None:
        """Raises AssertionError if a row or a lock is lost, or a lock is that of a request that has ended."""
        sliced = [] if self.sliced is None else [self.sliced]
        gone = {*self._locks, *(each.req for each in sliced)} - set(requests.all())
        assert not gone, f"rows are locked for requests that have ended: {[req.name for req in gone]}"
        self.kept.host.check()
        images = [image for locks in self._locks.values() for image in locks.values()]
        assert all(image.encoded for image in images), "a request holds rows that no launched step has written"
        self.pool.check([*images, *(each.rows for each in sliced)])

    def _use(self, item: MediaItem) -> None:
        """Lets others leave host memory before the image.

        Raises `EngineUnavailable` if its rows came from another server, and weights were exchanged since.
        """
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
                self._make_room(item.num_rows)
            image = locks[index] = self.pool.lock(item.digest, item.num_rows)
            self._locked.append((req, index))
        if not image.encoded:
            self._to_encode[item.digest] = (item, image)
        return image

    def _unlock(self, req: Req, index: int) -> None:
        locks = self._locks[req]
        self.pool.unlock(locks.pop(index))
        if not locks:
            del self._locks[req]

    def _restore(self) -> None:
        """Copies back what is in host memory, in place of encoding it."""
        for digest, (_, image) in list(self._to_encode.items()):
            if self.kept.restore(image):
                self._to_restore[digest] = image
            if digest in self._to_restore or not self._capacity.encodes:
                del self._to_encode[digest]

    def _part(self, ahead: EncodeAhead) -> EncodePart:
        """The next layers of the image, whose rows are locked until the last one."""
        item = ahead.req.media[ahead.place]
        if self.sliced is None:
            rows = self.pool.lock(item.digest, item.num_rows)
            call = pack([[(item, rows.rows)]], self._buckets.encode_of(item.num_patches), self._capacity)
            self.sliced = SlicedImage(ahead.req, ahead.place, item, rows, call, self._num_layers)
        assert self.sliced.item.digest == item.digest, "two images are encoded in parts"
        part = self.sliced.next_part(ahead.num_layers)
        if part.is_last:
            self._is_encoded(self.sliced.rows)
            self._drop_sliced()
        return part

    def _is_encoded(self, image: HeldImage) -> None:
        """Counts an image whose rows are written before the step that is launched now."""
        image.encoded = True
        self._totals.encoded_images += 1
        self.kept.encoded(image)

    def _make_room(self, num_tokens: int) -> None:
        """Drops the image that is encoded in parts if others need its rows and no request decodes."""
        if self.pool.num_available < num_tokens:
            self._drop_sliced()

    def _drop_sliced(self) -> None:
        """Forgets the image that is encoded in parts, and unlocks its rows."""
        if self.sliced is not None:
            self.pool.unlock(self.sliced.rows)
            self.sliced = None

    def _calls(self) -> list[EncodeInputs]:
        waiting = [(item, image.rows) for item, image in self._to_encode.values()]
        calls = []
        for bins in share_out(waiting, self._capacity.num_bins, self._capacity.shared_patches):
            most = max(sum(item.num_patches for item, _ in images) for images in bins)
            calls.append(pack(bins, self._buckets.encode_of(most), self._capacity))
        return calls


def items_of(req: Req, start: int, stop: int) -> list[tuple[int, MediaItem]]:
    """The images that tokens start .. stop - 1 reach into, with their places among the request's."""
    return [(i, item) for i, item in enumerate(req.media) if item.offset < stop and item.stop > start]


def share_out(
    images: Sequence[tuple[MediaItem, IntArray]], num_bins: int, shared_patches: int
) -> list[list[list[tuple[MediaItem, IntArray]]]]:
    """Calls of the tower for `images`: for each, those of each of `num_bins` devices, with up to `shared_patches`.

    The largest image that is left goes to the device that has least, so that the loads of the devices of a call differ
    by one image at most, unless one has no room for another image.
    """
    left = sorted(images, key=lambda image: -image[0].num_patches)
    calls = []
    while left:
        most = max(shared_patches, left[0][0].num_patches)
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


class SlicedImage:
    """An image that is encoded in parts, and how far it is.

    A tower attends within a whole image: it can't be cut along its patches, but between its layers. While requests
    decode and `--max-itl-ms` is set, an image whose encoding takes more than half of the bound is encoded ahead of the
    step that reads it: each step that decodes is preceded by as many layers as the bound allows, and the engine keeps
    the numbers between them. It has a lock on its rows meanwhile, whether its request is admitted or waits, and none
    after the last layer: a request that waits must not keep rows from those before it in the order. When no request
    decodes any more, the step that reads the image computes the rest; if one that reads others needs the rows, the
    image begins anew later. There is one such image at a time.

    Args:
      req, index: the request for which it is encoded, and the image's place among its own.
      item: the image.
      rows: that it has locked.
      call: of the tower, for this image alone.
      num_layers: of the tower.
    """

    def __init__(
        self, req: Req, index: int, item: MediaItem, rows: HeldImage, call: EncodeInputs, num_layers: int
    ) -> None:
        self.req, self.index, self.item, self.rows = req, index, item, rows
        self._call, self._num_layers = call, num_layers
        self._done = 0

    def next_part(self, num_layers: int | None = None) -> EncodePart:
        """The next layers, which count as launched; None: all that are left."""
        left = self._num_layers - self._done
        first, self._done = self._done, self._done + min(left if num_layers is None else num_layers, left)
        return EncodePart(self._call, first, self._done, self._num_layers)


@dataclass(slots=True, eq=False)
class _Coming:
    """An image whose rows are on their way to the host, and whether its weights are those of now."""

    digest: bytes
    is_new: bool


class KeptImages:
    """The rows of images in host memory; no image is copied there if that has no room for any.

    An image is copied to the host once, after the step that has encoded it, so its rows on the device may be taken at
    any time. Before a step that needs an image whose rows are gone they are copied back. cache/embeddings.py decides
    which images stay.

    Args:
      limit_bytes: of host memory.
      ops: of the engine.

    Attributes:
      host: the rows in host memory.
      on_rows: gets an image's rows that have come from the device; None: those are of weights of the past.
    """

    def __init__(self, limit_bytes: int, ops: EngineOps) -> None:
        self.host = HostImages(limit_bytes)
        self.on_rows: Callable[[bytes, HostRows | None], None] | None = None
        self._ops = ops
        self._coming: list[_Coming] = []

    def is_coming(self, digest: bytes, also_old: bool = False) -> bool:
        """Whether the image's rows are on their way to the host; `also_old`: or those of weights of the past."""
        return any(coming.digest == digest and (coming.is_new or also_old) for coming in self._coming)

    def encoded(self, image: HeldImage) -> None:
        """A step is launched that encodes the image: its rows are copied to the host after it."""
        if self.host.limit_bytes and (self.on_rows is not None or self.host.find(image.digest) is None):
            self._gather(image, after_step=True)

    def gather(self, image: HeldImage) -> None:
        """Copies rows to the host that a step before has made."""
        self._gather(image, after_step=False)

    def restore(self, image: HeldImage) -> bool:
        """Copies the rows of the image back before the step that is launched next; False if they are not here."""
        rows = self.host.find(image.digest)
        if rows is None:
            return False
        self.host.used(image.digest)
        self._ops.submit(RestoreRows(image.rows, rows))
        return True

    def retire(self) -> None:
        """Forgets all rows: weights are exchanged."""
        self.host.retire()
        for coming in self._coming:
            coming.is_new = False

    def _gather(self, image: HeldImage, after_step: bool) -> None:
        coming = _Coming(image.digest, not image.retired)
        self._coming.append(coming)
        self._ops.submit(GatherRows(image.rows), partial(self._came, coming), after_step=after_step)

    def _came(self, coming: _Coming, rows: HostRows) -> None:
        self._coming.remove(coming)
        if coming.is_new:
            self.host.put(coming.digest, rows)
        if self.on_rows is not None:
            self.on_rows(coming.digest, rows if coming.is_new else None)
