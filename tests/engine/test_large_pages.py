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


def large_page_bytes(address: int) -> int:
    """Of the mapping of this process that has `address`."""
    is_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(each, 16) for each in found.groups())
            is_it = begin <= address < end
        elif is_it and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no mapping has {address:#x}")


def test_an_array_moves_into_large_pages_and_keeps_its_numbers_and_its_address() -> None:
    numbers = np.random.default_rng(0).standard_normal(8 * LARGE_PAGE // 4, np.float32)
    array = jnp.array(numbers)
    address = array.unsafe_buffer_pointer()
    moved = use_large_pages([array])
    if not moved:
        pytest.skip("this system gives no large pages")
    found = large_page_bytes(address + numbers.nbytes // 2)
    # Where memory is short in large pieces, some pages stay as they are; the ends may lie in mappings next to this one.
    assert found > 0 and found >= moved - 2 * LARGE_PAGE
    assert array.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(np.asarray(array), numbers)


def test_small_arrays_stay_where_they_are() -> None:
    assert use_large_pages([jnp.zeros(LEAST_BYTES // 4 - 1, jnp.float32)]) == 0
