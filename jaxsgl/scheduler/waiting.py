"""The queue of requests that are not admitted yet: first come, first served. Holds no pages and no rows."""

from __future__ import annotations

from collections import OrderedDict

from jaxsgl.scheduler.req import Req


class WaitingQueue:
    """In order of arrival; any request can leave at any time."""

    def __init__(self) -> None:
        self._reqs: OrderedDict[str, Req] = OrderedDict()

    def __len__(self) -> int:
        return len(self._reqs)

    def add(self, req: Req) -> None:
        """At the end."""
        self._reqs[req.request_id] = req

    def first(self) -> Req | None:
        """Whose turn it is."""
        return next(iter(self._reqs.values()), None)

    def get(self, request_id: str) -> Req | None:
        """The waiting request of that id, if there is one."""
        return self._reqs.get(request_id)

    def remove(self, req: Req) -> None:
        """Admitted, or aborted."""
        self._reqs.pop(req.request_id, None)
