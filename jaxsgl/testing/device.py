"""The memory of a fake device: its page table, adapters, images, and pages of KV that hold token ids.

Changed by steps and by operations on pages alone, in their order. Knows nothing about how next tokens are made.
`testing.engine.FakeEngine` runs on it.
"""

from __future__ import annotations

import re
import threading
import zlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxsgl.batch.buckets import Capacity
from jaxsgl.batch.engine_api import GatherRows, HostPages, PageLayout, PlaceAdapter, RestoreRows
from jaxsgl.batch.inputs import StepArrays, StepInputs
from jaxsgl.batch.patches import EncodePart, TowerCapacity
from jaxsgl.cache.pages import DUMMY_PAGE, IntArray, ends_page, page_of, slots_of, tokens_in
from jaxsgl.errors import CheckpointError

_RECORD = 4  # numbers of a slot: the two of its key, the two of its value


class FakePageTable:
    """The page table of a fake device, changed by steps alone: `engine/tables.py` in NumPy."""

    def __init__(self, capacity: Capacity) -> None:
        self._page_size = capacity.page_size
        self._pages: IntArray = np.zeros((capacity.num_rows + 1, capacity.max_pages_per_seq), dtype=np.int32)

    def update(self, inputs: StepInputs) -> None:
        """Writes what the host sends with a step, and the pages of its tokens unless it is one of several."""
        for rows, places, pages in inputs.table_changes:
            self._pages[rows, places] = pages
        arrays = inputs.arrays
        if arrays.steps is None:
            token_rows = arrays.rows if arrays.token_rows is None else arrays.token_rows
            self.note(token_rows, arrays.positions, arrays.slots)

    def note(self, rows: IntArray, positions: IntArray, slots: IntArray) -> None:
        """Writes the pages of tokens that are computed."""
        self._pages[rows, page_of(positions, self._page_size)] = page_of(slots, self._page_size)

    def slots(self, row: int, num_tokens: int) -> IntArray:
        """Slots of the first `num_tokens` tokens of the sequence in `row`."""
        slots = slots_of(self._pages[row], 0, num_tokens, self._page_size)
        assert (slots >= tokens_in(1, self._page_size)).all(), f"row {row} reads the dummy page"
        return slots


class FakeAdapter(NamedTuple):
    """An adapter of a folder whose name ends in `<weights>r<rank>`: a number that is added to the model's."""

    weights: int
    rank: int

    @property
    def digest(self) -> str:
        """That of equal adapters."""
        return f"{self.weights}r{self.rank}"


class FakeAdapters:
    """Adapters by the numbers of their loadings, and the columns of a pool that remember whose they are.

    Attributes:
      kept: those that are held.
      may_load: unset, `stage` waits.
    """

    def __init__(self, capacity: Capacity) -> None:
        self._columns: IntArray = np.full((capacity.adapter_columns, 3), -1, np.int32)  # loading, weights, rank
        self.kept: dict[int, FakeAdapter] = {}
        self.may_load = threading.Event()
        self.may_load.set()

    def stage(self, folder: str) -> FakeAdapter:
        """Reads the folder's name, once it may. Raises `CheckpointError` if it says nothing."""
        self.may_load.wait()
        match = re.fullmatch(r".*?(\d+)r(\d+)", folder)
        if match is None:
            raise CheckpointError(f"{folder} holds no adapter")
        return FakeAdapter(1000 * int(match[1]), int(match[2]))

    def keep(self, number: int, staged: FakeAdapter) -> None:
        """Holds `staged`."""
        assert number not in self.kept
        self.kept[number] = staged

    def drop(self, number: int) -> None:
        """Forgets a loading."""
        del self.kept[number]

    def place(self, op: PlaceAdapter) -> None:
        """Writes its columns."""
        adapter = self.kept[op.number]
        assert len(op.columns) == len(set(op.columns)) == adapter.rank
        self._columns[list(op.columns)] = op.number, *adapter

    def weights(self, base: int, arrays: StepArrays[npt.NDArray[Any]]) -> IntArray:
        """`[T]` the weights that compute each token, out of those of the model and of its adapter's columns."""
        total: IntArray = np.full(len(arrays.token_ids), base, np.int32)
        if arrays.adapters is None or arrays.column_owners is None:
            return total
        for place in np.unique(arrays.adapters[arrays.adapters > 0]).tolist():
            columns = self._columns[: len(arrays.column_owners)][arrays.column_owners == place]
            assert len(columns) and (columns == columns[0]).all(), "an adapter reads columns of another one"
            _, weights, rank = columns[0].tolist()
            assert len(columns) == rank, "columns of an adapter lie beyond what the program reads"
            total[arrays.adapters == place] += weights
        return total


class FakeImages:
    """A pool of embeddings whose rows hold an id of the pixels, `image_ids`, that stand for a token."""

    def __init__(self, capacity: TowerCapacity | None) -> None:
        self._ids: IntArray = np.full(1 if capacity is None else capacity.num_rows + 1, -1, dtype=np.int32)
        self._next_layer = 0  # of the image that is encoded in parts

    def embedded(self, ids: IntArray, inputs: StepInputs, weights: int) -> IntArray:
        """Ids `[T]` of a step's tokens, those of images from their rows, after the calls of the tower before it.

        The tower is that of `weights`.
        """
        for call in inputs.encodes:
            if isinstance(call, EncodePart):
                assert call.first in (0, self._next_layer), "a layer of an image is left out"
                self._next_layer = 0 if call.is_last else call.stop
                if not call.is_last:
                    continue
                call = call.call
            for pixels, rows in zip(call.pixels, call.rows, strict=True):
                real = rows < len(self._ids)
                self._ids[rows[real]] = image_ids(pixels.reshape(len(rows), -1), weights)[real]
        pool_rows = inputs.arrays.pool_rows
        if pool_rows is None:
            return ids
        found = np.where(pool_rows > 0, self._ids[pool_rows], ids)
        assert (found >= 0).all(), "a step reads a row of the pool that no call has written"
        return found

    def restore(self, op: RestoreRows) -> None:
        """Writes rows."""
        self._ids[op.rows] = op.data.view(np.int32)[:, 0]

    def gather(self, op: GatherRows) -> npt.NDArray[np.uint8]:
        """The bytes of rows, which calls have written."""
        assert (self._ids[op.rows] >= 0).all(), "rows are copied that no call has written"
        return self._ids[op.rows][:, None].view(np.uint8)


