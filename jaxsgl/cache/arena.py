"""The host tier's memory: how many pages it holds, and the array that they lie in. Called once, at the start."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsgl.config.features import HOST_POOLS, HostKvConfig
from jaxsgl.errors import ConfigError

COPY_BYTES = 32 << 20  # of one turn of the loop, which copies on the host meanwhile: milliseconds
MOST_PAGES = 64


def allocate(
    shape: tuple[int, ...], dtype: np.dtype[Any], config: HostKvConfig, pool_pages: int, free_bytes: int
) -> npt.NDArray[Any]:
    """`[num_pages, ...]` room for pages of `shape[1:]`. The system gives memory as pages are written.

    Args:
      shape: of one page in its host form, `[1, ...]`.
      dtype: of the host form.
      config: says how much.
      pool_pages: pages of the pool, for which `HOST_POOLS` holds.
      free_bytes: of host memory.

    Raises:
      ConfigError: not a page fits into what was asked for, or the machine hasn't as much memory free.
    """
    page_bytes = int(np.prod(shape)) * dtype.itemsize
    num_pages = int(config.host_kv_gib * 2**30) // page_bytes if config.host_kv_gib else int(HOST_POOLS * pool_pages)
    asked = f"--host-kv-gib {config.host_kv_gib:g}" if config.host_kv_gib else "--enable-hierarchical-cache"
    if not num_pages:
        raise ConfigError(f"{asked} holds no page of {page_bytes / 2**20:.2f} MiB: raise it, or lower --page-size")
    if num_pages * page_bytes > free_bytes:
        raise ConfigError(
            f"{asked} takes {num_pages * page_bytes / 2**30:.2f} GiB, but {free_bytes / 2**30:.2f} GiB of host memory "
            "are free: lower --host-kv-gib"
        )
    return np.empty((num_pages, *shape[1:]), dtype)


def pages_per_turn(page_bytes: int) -> int:
    """Pages that one turn of the loop may write to the host tier, and load from it."""
    return max(min(MOST_PAGES, COPY_BYTES // page_bytes), 1)
