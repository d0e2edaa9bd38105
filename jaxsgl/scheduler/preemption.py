"""Which running requests go back to the queue: when pages run out (retraction), or for a higher priority (preemption).

Decisions as functions of requests; planner.py asks, apply.py takes the requests back. A request that was taken back
gives its pages back at once and keeps its output, so that its client sees no difference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from jaxsgl.scheduler.req import Req, State


def retractable(admitted: Iterable[Req]) -> list[Req]:
    """Requests that go on; one whose last token is in flight is about to give its pages back anyway."""
    return [req for req in admitted if req.state in (State.PREFETCHING, State.EXTENDING) or req.can_launch]


def in_order_of_loss(reqs: Collection[Req], rank: Callable[[Req], int]) -> list[Req]:
    """`reqs` (in order of admission), the one to retract first at the head.

    That is one of the lowest priority (`rank` gives priorities, of which the lowest number goes first), and of these
    the one that loses least: fewest tokens generated, then the longest input, since it frees most; of equals the
    newest. So the oldest request with most output goes on, and the whole makes progress.
    """
    newest_first = reversed(list(reqs))
    return sorted(newest_first, key=lambda req: (-rank(req), len(req.output_ids), -req.prompt_len))


def outranked(rank: Callable[[Req], int], waiting: Req, running: Iterable[Req], threshold: int) -> list[Req]:
    """Those of `running` whose priority is lower than that of `waiting` by more than `threshold`."""
    return [req for req in running if rank(req) - rank(waiting) > threshold]


def victims(
    rank: Callable[[Req], int],
    waiting: Req,
    candidates: Sequence[Req],
    threshold: int,
    pages_short: int,
    num_exclusive: Callable[[Req], int],
) -> list[Req]:
    """Requests whose pages and row suffice for `waiting`; [] if all together don't suffice.

    Args:
      rank: priority, less goes first.
      candidates: requests that may be preempted, in order of admission.
      threshold: how much lower a victim's priority must be.
      pages_short: pages that `waiting` lacks; 0 if it lacks a row only.
      num_exclusive: pages that a candidate alone holds.
    """
    lower = outranked(rank, waiting, candidates, threshold)
    lower.reverse()  # newest first
    lower.sort(key=rank, reverse=True)  # and before that, lowest priority first
    chosen: list[Req] = []
    for req in lower:
        chosen.append(req)
        pages_short -= num_exclusive(req)
        if pages_short <= 0:
            return chosen
    return []
