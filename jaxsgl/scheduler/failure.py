"""Faults of ours in the work for one request: they end that request, and not the engine.

planner.py and apply.py raise `RequestFailure` where they work for one request at a time, before any length has moved;
scheduler.py then ends the request and plans again. Faults in the work for a whole batch are traced to a request by
`blame`. All others (in the cache, on the device) stay as they are and end the engine, since the state after them can't
be trusted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from jaxsgl.errors import EngineUnavailable, InvalidRequest
from jaxsgl.messages.replies import Refusal, RefusalKind, Reply
from jaxsgl.scheduler.req import Req

logger = logging.getLogger(__name__)


class RequestFailure(Exception):
    """The work for `req` raised the exception that this one is raised from."""

    def __init__(self, req: Req) -> None:
        super().__init__(f"{req.name} can't be served")
        self.req = req


def blame(parts: Iterable[tuple[Req, Callable[[], object]]]) -> None:
    """Finds the request to which a failure is due: the first whose part of the work fails when it is done alone.

    Raises `RequestFailure` for it; returns if there is none, so that the caller raises its own exception again.
    """
    for req, work in parts:
        try:
            work()
        except Exception as error:
            raise RequestFailure(req) from error


def failed_reply(request_id: str, error: BaseException | None) -> Reply:
    """Logs `error` with its traceback; returns the reply that ends the request. Its client learns the error's class.

    `InvalidRequest` is the request's own fault, found late, as at the limits of a grammar, `EngineUnavailable` that of
    its other leg: its client learns all of it.
    """
    if isinstance(error, EngineUnavailable):
        return Reply(request_id, refusal=Refusal(RefusalKind.PEER, str(error)))
    if isinstance(error, InvalidRequest):
        return Reply(request_id, refusal=Refusal(RefusalKind.INVALID, str(error)))
    logger.error("request %r failed by our own fault and is ended", request_id, exc_info=error)
    text = (
        f"the server failed at this request ({type(error).__name__}) and would fail at it again: don't repeat it; the "
        "server's log says more"
    )
    return Reply(request_id, refusal=Refusal(RefusalKind.FAILED, text))
