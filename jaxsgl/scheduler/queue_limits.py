"""`QueueLimits`: why an arriving request can't be taken. Changes nothing; scheduler.py asks."""

from __future__ import annotations

from jaxsgl.config.engine import Limits
from jaxsgl.errors import InvalidRequest
from jaxsgl.messages.replies import Refusal, RefusalKind
from jaxsgl.requests.request import Request, check_request
from jaxsgl.scheduler.request_table import RequestTable


class QueueLimits:
    """What the queue takes.

    Args:
      limits: of a single request.
      max_requests: a request that finds this many samples waiting is refused; None: no limit.
      max_tokens: likewise, by the prompt tokens of all waiting samples.
    """

    def __init__(self, limits: Limits, max_requests: int | None, max_tokens: int | None) -> None:
        self._limits = limits
        self._max_requests = max_requests
        self._max_tokens = max_tokens

    def refusal(self, request: Request, requests: RequestTable) -> Refusal | None:
        """Why `request` can't be taken. The queue holds samples, but a request is taken or refused as a whole."""
        try:
            check_request(request, self._limits)
        except InvalidRequest as error:
            return Refusal(RefusalKind.INVALID, str(error))
        waits = [
            (self._max_requests, len(requests.waiting), "", "--max-queued-requests"),
            (self._max_tokens, requests.num_waiting_tokens, " prompt tokens", "--max-queued-tokens"),
        ]
        for most, count, what, flag in waits:
            if most is not None and count >= most:
                text = f"the queue is full: {count}{what} wait for admission, and {flag} is {most}: try again later"
                return Refusal(RefusalKind.OVERLOADED, text)
        return None
