"""`FailedAdmission`: what is known of a try to admit that found no room, so that it isn't repeated in vain.

While requests wait for pages, only decode steps are launched, and each of them would order the queue and try its first
request again. The try must fail as long as no request arrives that may go first, none ends, is retracted or aborted,
and nothing is extended or flushed. Owners of what may come free count that in their `epoch`, and a try of another epoch
than now says nothing any more (`SchedulerState.standing_failure`). What still changes is that running requests come
nearer to their ends and the share of output that is held for them falls; `ratio_steps_short` and `Forecast.steps_short`
(budget.py) say how many decode steps that takes. planner.py makes these values.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.pages import pages_for
from jaxsgl.scheduler.budget import CLIP_TOKENS, HORIZON_STEPS, NewTokenRatio
from jaxsgl.scheduler.req import Req


@dataclass(frozen=True, slots=True)
class FailedAdmission:
    """A try to admit waiting requests that admitted none.

    Attributes:
      head: the request that was first in the order; None: none could be tried.
      head_pages: pages of its prefix that were cached. If the order depends on the cache, only their eviction can
        change who is first.
      num_evicted: of the cache, at the try.
      epoch: of the state, at the try.
      steps: decode steps that must still run before another try can succeed.
    """

    head: Req | None
    head_pages: int
    num_evicted: int
    epoch: int
    steps: int


def ratio_steps_short(running: Iterable[Req], ratio: NewTokenRatio, pages_short: int, cache: CacheManager) -> int:
    """Decode steps after which `pages_short` pages fewer are taken by or held for running requests (`pages_held_for`).

    At most `HORIZON_STEPS`, if that is not enough.

    Args:
      running: all admitted requests. None is between chunks or ends meanwhile.
      ratio: as it is now.
      pages_short: pages that a waiting request lacks now.
      cache: the pool.
    """
    table = [_row(req) for req in running]
    kv_len, left, held, ignores_eos = np.array(table, dtype=np.int64).reshape(-1, 4).T[:, :, None]
    steps = np.arange(HORIZON_STEPS + 1, dtype=np.int64)
    grown = np.minimum(steps, left)
    shares = np.where(ignores_eos, 1.0, ratio.after(steps))
    rounding = np.where(steps, 1e-6, 0.0)  # the ratio is lowered step by step, so it may come out a little lower
    to_come = np.ceil(np.minimum(left - grown, CLIP_TOKENS) * shares - rounding).astype(np.int64)
    pages = np.maximum(pages_for(kv_len + grown + to_come, cache.page_size), held).sum(axis=0)
    enough = np.flatnonzero(pages <= pages[0] - pages_short)
    return int(enough[0]) if len(enough) else HORIZON_STEPS


def _row(req: Req) -> tuple[int, int, int, bool]:
    assert req.lease is not None
    return req.kv_len, max(req.num_left, 0), req.lease.num_pages, req.sampling.ignore_eos
