"""The requests that hold pages, sorted by what may happen to them next. Owned by the scheduler, which fills it."""

from __future__ import annotations

from jaxsgl.scheduler.req import Key, Req
from jaxsgl.scheduler.states import State


class Running:
    """Admitted requests, each set in order of admission to it.

    Attributes:
      admitted: EXTENDING and RUNNING ones.
      extending: between chunks.
      decoding: RUNNING ones with tokens left to launch.
    """

    def __init__(self) -> None:
        self.admitted: dict[Key, Req] = {}
        self.extending: dict[Key, Req] = {}
        self.decoding: dict[Key, Req] = {}

    def __len__(self) -> int:
        return len(self.admitted)

    def file(self, req: Req) -> None:
        """Keeps the sets in step with the state of `req`, which has just changed."""
        for reqs, belongs in (
            (self.admitted, req.lease is not None),
            (self.extending, req.state is State.EXTENDING),
            (self.decoding, req.can_launch),
        ):
            if belongs:
                reqs[req.key] = req
            else:
                reqs.pop(req.key, None)

    @property
    def retractable(self) -> list[Req]:
        """Those that go on: one whose last token is in flight is about to give its pages back."""
        return [req for req in self.admitted.values() if req.state is State.EXTENDING or req.can_launch]

    def check(self) -> None:
        """Raises AssertionError if a request is in the wrong set."""
        for req in self.admitted.values():
            assert req.lease is not None and req.state in (State.EXTENDING, State.RUNNING)
            assert (req.state is State.EXTENDING) == (req.key in self.extending)
            assert req.can_launch == (req.key in self.decoding)
        assert self.extending.keys() | self.decoding.keys() <= self.admitted.keys()
