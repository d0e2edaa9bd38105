"""`SlicedImage`: an image that is encoded a few layers at a time, so that tokens of running requests come in between.

A tower attends within a whole image: it can't be cut along its patches, but between its layers. While requests decode
and `--max-itl-ms` is set, an image whose encoding takes more than half of the bound is encoded ahead of the step that
reads it: each step that decodes is preceded by as many layers as the bound allows, and the engine keeps the numbers
between them. Its rows are locked meanwhile, whether its request is admitted or waits, and unlocked behind the last
layer: a request that waits must not keep rows from those before it in the order. When no request decodes any more, the
step that reads the image computes the rest; if one that reads others needs the rows, the image begins anew later.
There is one such image at a time. `images.py` owns it; the planner says how many layers are next (`Ahead`).
"""

from __future__ import annotations

from jaxsgl.batch.patches import EncodeInputs, EncodePart
from jaxsgl.cache.embeddings import HeldImage
from jaxsgl.requests.media import MediaItem
from jaxsgl.scheduler.req import Req


class SlicedImage:
    """The image, and how far it is.

    Args:
      req, index: the request for which rows are locked, and the image's place among its own.
      item: the image.
      rows: that are locked.
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
