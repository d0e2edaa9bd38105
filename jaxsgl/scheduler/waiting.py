"""The queue of requests that are not admitted yet: first come, first served. Holds no pages and no rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from jaxsgl.scheduler.req import Key, Req


class WaitingQueue:
    """In order of arrival; any request can leave at any time.

    Attributes:
      num_tokens: prompt tokens of all of them.
    """

    def __init__(self) -> None:
        self._reqs: OrderedDict[Key, Req] = OrderedDict()
        self._retracted: set[Key] = set()
        self.num_tokens = 0

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs.values())

    def __len__(self) -> int:
        return len(self._reqs)

    @property
    def num_retracted(self) -> int:
        """Those that ran before."""
        return len(self._retracted)

    def add(self, req: Req) -> None:
        """At the end."""
        self._reqs[req.key] = req
        self.num_tokens += req.prompt_len

    def put_back(self, req: Req) -> None:
        """At the head: it has waited already."""
        self.add(req)
        self._reqs.move_to_end(req.key, last=False)
        self._retracted.add(req.key)

    def in_turn(self) -> Iterator[Req]:
        """Those that may start, in their order. One that waits for its leader's prompt lets others pass meanwhile."""
        return (req for req in self._reqs.values() if req.may_start)

    def remove(self, req: Req) -> None:
        """Admitted, or aborted."""
        if self._reqs.pop(req.key, None) is not None:
            self.num_tokens -= req.prompt_len
            self._retracted.discard(req.key)

    def check(self) -> None:
        """Raises AssertionError if the books are wrong."""
        assert self.num_tokens == sum(req.prompt_len for req in self._reqs.values()), "waiting tokens are miscounted"
        assert self._retracted <= self._reqs.keys(), "retracted requests are miscounted"
