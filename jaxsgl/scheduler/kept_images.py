"""Copies of images' embeddings between the device's pool and host memory, so that an image seen before isn't encoded.

An image is copied to the host once, after the step that has encoded it, so its rows on the device may be taken at any
time. Before a step that needs an image whose rows are gone they are copied back. `cache/host_images.py` decides which
images stay. Called by `images.py` and the scheduler; exists only if the model sees images and has a tier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from jaxsgl.batch.engine_ops import GatherRows, RestoreRows
from jaxsgl.cache.embeddings import HeldImage
from jaxsgl.cache.host_images import HostImages, HostRows
from jaxsgl.scheduler.engine_ops import EngineOps


@dataclass(slots=True, eq=False)
class _Coming:
    """An image whose rows are on their way to the host, and whether its weights are those of now."""

    digest: bytes
    is_new: bool


class KeptImages:
    """Operations on rows, and what they bring to the host.

    Args:
      limit_bytes: of host memory.
      ops: of the engine.

    Attributes:
      host: the rows in host memory.
      on_rows: is told of an image's rows that have come from the device; None: those are of weights of the past.
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
        if self.on_rows is not None or self.host.find(image.digest) is None:
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