def image_ids(pixels: npt.NDArray[np.uint8], weights: int = 0) -> IntArray:
    """`[tokens]` ids that `weights` make of the pixels `[tokens, ...]` of an image's tokens."""
    return np.array([zlib.crc32(each.tobytes(), weights) & 0x7FFFFFFF for each in pixels], dtype=np.int32)


class FakeStates:
    """States at their places: each is a hash of all tokens that its sequence has so far."""

    def __init__(self, capacity: Capacity) -> None:
        self._page_size, self._dummy_row = capacity.page_size, capacity.num_rows
        self._hashes = [-1] * (capacity.num_rows + 1 + (capacity.num_snapshots or 0))

    def extend(
        self, arrays: StepArrays[npt.NDArray[Any]], s: int, ids: IntArray, num_standing: int | None = None
    ) -> int:
        """Moves the state of sequence s over the tokens `ids`, and keeps it where the step says; the state after.

        Of drafts it moves over the first ones that stand.
        """
        assert arrays.state_from is not None and arrays.snapshot_at is not None and arrays.snapshot_to is not None
        row, start = int(arrays.rows[s]), int(arrays.lengths[s]) - len(ids)
        assert row != self._dummy_row
        before = self._hashes[arrays.state_from[s]] if start else 0
        moved = ids if num_standing is None else ids[:num_standing]
        for at, to in zip(arrays.snapshot_at[:, s].tolist(), arrays.snapshot_to[:, s].tolist(), strict=True):
            assert (at > 0) == (to > self._dummy_row)
            if at:
                assert at <= len(ids) and ends_page(start + at, self._page_size), "a state within a page is kept"
            if 0 < at <= len(moved):
                self._hashes[to] = zlib.crc32(moved[:at].tobytes(), before)
        self._hashes[row] = zlib.crc32(moved.tobytes(), before)
        return self._hashes[row]

    def decode(self, arrays: StepArrays[npt.NDArray[Any]], s: int, position: int, token_id: int) -> int:
        """Moves the state of sequence s over the token at `position`, and keeps it if that fills a page."""
        assert arrays.snapshot_to is not None
        row, to = int(arrays.rows[s]), int(arrays.snapshot_to[s])
        after = zlib.crc32(np.int32(token_id).tobytes(), self._hashes[row])
        self._hashes[row] = after
        if ends_page(position + 1, self._page_size) and to != self._dummy_row:
            self._hashes[to] = after
        return after


class FakePool:
    """Slots of KV. That of a token holds its id and position as key, the weights that computed it as value.

    Attributes:
      layout: of a page in its host form: one layer with one head.
    """

    def __init__(self, capacity: Capacity) -> None:
        self.layout = PageLayout(capacity.page_size, (1, 2, 1, capacity.page_size, _RECORD // 2), "int32", 4)
        self._slots: IntArray = np.full((tokens_in(capacity.num_pages, capacity.page_size), _RECORD), -1, np.int32)

    def store(self, slots: IntArray, ids: IntArray, positions: IntArray, weights: IntArray) -> None:
        """Writes tokens `[T]`, computed by `weights [T]`, to `slots [T]`."""
        number = weights.astype(ids.dtype)
        self._slots[slots] = np.stack((ids, positions, number, ~number), axis=-1)

    def read(self, slots: IntArray) -> IntArray:
        """`[T, 3]` id, position and weights at `slots [T]`."""
        return self._slots[slots, :3]

    def clear(self) -> None:
        """Forgets everything."""
        self._slots[:] = -1

    def gather(self, pages: tuple[int, ...]) -> HostPages:
        """The host form of `pages`."""
        assert DUMMY_PAGE not in pages, "the dummy page was gathered"
        of_pages = self._by_page()[list(pages)].reshape(len(pages), -1, 2, _RECORD // 2)
        return np.ascontiguousarray(of_pages.swapaxes(1, 2)).reshape(self.layout.shape(len(pages)))

    def insert(self, pages: tuple[int, ...], data: HostPages) -> None:
        """Writes the host form of `pages`."""
        assert DUMMY_PAGE not in pages, "the dummy page was overwritten"
        assert data.shape == self.layout.shape(len(pages)) and data.dtype == self.layout.host_dtype
        records = data.reshape(len(pages), 2, -1, _RECORD // 2).swapaxes(1, 2).reshape(len(pages), -1, _RECORD)
        assert (records[..., 2] == ~records[..., 3]).all(), "pages that no step wrote are inserted"
        self._by_page()[list(pages)] = records

    def _by_page(self) -> npt.NDArray[np.int32]:
        """`[num_pages, page_size, ...]`, a view."""
        return self._slots.reshape(-1, tokens_in(1, self.layout.page_size), _RECORD)
