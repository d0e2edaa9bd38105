"""How the workers of a parallel run share its tests: whole files, in the order of the collection.

By night, a test that takes long goes to any worker, so that no worker runs a long file alone. A worker that ends is
replaced, and the test that it ran fails. xdist's own class gives that test to the next worker, which ends as well,
and waits forever in the end.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests import nights, tiers

LONG_S = 15.0  # setting up a file's fixtures twice takes less


class Scheduling(LoadScopeScheduling):
    """Gives a worker the tests of a file, or of several together. `long`: test functions whose items go one by one."""

    long: frozenset[str] = frozenset()

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nights.function_of(nodeid) in self.long else tiers.work_unit(nodeid)

    def remove_node(self, node: Any) -> str | None:
        """Returns the test during which `node` ended, if it ran one; the tests after it go to other workers."""
        work = self.assigned_work.pop(node)
        ended = next((nodeid for unit in work.values() for nodeid, done in unit.items() if not done), None)
        for scope, unit in work.items():
            left = {nodeid: done for nodeid, done in unit.items() if nodeid != ended}
            if not all(left.values()):
                self.workqueue[scope] = left
        for other in self.assigned_work:
            self._reschedule(other)
        return ended

    def _reschedule(self, node: Any) -> None:
        if node not in self.registered_collections or node.shutting_down:
            return  # a new one asks when it has collected
        if not self.workqueue:
            node.shutdown()
        while self.workqueue and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)  # a worker runs a test only once it knows the next one


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives a worker whole files, in the order of the collection."""
    config.option.loadscopereorder = False
    scheduling = Scheduling(config, log)
    if config.getoption("nightly_slice", None) is not None:
        scheduling.long = frozenset(name for name, seconds in nights.read_costs().items() if seconds >= LONG_S)
    return scheduling
