"""Ways to give a decode's items to programs are compared by a model that never beats the bandwidth."""

import numpy as np
import pytest
from bench.figures.decode_plan import HEADS, TILE_BYTES, alone, cut, dealt, mean
from bench.targets.prediction import ASSUMED


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_no_schedule_beats_the_bandwidth_or_the_first_copy(spread: float) -> None:
    sizes, chains = cut(np.full(100, 300))
    floor = sizes.sum() * TILE_BYTES * HEADS / ASSUMED.bytes_per_s * 1e6
    for programs in (alone(sizes), chains, dealt(sizes)):
        assert sum(each.sum() for each in programs) == sizes.sum() == 100 * 5
        assert mean(programs, spread, range(2)) >= floor + ASSUMED.slot_start_us - 1e-6


def test_chains_of_equal_rows_begin_less_often_than_rows() -> None:
    sizes, chains = cut(np.full(256, 1024))
    assert len(chains) < 128
    assert mean(chains, 0, [0]) < 0.96 * mean(alone(sizes), 0, [0])
