"""The fake engine's operations on pages: in step order, exact, and watchful."""

from __future__ import annotations

import numpy as np
import pytest

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.build import BatchBuilder, Work
from jaxsgl.batch.engine_ops import Gather, Insert
from jaxsgl.batch.sampling import SamplingRows
from jaxsgl.cache.pages import PageTable
from jaxsgl.testing.engine import FakeEngine
from tests.scheduler.serving import capacity, expected


def test_pages_leave_and_come_back_in_step_order() -> None:
    """A gather waits for the steps before it and sees nothing of those behind; an insert is there for the next step."""
    sizes = capacity(num_pages=20)
    engine, table = FakeEngine(sizes), PageTable(sizes.num_rows, sizes.max_pages_per_seq)
    builder = BatchBuilder(BucketSet.derive(sizes), table, SamplingRows(sizes.num_rows), sizes.page_size)
    prompt = np.arange(8, dtype=np.int32)

    table.put(0, 0, np.array([3, 4], np.int32))
    first = engine.submit(builder.extend([Work(0, prompt, 0, True)]))
    engine.apply(Gather(5, (3, 4)))
    assert engine.poll_gathers() == [], "the step before it has not ended"
    overwrites = engine.submit(builder.extend([Work(0, prompt + 50, 0, True)]))
    overwrites.tokens()
    ((op_id, data),) = engine.poll_gathers()
    assert op_id == 5 and data.shape == engine.page_layout.shape(2)

    engine.apply(Insert(6, (9, 8), data))
    table.put(1, 0, np.array([9, 8, 10], np.int32))
    on_inserted = engine.submit(builder.extend([Work(1, np.array([77], np.int32), 8, True)]))
    assert first.tokens().tolist() == expected(prompt.tolist(), 1)
    assert on_inserted.tokens().tolist() == expected([*prompt.tolist(), 77], 1)


def test_pages_that_no_step_wrote_are_not_inserted_unnoticed() -> None:
    engine = FakeEngine(capacity(num_pages=20))
    engine.apply(Gather(1, (3,)))
    ((_, data),) = engine.poll_gathers()
    engine.apply(Insert(2, (4,), data))
    with pytest.raises(AssertionError, match="no step wrote"):
        engine.poll_gathers()
