"""Makes sharded parameters of pieces (`recipe.py`): several threads write each number once, into its final buffer.

Each shard is filled by itself, and only with what it holds. On a CPU the filled buffer is the parameter; to other
devices it is moved, and its memory is used again. Owns the threads, the buffers and the count of bytes. Knows neither
names nor files; `loading.py` calls it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding

from jaxsgl.weights.recipe import Piece

BLOCK_BYTES = 4 << 20  # copied at a time by one thread
ALIGNMENT = 64  # of XLA's buffers on a CPU: it takes such an array as it is and copies any other
NUM_THREADS = 8  # also of fewer processors: most of the time they wait for the disk
REPORT_S = 5.0

Box: TypeAlias = tuple[slice, ...]  # a part of an array; every slice has a start and a stop

logger = logging.getLogger(__name__)


class Progress:
    """Counts the bytes read and logs them every few seconds. Several threads add to it."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`total`: bytes that there are to read."""
        self._total = total
        self._clock = clock
        self._done = 0
        self._start_s = self._reported_s = clock()
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        """Counts bytes that were read."""
        with self._lock:
            self._done += num_bytes
            now = self._clock()
            if now - self._reported_s < REPORT_S:
                return
            self._reported_s = now
            done = self._done
        logger.info("weights: %s of %s read, %s", size(done), size(self._total), self._rate(done, now))

    def finish(self) -> None:
        """Logs what was read, and how fast."""
        now = self._clock()
        logger.info(
            "weights: %s read in %.1f s, %s", size(self._done), now - self._start_s, self._rate(self._done, now)
        )

    def _rate(self, done: int, now: float) -> str:
        return f"{done / 1e9 / max(now - self._start_s, 1e-9):.2f} GB/s"


def size(num_bytes: int) -> str:
    """Bytes in words: 3.9 MB, 16.38 GB."""
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.2f} GB"


@dataclass(frozen=True)
class Unfinished:
    """A parameter that threads fill."""

    shape: tuple[int, ...]
    sharding: NamedSharding
    shards: Sequence[tuple[jax.Device, npt.NDArray[Any]]]  # devices with equal shards have the same buffer
    copies: Sequence[Future[None]]
    num_bytes: int  # of the buffers

    def finish(self) -> jax.Array:
        """Waits for the threads, then for the devices; raises what a thread raised."""
        for copy in self.copies:
            copy.result()
        arrays = [jax.device_put(buffer, device) for device, buffer in self.shards]
        made = jax.make_array_from_single_device_arrays(self.shape, self.sharding, arrays)
        return jax.block_until_ready(made)


class Assembler:
    """The threads that read. Leaving the context ends them, after what they do at the moment.

    Args:
      progress: counts what was read.
      release: called with each block of numbers after it was copied.
    """

    def __init__(self, progress: Progress, release: Callable[[npt.NDArray[Any]], None]) -> None:
        self._progress = progress
        self._release = release
        self._pool = ThreadPoolExecutor(NUM_THREADS, "read-weights")

    def __enter__(self) -> Assembler:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def start(
        self, pieces: Sequence[Piece], shape: tuple[int, ...], dtype: np.dtype[Any], sharding: NamedSharding
    ) -> Unfinished:
        """Starts to make the parameter that `pieces` fill, in `dtype`, and returns at once."""
        buffers: dict[tuple[tuple[int, int], ...], npt.NDArray[Any]] = {}
        shards: list[tuple[jax.Device, npt.NDArray[Any]]] = []
        copies: list[Future[None]] = []
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            assert index is not None
            bounds = tuple(part.indices(length)[:2] for part, length in zip(index, shape, strict=True))
            if bounds not in buffers:
                buffers[bounds] = aligned_empty(tuple(stop - start for start, stop in bounds), dtype)
                for piece in pieces:
                    copies += self._fill(buffers[bounds], bounds, piece, shape)
            shards.append((device, buffers[bounds]))
        return Unfinished(shape, sharding, shards, copies, sum(buffer.nbytes for buffer in buffers.values()))

    def _fill(
        self, buffer: npt.NDArray[Any], bounds: Sequence[tuple[int, int]], piece: Piece, shape: tuple[int, ...]
    ) -> Iterator[Future[None]]:
        """Starts to copy what `piece` has of the shard within `bounds`."""
        common = overlap(bounds, piece, shape)
        if common is None:
            return
        place, box = common
        into = _part(buffer, place)
        width = max(piece.numbers.nbytes // math.prod(piece.numbers.shape), 1)
        for target in blocks(into.shape, width):
            cut = zip(box, target, strict=False)  # the leading axes
            source = tuple(slice(whole.start + part.start, whole.start + part.stop) for whole, part in cut)
            yield self._pool.submit(self._copy, _part(into, target), piece, (*source, *box[len(target) :]))

    def _copy(self, into: npt.NDArray[Any], piece: Piece, box: Box) -> None:
        numbers = np.asarray(piece.numbers[box])
        if numbers.dtype == into.dtype:  # as bits: NumPy copies numbers of foreign dtypes on one thread at a time
            bits = np.dtype(f"u{into.dtype.itemsize}")
            np.copyto(into.view(bits), numbers.view(bits))
        else:
            np.copyto(into, numbers, casting="unsafe")
        self._release(numbers)
        self._progress.add(numbers.nbytes)


def overlap(
    bounds: Sequence[tuple[int, int]], piece: Piece, shape: tuple[int, ...]
) -> tuple[tuple[int | slice, ...], Box] | None:
    """What a shard and a piece have in common: its place within the shard and within the piece; None if nothing."""
    in_shard: list[int | slice] = []
    in_piece: list[slice] = []
    place = (*piece.place, *(slice(None) for _ in shape[len(piece.place) :]))
    for (start, stop), part, length in zip(bounds, place, shape, strict=True):
        first, end, _ = part.indices(length) if isinstance(part, slice) else (part, part + 1, 1)
        low, high = max(start, first), min(stop, end)
        if low >= high:
            return None
        if isinstance(part, slice):
            in_shard.append(slice(low - start, high - start))
            in_piece.append(slice(low - first, high - first))
        else:
            in_shard.append(low - start)
    return tuple(in_shard), tuple(in_piece)


def blocks(shape: tuple[int, ...], width: int) -> Iterator[Box]:
    """Cuts an array of numbers of `width` bytes along its leading axes, into boxes of up to `BLOCK_BYTES`."""
    if not shape:
        yield ()
        return
    row_bytes = math.prod(shape[1:]) * width
    step = max(BLOCK_BYTES // row_bytes, 1)
    for first in range(0, shape[0], step):
        rows = slice(first, min(first + step, shape[0]))
        if row_bytes <= BLOCK_BYTES:
            yield (rows,)
        else:
            for part in blocks(shape[1:], width):
                yield (rows, *part)


def _part(array: npt.NDArray[Any], place: tuple[Any, ...]) -> npt.NDArray[Any]:
    """A view of a part by its leading axes, also of a single number."""
    return array[(*place, ...)]


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """An array of unset numbers that a CPU's XLA can take as its own buffer."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)
