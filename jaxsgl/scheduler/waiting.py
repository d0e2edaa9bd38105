"""The queue of requests that are not admitted yet: first come, first served. Holds no pages and no rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from jaxsgl.scheduler.req import Key, Req


class WaitingQueue:
    """In order of arrival; any request can leave at any time."""

    def __init__(self) -> None:
        self._reqs: OrderedDict[Key, Req] = OrderedDict()

    def __len__(self) -> int:
        return len(self._reqs)

    def add(self, req: Req) -> None:
        """At the end."""
        self._reqs[req.key] = req

    def in_turn(self) -> Iterator[Req]:
        """Those that may start, in their order. One that waits for its leader's prompt lets others pass meanwhile."""
        return (req for req in self._reqs.values() if req.may_start)

    def remove(self, req: Req) -> None:
        """Admitted, or aborted."""
        self._reqs.pop(req.key, None)
