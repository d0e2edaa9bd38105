"""A scheduler that checks itself after every event and keeps what it launched."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.outputs import NO_OUTPUTS, HostOutputs
from jaxsgl.batch.sampling import SamplingArrays
from jaxsgl.scheduler.apply import Applier
from jaxsgl.scheduler.budget import PageCount
from jaxsgl.scheduler.in_flight import ReadDrafts
from jaxsgl.scheduler.plan import StepPlan
from jaxsgl.scheduler.planner import plan_step
from jaxsgl.scheduler.scheduler import Scheduler, nothing_drafted
from tests.fingerprint import fingerprint


class CheckedApplier(Applier):
    """Checks that the cache holds the pages that a plan predicted, after the plan is carried out."""

    def apply(self, plan: StepPlan) -> StepInputs | None:
        inputs = super().apply(plan)
        cache = self._state.cache
        found = PageCount(cache.num_free, cache.prefixes.num_evictable)
        assert found == plan.pages, f"{found}, but the plan was: {plan}"
        return inputs


class CheckedScheduler(Scheduler):
    """Checks plans and, after every event, all accounts.

    Planning twice gives equal plans, plans come true, and a plan that skips the try to admit because the last one
    failed is the plan that another try would lead to. No array of a step changes while the device may read it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._applier.__class__ = CheckedApplier
        self.launched: list[StepInputs] = []
        self._num_launches = 0
        self._unread: deque[tuple[StepInputs, list[np.ndarray]]] = deque()

    def launch(self) -> StepInputs | None:
        inputs = super().launch()
        if inputs is not None:
            self.launched.append(inputs)
            self._unread.append((inputs, [array.copy() for array in arrays_of(inputs)]))
        self._num_launches += 1
        if inputs is not None or self._num_launches % 8 == 0:  # most turns without a step change nothing
            self.check()
        return inputs

    def apply(self, plan: StepPlan) -> StepInputs | None:
        assert plan_step(self.state) == plan, "planning again gives another plan"
        self._check_that_no_try_was_missed(plan)
        return super().apply(plan)

    def check(self) -> None:
        super().check()
        admitted = self._requests.admitted.values()
        if any(req.namespace for req in admitted):
            salt_of: dict[int, bytes] = {}
            for req in admitted:
                assert req.lease is not None
                for page in self.cache.table.pages[req.lease.row, : req.lease.num_pages].tolist():
                    assert salt_of.setdefault(page, req.namespace) == req.namespace, "requests of two salts share"

    def collect(
        self,
        tokens: Sequence[int] | np.ndarray,
        outputs: HostOutputs = NO_OUTPUTS,
        drafts: ReadDrafts = nothing_drafted,
    ) -> None:
        inputs, as_launched = self._unread.popleft()
        for array, copy in zip(arrays_of(inputs), as_launched, strict=True):
            np.testing.assert_array_equal(array, copy, "an array of a step in flight was changed")
        super().collect(tokens, outputs, drafts)
        self.check()

    def _check_that_no_try_was_missed(self, plan: StepPlan) -> None:
        state, failed = self.state, self.state.failed_admission
        if failed is None:
            return
        state.failed_admission = None
        with_try = plan_step(state)
        state.failed_admission = failed
        same = msgspec.structs.replace(with_try, failed_admission=plan.failed_admission, blocked=plan.blocked)
        assert same == plan, f"another try to admit gives another plan: {with_try}; {failed}"


def arrays_of(inputs: StepInputs) -> list[np.ndarray]:
    """All arrays that the engine hands to the device."""
    features = inputs.features
    of_features = () if features is None else (features.edit_rows, *features.row_setups)
    return [inputs.packed, *inputs.table_changes, *of_features]


def sampling_of(inputs: StepInputs) -> SamplingArrays[np.ndarray]:
    """The sampling parameters of a batch."""
    return SamplingArrays.unpack(inputs.arrays.sampling, np.ndarray.view)


class WatchedScheduler(CheckedScheduler):
    """Checks that nothing changes while a plan is made: all of the first 200 plans, and then one in 10.

    Comparing everything takes milliseconds, and some histories have thousands of plans.
    """

    num_plans = 0
    before_plan: bytes | None = None

    def _launch(self) -> StepInputs | None:
        self.num_plans += 1
        is_compared = self.num_plans <= 200 or self.num_plans % 10 == 0
        self.before_plan = fingerprint(self.state) if is_compared else None
        return super()._launch()

    def apply(self, plan: StepPlan) -> StepInputs | None:
        if self.before_plan is not None:
            assert fingerprint(self.state) == self.before_plan, "planning has changed the state"
        return super().apply(plan)
