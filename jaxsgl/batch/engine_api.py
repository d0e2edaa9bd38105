"""What the serving loop needs of an engine: the protocols `StepEngine` and `PageEngine`, and what passes through them.

`engine.Engine` implements them on a device, `testing.engine.FakeEngine` without one. A step yields a `StepHandle`, with
`StepOutputs` for what its batch asked for besides tokens.

Between steps the engine takes operations: pages and rows to the host and back, adapters to the device. The host form of
pages is one array `[num_pages, layers, arrays, K, page_size, H]`, where keys come before values, the same whatever the
mesh. Its numbers are those of the pool; formats that NumPy lacks (bfloat16, float8) are kept as unsigned integers of
their size, so that bits pass unchanged. `PageEngine.apply` takes the operations in step order: a gather sees what the
steps before it wrote, and the steps after an insert see its pages. So the pages of a gather may be freed once it is
submitted. Knows nothing about prefixes, requests or where host pages are kept. The scheduler makes these values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.outputs import HostOutputs
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


class StepHandle(Protocol):
    """A step that was launched."""

    def tokens(self) -> npt.NDArray[np.int32]:
        """Waits for the step; sampled token ids `[num_seqs]`, in the order of the batch.

        A program of several steps yields `[num_steps, num_seqs]`; tokens after a sequence's own steps are undefined. A
        verify step yields `[num_tokens]`, a token after each of the batch, and -1 in the place of those that follow a
        draft which was not chosen.
        """
        ...

    def outputs(self) -> HostOutputs:
        """Waits like `tokens`; what the batch asked for besides tokens."""
        ...

    def drafts(self) -> npt.NDArray[np.int32]:
        """Waits longer than `tokens`; `[num_seqs, k]` what may follow each sequence's newest token.

        Only of steps with `StepInputs.drafts`. Undefined for a sequence whose token is dropped.
        """
        ...


class MaskedHandle(StepHandle, Protocol):
    """A `masked` step that was launched: its tokens are chosen later."""

    def choose(self, masks: npt.NDArray[np.uint32]) -> None:
        """Launches what chooses the tokens of a `masked` step, and returns at once. Called before the next `submit`.

        `masks [C, ceil(V / 32)]`, with the padded `Bucket.num_choices`: bit i % 32 of word i // 32 says whether token i
        may be chosen. The caller doesn't change them any more.
        """
        ...


class StepEngine(Protocol):
    """Runs steps in the order in which they are submitted."""

    def submit(self, inputs: StepInputs) -> StepHandle:
        """Launches one step and returns at once; never waits for an earlier one."""
        ...

    @property
    def recompiles(self) -> int:
        """Programs compiled since the engine was ready; more than 0 is a bug."""
        ...

    def start_profile(self, folder: str) -> None:
        """Starts to record what device and host do.

        Raises OSError or ValueError if `folder` can't be made or written, RuntimeError if the profiler can't start.
        """
        ...

    def stop_profile(self) -> None:
        """Stops recording and writes the trace, which takes seconds; may be called from a thread next to `submit`.

        Raises the profiler's error if the trace can't be written. It is dropped then, and another may be started.
        """
        ...


class PageEngine(Protocol):
    """The operations of a `StepEngine` between steps, for which flags ask."""

    @property
    def page_layout(self) -> PageLayout:
        """What a page is in its host form."""
        ...

    def apply(self, op: EngineOp, number: int) -> None:
        """Submits an operation after the steps before, and returns at once; never waits for the device."""
        ...

    def poll(self, wait: bool = False) -> list[tuple[int, npt.NDArray[Any]]]:
        """What gathers have brought since the last call, with their numbers: pages in their host form, rows' bytes.

        Those of pages come in their order, and so do those of rows. With `wait`, waits for one if none has ended, and
        nothing but the device may be in the way of its end.
        """
        ...
