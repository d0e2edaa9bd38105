"""Copies of images' embeddings between the device's pool and host memory, so that an image seen before isn't encoded.

An image is copied to the host once, behind the step that has encoded it, so its rows on the device may be taken at any
time. Before a step that needs an image whose rows are gone they are copied back. Operations go to the engine in the
order of steps (`take_ops`): first what the step before has made, then what the next one needs. `cache/host_images.py`
decides which images stay. Called by `images.py` and the scheduler; exists only if the model sees images and has a tier.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from jaxsgl.batch.engine_ops import EngineOp, GatherRows, RestoreRows
from jaxsgl.cache.embeddings import HeldImage
from jaxsgl.cache.host_images import HostImages, HostRows


class KeptImages:
    """Operations on rows, and what they bring to the host.

    Args:
      limit_bytes: of host memory.

    Attributes:
      host: the rows in host memory.
      on_rows: is told of an image's rows that have come from the device; None: those are of weights of the past.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.host = HostImages(limit_bytes)
        self.on_rows: Callable[[bytes, HostRows | None], None] | None = None
        self._op_ids = itertools.count()
        self._behind_step: list[EngineOp] = []  # of the step that was launched last: it is submitted first
        self._ops: list[EngineOp] = []
        self._gathers: dict[int, tuple[bytes, bool]] = {}  # image, and whether its weights are those of now

    @property
    def has_work(self) -> bool:
        """Whether operations wait for the engine, or rows are on their way."""
        return bool(self._behind_step or self._ops or self._gathers)

    @property
    def awaits_rows(self) -> bool:
        """Whether rows are on their way to the host."""
        return bool(self._gathers)

    def is_coming(self, digest: bytes, also_old: bool = False) -> bool:
        """Whether the image's rows are on their way to the host; `also_old`: or those of weights of the past."""
        return any(coming == digest and (is_new or also_old) for coming, is_new in self._gathers.values())

    def encoded(self, image: HeldImage) -> None:
        """A step is launched that encodes the image: its rows are copied to the host behind it."""
        if self.on_rows is not None or self.host.find(image.digest) is None:
            self._behind_step.append(self._gather(image))

    def gather(self, image: HeldImage) -> None:
        """Copies rows to the host that a step before has made."""
        self._ops.append(self._gather(image))

    def restore(self, image: HeldImage) -> bool:
        """Copies the rows of the image back before the step that is launched next; False if they are not here."""
        rows = self.host.find(image.digest)
        if rows is None:
            return False
        self.host.used(image.digest)
        self._ops.append(RestoreRows(image.rows, rows))
        return True

    def take_ops(self) -> list[EngineOp]:
        """Operations that go to the engine before the step that was launched last."""
        ops, self._ops, self._behind_step = self._ops, self._behind_step, []
        return ops

    def gathered(self, gathers: Iterable[tuple[int, HostRows]]) -> None:
        """Takes rows that have come from the device."""
        for op_id, rows in gathers:
            digest, is_new = self._gathers.pop(op_id)
            if is_new:
                self.host.put(digest, rows)
            if self.on_rows is not None:
                self.on_rows(digest, rows if is_new else None)

    def retire(self) -> None:
        """Forgets all rows: weights are exchanged."""
        self.host.retire()
        self._gathers = {op_id: (digest, False) for op_id, (digest, _) in self._gathers.items()}

    def _gather(self, image: HeldImage) -> GatherRows:
        op_id = next(self._op_ids)
        self._gathers[op_id] = image.digest, not image.retired
        return GatherRows(op_id, image.rows)
