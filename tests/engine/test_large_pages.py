"""Weights and KV pools in memory pages of 2 MiB (`large_pages`)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxsgl.engine.start.large_pages import LARGE_PAGE, LEAST_BYTES, use_large_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="large pages are asked for on Linux only")


def large_page_bytes() -> int:
    """Of this process's own memory."""
    found = re.search(r"AnonHugePages:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found
    return int(found[1]) << 10


def test_an_array_moves_into_large_pages_and_keeps_its_numbers_and_its_address() -> None:
    numbers = np.random.default_rng(0).standard_normal(8 * LARGE_PAGE // 4, np.float32)
    array = jnp.array(numbers)
    before, address = large_page_bytes(), array.unsafe_buffer_pointer()
    moved = use_large_pages([array])
    if not moved:
        pytest.skip("this system gives no large pages")
    assert moved >= 6 * LARGE_PAGE  # the first and the last may hold the end of what is mapped
    assert large_page_bytes() - before >= 6 * LARGE_PAGE
    assert array.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(np.asarray(array), numbers)


def test_small_arrays_stay_where_they_are() -> None:
    assert use_large_pages([jnp.zeros(LEAST_BYTES // 4 - 1, jnp.float32)]) == 0
