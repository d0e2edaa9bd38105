"""Operations submitted to the engine between steps: pages and rows to the host and back, adapters to the device.

The host form of pages is one array `[num_pages, layers, arrays, K, page_size, H]`, where keys come before values, the
same whatever the mesh. Its numbers are those of the pool; formats that NumPy lacks (bfloat16, float8) are kept as
unsigned integers of their size, so that bits pass unchanged. `PageEngine.apply` takes the operations in step order: a
gather sees what the steps before it wrote, and the steps after an insert see its pages. So the pages of a gather may be
freed once it is submitted. Knows nothing about prefixes, requests or where host pages are kept. The scheduler makes
these values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from jaxsgl.cache.pages import IntArray

HostPages: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class PageLayout:
    """What one page is in its host form. Pools of equal layouts may exchange pages.

    Attributes:
      page_size: tokens per page.
      page_shape: of one page, `[layers, arrays, K, page_size, H]`; the arrays are keys and values.
      dtype: of its numbers, as `--kv-cache-dtype` calls it.
      itemsize: bytes of a number.
    """

    page_size: int
    page_shape: tuple[int, ...]
    dtype: str
    itemsize: int

    @property
    def host_dtype(self) -> np.dtype[Any]:
        """The NumPy format of the host form."""
        return np.dtype(self.dtype if self.dtype in ("float32", "float16", "int32") else f"uint{8 * self.itemsize}")

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return math.prod(self.page_shape) * self.itemsize

    def shape(self, num_pages: int) -> tuple[int, ...]:
        """The shape of `num_pages` pages in their host form."""
        return num_pages, *self.page_shape

    @property
    def name(self) -> str:
        """Stands for the layout in the names of KV files, which outlive versions of this program: don't change it."""
        layers, arrays, heads, page_size, width = self.page_shape
        sizes = f"num_layers={layers}, num_kv_heads={heads}, page_size={page_size}, head_dim={width}"
        sizes += "" if arrays == 2 else f", num_arrays={arrays}"
        return f"PageLayout({sizes}, dtype={self.dtype!r}, itemsize={self.itemsize})"


@dataclass(frozen=True)
class Gather:
    """Copies `pages` of the pool to the host; `PageEngine.poll` yields them, in this order."""

    pages: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Insert:
    """Writes `data`, the host form of as many pages, to `pages` of the pool. `data` must not change afterwards."""

    pages: tuple[int, ...]
    data: HostPages


@dataclass(frozen=True)
class PlaceAdapter:
    """Writes the adapter that was loaded as `number` into `columns` of the pool, where steps read it from then on."""

    number: int
    columns: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class GatherRows:
    """Copies `rows [n]` of the pool of images' embeddings to the host; `PageEngine.poll` yields `[n, bytes]`."""

    rows: IntArray


@dataclass(frozen=True, eq=False)
class RestoreRows:
    """Writes `data [n, bytes]`, as a gather has brought it, to `rows [n]` of the pool of images' embeddings."""

    rows: IntArray
    data: npt.NDArray[np.uint8]


EngineOp: TypeAlias = Gather | Insert | PlaceAdapter | GatherRows | RestoreRows
