"""`SchedulerState`: all that a plan is made from. scheduler.py owns it; planner.py reads it, apply.py changes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.cache.manager import CacheManager
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.messages.replies import Totals
from jaxsgl.scheduler.budget import FailedAdmission, NewTokenRatio, Timing
from jaxsgl.scheduler.engine_ops import EngineOps
from jaxsgl.scheduler.in_flight import Speculation
from jaxsgl.scheduler.plan import WhyNot
from jaxsgl.scheduler.policy import Policy
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.request_table import AllAtOnce, RequestTable
from jaxsgl.scheduler.resources.adapters import AdapterTable
from jaxsgl.scheduler.resources.images import Images
from jaxsgl.scheduler.resources.resource import Resource


@dataclass(slots=True)
class SchedulerState:
    """All that a plan is made from. `plan_step` reads it; scheduler.py and apply.py change it.

    Attributes:
      config, capacity, buckets, policy: the rules, which never change.
      retract_also: names requests to retract without need; for tests. None: there are none.
      requests: every request that has not ended.
      cache: pages, rows and prefixes.
      ratio: share of their output that is held for running requests.
      timing: how long steps may take.
      turns: which running requests decode in a step.
      resources: what requests hold besides pages and rows of the KV pool; () on a plain server.
      adapters: LoRA adapters by name; one of the resources, unless it takes none.
      images: one of the resources, if the model has a vision tower; None: it has none.
      speculation: which drafts are verified.
      totals: counters since the start.
      admission_closed: a retraction closes admission until a request ends: those retracted would only come back.
      blocked: why admission stopped at the last step that tried it; None if no request had to wait.
      failed_admission: the last try to admit, if it failed; its `epoch` says whether that still stands.
      extended_last: whether the last step extended prompts.
      steps_in_flight: steps that are launched and not collected.
      num_admitted: admissions so far.
      ops: what the engine is to do between steps.
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
    timing: Timing
    turns: AllAtOnce
    totals: Totals
    adapters: AdapterTable
    speculation: Speculation
    resources: tuple[Resource, ...] = ()
    images: Images | None = None
    admission_closed: bool = False
    blocked: WhyNot | None = None
    failed_admission: FailedAdmission | None = None
    extended_last: bool = False
    steps_in_flight: int = 0
    num_admitted: int = 0


RetractAlso: TypeAlias = Callable[[SchedulerState], Sequence[Req]]
