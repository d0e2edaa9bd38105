"""Memory pages of 2 MiB for weights and KV pools on a CPU: the processor finds numbers in them faster.

A step reads all weights once and in order, so with pages of 4 KiB it looks up an address for each 4 KiB, and waits for
it. Measured in docs/notes/2026-11-cpu-step.md. Called by `engine`, once: weights and pools that come later lie in pages
of any size, which is as good in all but speed.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Iterable

import jax

LARGE_PAGE = 2 << 20  # bytes
LEAST_BYTES = 1 << 18  # of an array that is worth a large page
_MADV_COLLAPSE = 25  # of linux/mman.h, since Linux 6.1
_TRIES = 4  # memory that was written a moment ago is often refused once or twice

logger = logging.getLogger(__name__)


def use_large_pages(arrays: Iterable[jax.Array]) -> int:
    """Moves arrays in host memory into large pages where the system lets us; what they hold and where stays the same.

    Memory next to an array moves along if it lies in the same 2 MiB.

    Returns:
      Bytes of large pages that the arrays now lie in: 0 if the system has none (Linux before 6.1, macOS).
    """
    if sys.platform != "linux":
        return 0
    pages: set[int] = set()
    for array in arrays:
        for shard in array.addressable_shards:
            if shard.data.nbytes >= LEAST_BYTES:
                begin = shard.data.unsafe_buffer_pointer()
                pages.update(range(begin // LARGE_PAGE, (begin + shard.data.nbytes - 1) // LARGE_PAGE + 1))
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    left = sorted(pages)
    # One by one: those that hold the ends of what the process has mapped are always refused, others now and then.
    for _ in range(_TRIES):
        left = [page for page in left if madvise(page * LARGE_PAGE, LARGE_PAGE, _MADV_COLLAPSE) != 0]
    moved = len(pages) - len(left)
    logger.debug("%d of %d pages of 2 MiB with weights or KV are large", moved, len(pages))
    return moved * LARGE_PAGE
