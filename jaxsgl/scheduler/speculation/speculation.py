"""`Speculating`: which drafts the next step verifies, whether steps are read before the next one is planned, counts.

    not speculating, or nothing is proposed   overlapped decode: step N + 1 is planned before step N is read
    something is proposed                     N is read, drafts follow its tokens, N + 1 verifies them

Drafts need the newest token, so that a step is read first: lengths are exact then, and nothing is allocated for tokens
that may not come. That costs the host's time in each step, and to begin and end it costs a little more, so `PATIENCE`
steps without drafts pass before steps overlap again, unless all drafters rest. apply.py reports steps and tokens,
planner.py asks for drafts, loop.py whether to read first. Proposals are those of each request's `Drafter`.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import msgspec

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.cache.manager import CacheManager
from jaxsgl.messages.replies import Load, Run, SpeculationTotals
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.in_flight import NOTHING, Drafts, InFlightStep, ReadDrafts, Speculation
from jaxsgl.scheduler.plan import StepPlan
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.speculation.drafter import NO_DRAFTS, DeviceDrafts, Drafter, DrafterOf
from jaxsgl.scheduler.speculation.pace import StepCosts, shares

PATIENCE = 8  # decode steps without drafts
ROWS_A_DRAFT = 8  # at most: all rows wait for the host where any has drafts, and only those with drafts gain


class WhyPlain(enum.Enum):
    """Why a step decoded one token of a request that speculates, without drafts."""

    NOT_PROPOSED = "not_proposed"  # nothing was likely
    NO_ROOM = "no_room"  # in the step or the pool, or there were too few drafts for so many rows
    PENALTIES = "penalties"  # they change with each token of a run
    MIXED = "mixed"  # the step extends prompts
    SEVERAL = "several_steps"  # the program takes several steps (--decode-steps)
    LAST = "last_token"  # it may generate one token more


class Speculating(Speculation):
    """Of a server that speculates.

    Args:
      drafter_of: makes drafters.
      max_drafts: of a request in a step.
      most_tokens: of a step that verifies.
      cache: the pool.
      costs: what steps cost, by which drafts are cut.
    """

    in_lockstep = False

    def __init__(
        self,
        drafter_of: DrafterOf,
        max_drafts: int,
        most_tokens: int,
        cache: CacheManager,
        costs: StepCosts = StepCosts(),
    ) -> None:
        self._costs = costs
        self._drafter_of = drafter_of
        self._max_drafts = max_drafts
        self._most_tokens = most_tokens
        self._cache = cache
        self._quiet = 0  # decode steps since the last one with drafts
        self._totals = SpeculationTotals()
        self._ending: list[Req] = []  # requests whose last tokens their drafters don't have

    def drafter_of(self, request: Request) -> Drafter:
        """The drafter of a sample of `request`."""
        return self._drafter_of(request)

    def drafts(self, decodes: Sequence[Req], steps_in_flight: int, num_pages: int) -> Drafts:
        """See `Speculation`. Reads only. Drafts share the room of the step equally, then take pages in order."""
        num_rows = len(decodes)
        room = self._room(num_rows)
        if steps_in_flight or not room:
            return NOTHING
        proposed = [self._proposed(req, room) for req in decodes]
        wanted = [len(tokens) for tokens in proposed]
        if not any(wanted):
            return NOTHING
        affordable = min(self._affordable(num_rows, decodes, wanted), room)
        tokens: list[tuple[int, ...]] = []
        taken = 0
        for req, drafts, share in zip(decodes, proposed, shares(wanted, num_rows, num_rows + affordable), strict=True):
            count, pages = self._fitting(req, share, num_pages - taken)
            tokens.append(drafts[:count])
            taken += pages
        of_reqs = zip(decodes, proposed, tokens, strict=True)
        dropped = frozenset([req for req, drafts, kept in of_reqs if drafts and not kept])
        return Drafts(tuple(tokens) if any(tokens) else (), taken, dropped)

    def asking(self, inputs: StepInputs, reqs: Sequence[Req]) -> StepInputs:
        """See `Speculation`."""
        asks = any(req.drafter.asks and req.num_left > 1 and not req.sampling.penalizes for req in reqs)
        may = inputs.bucket.num_steps == 1 and self._room(len(reqs)) > 0
        return replace(inputs, drafts=True) if asks and may else inputs

    def launched(self, plan: StepPlan) -> None:
        """Has steps overlap again after a while without drafts."""
        if plan.drafts:
            self._quiet = 0
        elif plan.decodes:
            self._quiet += 1
            if self._quiet >= PATIENCE or all(req.drafter.rests for req, _ in plan.decodes):
                self.reads_first = False

    def collected(self, step: InFlightStep, runs: Sequence[tuple[Req, int, Run]], drafts: ReadDrafts) -> None:
        """Gives drafters what has come, and their verdicts; counts; begins to read first if enough is proposed."""
        read = cache(drafts)
        self._costs.collected(0 if step.num_chunks or step.num_steps > 1 else step.offsets[-1], bool(step.drafts))
        verified = {req for req, _, _ in runs}
        for place, req in enumerate(step.reqs):
            if req.drafter is NO_DRAFTS:
                continue
            count = _extend(req)
            if count and step.drafts_after:
                req.drafter.take(DeviceDrafts(read, place))
            if count and place >= step.num_chunks and req not in verified:
                why = self._why_plain(step, req).value
                self._totals.plain_decodes[why] = self._totals.plain_decodes.get(why, 0) + count
        for req, accepted, run in runs:
            self._count(accepted, run)
            req.drafter.judge(run.drafted, run.kept)
        for req in self._ending:
            req.drafter.end()
        self._ending = []
        if not self.reads_first and self._is_proposing(step.reqs):
            self.reads_first, self._quiet = True, 0

    def ended(self, req: Req) -> None:
        """Ends its drafter, once that has all its tokens."""
        if req.num_told < len(req.output_ids):
            self._ending.append(req)
        else:
            req.drafter.end()

    def add_to(self, load: Load) -> Load:
        """`load` with counts of drafts."""
        totals = self._totals
        copied = msgspec.structs.replace(totals, plain_decodes=dict(totals.plain_decodes))
        return msgspec.structs.replace(load, speculation=copied)

    def _room(self, num_rows: int) -> int:
        """Drafts that a step of so many rows may verify: none unless each row may have one."""
        room = self._most_tokens - num_rows
        return room if room >= num_rows and self._costs.may_pay(num_rows) else 0

    def _affordable(self, num_rows: int, reqs: Sequence[Req], wanted: Sequence[int]) -> int:
        """Drafts in all that a step had better verify of those that `reqs` want; 0 if they are too few for so many."""
        chances = [(count, req.drafter.probability) for req, count in zip(reqs, wanted, strict=True) if count]
        count = self._costs.affordable(num_rows, chances)
        return count if count * ROWS_A_DRAFT >= num_rows else 0

    def _proposed(self, req: Req, most: int) -> tuple[int, ...]:
        """At most `most` drafts of `req`, cut where its output would end or its grammar forbids one."""
        most = min(most, self._max_drafts, req.num_left - 1)
        if most <= 0 or req.drafter is NO_DRAFTS or req.sampling.penalizes:
            return ()
        drafts = req.drafter.propose(most)[:most]
        if not drafts:
            return ()
        stop = next((i for i, token in enumerate(drafts) if token in req.stop_ids), len(drafts))
        return drafts[: req.constraint.num_allowed(drafts[:stop]) if req.constraint else stop]

    def _fitting(self, req: Req, count: int, num_pages: int) -> tuple[int, int]:
        """(drafts of `req`, at most `count`, pages that they take, at most `num_pages`)."""
        assert req.lease is not None
        cache, stored = self._cache, req.kv_len + 1
        has = max(req.lease.num_pages, cache.pages_for(stored))
        count = min(count, cache.tokens_of(has + num_pages) - stored)
        return count, max(cache.pages_for(stored + count) - has, 0)

    def _is_proposing(self, reqs: Sequence[Req]) -> bool:
        """Whether enough is proposed of `reqs`, as far as their tokens are known, for steps to be read first."""
        room = self._room(len(reqs))
        if not room:
            return False
        reqs = [req for req in reqs if req.can_launch]
        wanted = [len(self._proposed(req, room)) for req in reqs]
        return any(wanted) and self._affordable(len(reqs), reqs, wanted) > 0

    def _why_plain(self, step: InFlightStep, req: Req) -> WhyPlain:
        if step.num_chunks:
            return WhyPlain.MIXED
        if step.num_steps > 1:
            return WhyPlain.SEVERAL
        if req.sampling.penalizes:
            return WhyPlain.PENALTIES
        if len(req.output_ids) == req.max_new_tokens:
            return WhyPlain.LAST
        if req in step.dropped or not self._room(len(step.reqs)):
            return WhyPlain.NO_ROOM
        return WhyPlain.NOT_PROPOSED

    def _count(self, accepted: int, run: Run) -> None:
        totals = self._totals
        totals.runs += 1
        totals.draft_tokens += run.drafted
        totals.accepted_tokens += accepted
        at = totals.accepted_at + (0,) * (accepted - len(totals.accepted_at))
        totals.accepted_at = tuple([count + (place < accepted) for place, count in enumerate(at)])


def _extend(req: Req) -> int:
    """Gives the drafter of `req` the tokens that it doesn't have, the prompt with the first one; their number."""
    outputs, drafter = req.output_ids, req.drafter
    if len(outputs) == req.num_told:
        return 0
    if not req.num_told:
        drafter.extend(array("i", req.prompt_ids.tobytes()))  # each sample: a list would take a while
    new = outputs[req.num_told :]
    drafter.extend(new)
    req.num_told = len(outputs)
    return len(new)


def speculation_of(
    buckets: BucketSet, drafter_of: DrafterOf, cache: CacheManager, costs: StepCosts = StepCosts()
) -> Speculation:
    """That of a server which has the programs of `buckets`."""
    if not buckets.verify_sizes:
        return Speculation()
    return Speculating(drafter_of, buckets.max_drafts, buckets.verify_sizes[-1], cache, costs)
