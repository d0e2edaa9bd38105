"""Operations between steps: one queue in step order; in the fake engine exact, and watchful."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.build import BatchBuilder, Work
from jaxsgl.batch.engine_api import Gather, Insert
from jaxsgl.batch.sampling import SamplingRows
from jaxsgl.cache.pages import PageTable
from jaxsgl.scheduler.engine_ops import EngineOps, HostArray
from jaxsgl.testing.engine import FakeEngine
from tests.scheduler.serving import capacity, expected


def test_pages_leave_and_come_back_in_step_order() -> None:
    """A gather waits for the steps before it and sees nothing of those after; an insert is there for the next step."""
    sizes = capacity(num_pages=20)
    engine, table = FakeEngine(sizes), PageTable(sizes.num_rows, sizes.max_pages_per_seq)
    builder = BatchBuilder(BucketSet.derive(sizes), table, SamplingRows(sizes.num_rows), sizes.page_size)
    prompt = np.arange(8, dtype=np.int32)

    table.put(0, 0, np.array([3, 4], np.int32))
    first = engine.submit(builder.extend([Work(0, prompt, 0, True)]))
    engine.apply(Gather((3, 4)), 5)
    assert engine.poll() == [], "the step before it has not ended"
    overwrites = engine.submit(builder.extend([Work(0, prompt + 50, 0, True)]))
    overwrites.tokens()
    ((number, data),) = engine.poll()
    assert number == 5 and data.shape == engine.page_layout.shape(2)

    engine.apply(Insert((9, 8), data), 6)
    table.put(1, 0, np.array([9, 8, 10], np.int32))
    on_inserted = engine.submit(builder.extend([Work(1, np.array([77], np.int32), 8, True)]))
    assert first.tokens().tolist() == expected(prompt.tolist(), 1)
    assert on_inserted.tokens().tolist() == expected([*prompt.tolist(), 77], 1)


def test_pages_that_no_step_wrote_are_not_inserted_unnoticed() -> None:
    engine = FakeEngine(capacity(num_pages=20))
    engine.apply(Gather((3,)), 1)
    ((_, data),) = engine.poll()
    engine.apply(Insert((4,), data), 2)
    with pytest.raises(AssertionError, match="no step wrote"):
        engine.poll()


def test_operations_on_what_the_decided_step_writes_wait_for_the_next_turn_and_come_first_then() -> None:
    ops = EngineOps()
    ops.submit(Gather((1,)))
    ops.submit(Gather((2,)), after_step=True)
    ops.submit(Gather((3,)))
    assert [op for _, op in ops.take()] == [Gather((1,)), Gather((3,))] and ops.queued == 1
    ops.submit(Gather((4,)))
    assert [op for _, op in ops.take()] == [Gather((2,)), Gather((4,))]
    assert ops.take() == [] and not ops.queued


def test_results_go_to_who_asked_and_keep_the_queue_at_work_until_they_have_come() -> None:
    ops, got = EngineOps(), list[tuple[str, int]]()

    def take(name: str, array: HostArray) -> None:
        got.append((name, int(array[0])))

    for name in ("a", "b"):
        ops.submit(Gather((1,)), partial(take, name))
    (first, _), (second, _) = ops.take()
    assert ops.waiting == 2 and not ops.queued
    ops.finished([(second, np.array([2])), (first, np.array([1]))])
    assert got == [("b", 2), ("a", 1)] and not ops.waiting
