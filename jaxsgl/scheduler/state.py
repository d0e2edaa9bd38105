"""`SchedulerState`: all that a plan is made from. scheduler.py owns it; planner.py reads it, apply.py changes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.capacity import Capacity
from jaxsgl.cache.manager import CacheManager
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.messages.load import HostLoad, Totals
from jaxsgl.scheduler.adapters import AdapterTable
from jaxsgl.scheduler.budget import NewTokenRatio
from jaxsgl.scheduler.engine_ops import EngineOps
from jaxsgl.scheduler.failed_admission import FailedAdmission
from jaxsgl.scheduler.images import Images
from jaxsgl.scheduler.latency import Latency
from jaxsgl.scheduler.plan import NoRoom
from jaxsgl.scheduler.policy import Policy
from jaxsgl.scheduler.prefetch import LoadRule
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.request_table import RequestTable


@dataclass(slots=True)
class SchedulerState:
    """All that a plan is made from. `plan_step` reads it; scheduler.py and apply.py change it.

    Attributes:
      config, capacity, buckets, policy: the rules, which never change.
      retract_also: names requests to retract without need; for tests. None: there are none.
      requests: every request that has not ended.
      cache: pages, rows and prefixes.
      ratio: share of their output that is held for running requests.
      latency: measured steps, if the time between two tokens is bounded.
      totals: counters since the start.
      admission_closed: a retraction closes admission until a request ends: those retracted would only come back.
      blocked: why admission stopped at the last step that tried it; None if no request had to wait.
      failed_admission: the last try to admit, if it failed; see `standing_failure`.
      extended_last: whether the last step extended prompts.
      steps_in_flight: steps that are launched and not collected.
      num_admitted: admissions so far.
      loads: when loading from the host tier pays; None if there is no such tier.
      ops: what the engine is to do between steps.
      adapters: LoRA adapters; None: no flag asks for any.
      host_totals: counters of the host tier since the start, as far as they are not those of `HostTier`.
      images: of requests, in the pool of embeddings; None: the model has no vision tower.
    """

    config: SchedulingConfig
    capacity: Capacity
    buckets: BucketSet
    policy: Policy
    retract_also: RetractAlso | None
    requests: RequestTable
    cache: CacheManager
    ops: EngineOps
    ratio: NewTokenRatio
    latency: Latency | None
    totals: Totals
    admission_closed: bool = False
    blocked: NoRoom | None = None
    failed_admission: FailedAdmission | None = None
    extended_last: bool = False
    steps_in_flight: int = 0
    num_admitted: int = 0
    loads: LoadRule | None = None
    adapters: AdapterTable | None = None
    host_totals: HostLoad = field(default_factory=HostLoad)
    images: Images | None = None

    @property
    def epoch(self) -> int:
        """Rises whenever something comes free that a request may have waited for, as the owners of it count."""
        return self.requests.epoch + self.cache.epoch

    @property
    def standing_failure(self) -> FailedAdmission | None:
        """The last try to admit, if it failed and nothing has come free since."""
        failed = self.failed_admission
        return failed if failed is not None and failed.epoch == self.epoch else None


RetractAlso: TypeAlias = Callable[[SchedulerState], Sequence[Req]]
