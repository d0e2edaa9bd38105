"""How the workers of a parallel run share its tests: whole files, in the order of the collection.

A worker that ends is replaced, and the test that it ran fails. xdist's own class gives that test to the next worker,
which ends as well, and waits forever in the end.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests import tiers


class Scheduling(LoadScopeScheduling):
    """Gives a worker the tests of a file, or of several together."""

    def _split_scope(self, nodeid: str) -> str:
        return tiers.work_unit(nodeid)

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
        if node not in self.registered_collections:
            return  # it is new, and asks when it has collected
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)  # a worker runs a test only once it knows the next one


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives a worker whole files, in the order of the collection."""
    config.option.loadscopereorder = False
    return Scheduling(config, log)
