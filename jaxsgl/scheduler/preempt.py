"""Whom a request of higher priority may send back to the queue. A decision; the scheduler carries it out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxsgl.cache.manager import CacheManager
from jaxsgl.scheduler.req import Req


def victims(
    rank: Callable[[Req], int],
    waiting: Req,
    running: Sequence[Req],
    threshold: int,
    pages_short: int,
    cache: CacheManager,
) -> list[Req]:
    """Requests whose pages and row suffice for `waiting`, or none at all if all together don't suffice.

    Args:
      rank: priority, less goes first.
      running: those that may be preempted, in order of admission.
      threshold: how much lower a victim's priority must be.
      pages_short: pages that `waiting` lacks; 0 if it lacks a row only.
    """
    lower = [req for req in running if rank(req) - rank(waiting) > threshold]
    lower.reverse()  # newest first
    lower.sort(key=rank, reverse=True)  # and before that, lowest priority first
    chosen: list[Req] = []
    for req in lower:
        chosen.append(req)
        assert req.lease is not None
        pages_short -= cache.num_exclusive(req.lease)
        if pages_short <= 0:
            return chosen
    return []
