"""The kernel that finds the places of a row's largest numbers, against NumPy's stable sort."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.triton import best_places as module
from pallas_kernels.triton.best_places import best_places

pytestmark = pytest.mark.device


def wanted(row: np.ndarray, count: int) -> list[int]:
    best = sorted(np.argsort(-row, kind="stable")[:count].tolist())
    return best + [-1] * (count - len(best))


def _places(rows: np.ndarray, ends: Sequence[int], count: int) -> np.ndarray:
    return np.asarray(best_places(jnp.asarray(rows), jnp.asarray(ends, jnp.int32), count, True))


@pytest.mark.parametrize("sizes", [module._NARROW, module._WIDE], ids=["narrow", "wide"])
def test_places_of_the_largest_numbers_ascend_and_of_equal_ones_the_first_count(
    sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that end in the middle of a block, at its border, before as many numbers as are wanted, and at once."""
    monkeypatch.setattr(module, "_NARROW", sizes)
    monkeypatch.setattr(module, "_WIDE", sizes)
    rng, count = np.random.default_rng(0), 100
    rows = rng.standard_normal((8, 2500)).astype(np.float32)
    rows[1] = np.round(rows[1])  # hundreds of equal numbers
    rows[2] = np.where(rng.random(2500) < 0.5, 0.0, -0.0)  # which are equal, too
    rows[3] = np.float32(2.0) ** rng.integers(-140, 120, 2500) * np.sign(rows[3])
    ends = [2500, 2500, 2048, 2222, 100, 99, 1, 0]
    beyond = np.arange(2500) >= np.array(ends)[:, None]
    for row, end, places in zip(rows, ends, _places(np.where(beyond, np.nan, rows), ends, count), strict=True):
        assert places.tolist() == wanted(row[:end], count)


def test_few_long_rows_have_the_same_places_in_the_order_of_their_numbers() -> None:
    rng, count = np.random.default_rng(1), 5
    rows = np.round(rng.standard_normal((2, module._LONG + 1)).astype(np.float32), 2)
    for row, end, places in zip(rows, (len(rows[0]), 3), _places(rows, [len(rows[0]), 3], count), strict=True):
        assert sorted(places.tolist()) == sorted(wanted(row[:end], count))
        assert (np.diff(row[places[places >= 0]]) <= 0).all()
