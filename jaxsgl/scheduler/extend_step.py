"""`ExtendBuilder`: the chunks of one step, request by request, within the budgets of tokens, sequences, rows and pages.

A waiting request is admitted if what it has to extend and its output fit besides what is held for running ones
(budget.py). One that begins like a prompt in progress is held back, so that their common prefix is computed once.
`PlanBuilder` is the plan in the making that the step belongs to. Reads only, apart from that and the drafts of
resources; called by planner.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.prefix import Peek
from jaxsgl.scheduler.budget import (
    CLIP_TOKENS,
    HORIZON_STEPS,
    Claim,
    Forecast,
    Ledger,
    fair_shares,
    pages_held_for,
    pages_to_come,
    ratio_steps_short,
    without_much_padding,
)
from jaxsgl.scheduler.plan import WhyNot
from jaxsgl.scheduler.policy import MAX_REORDERED, PrefixesInProgress
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.state import SchedulerState

SPARE_PAGES = 1  # beyond the estimate, for each request that is admitted


class PlanBuilder:
    """A plan in the making: the state after the what-ifs so far.

    Attributes:
      view: the state before.
      ledger: the pages after all what-ifs.
      decoding: running requests that may decode in the step, without those taken back.
      admissions: requests to admit, with what they will hold.
      deferred: of those, the ones that have no chunk yet, as a resource brings a part of their prefix first.
      taken_back: requests to take back to the queue.
      drafts: what each resource makes of it.
    """

    def __init__(self, view: SchedulerState) -> None:
        self.view = view
        self.ledger = Ledger(view.cache)
        self.decoding = view.turns.to_decode(view.requests)
        self.admissions: dict[Req, Claim] = {}
        self.deferred: dict[Req, Claim] = {}
        self.taken_back: dict[Req, None] = {}
        self.drafts = tuple([resource.draft(self) for resource in view.resources])
        self._peeks: dict[Req, Peek] = {}

    def peek(self, req: Req) -> Peek:
        """The cached prefix of `req`, which is looked up once, since the cache doesn't change meanwhile."""
        prefix = self._peeks.get(req)
        if prefix is None:
            prefix = self._peeks[req] = self.view.cache.peek(req.matchable_ids, req.namespace)
        return prefix

    @property
    def is_working(self) -> bool:
        """Whether the step brings requests on that extend nothing in it."""
        return any(draft.is_working for draft in self.drafts)

    @property
    def prefetching(self) -> list[Req]:
        """PREFETCHING requests, without those taken back."""
        return [req for req in self.view.requests.prefetching.values() if req not in self.taken_back]

    @property
    def admitted(self) -> list[Req]:
        """Requests that hold a lease, without those taken back and those that this plan admits."""
        admitted = self.view.requests.admitted.values()
        return [req for req in admitted if req not in self.taken_back] if self.taken_back else list(admitted)

    @property
    def num_admitted(self) -> int:
        """Admissions since the start, those of this plan included."""
        return self.view.num_admitted + len(self.admissions)

    @property
    def num_free_rows(self) -> int:
        """Rows that are left."""
        return self.view.cache.table.num_free_rows + len(self.taken_back) - len(self.admissions)


class ExtendBuilder:
    """One extend step in the making.

    Args:
      plan: that it belongs to.
      mixed: requests that decode in the same step.
      continuing: requests between chunks.

    Attributes:
      no_room: why the last waiting request was not admitted; None while all were.
      pages_short: pages that it lacks, if any.
      passed_over: why requests were passed over, if some were: a resource lacked something for them.
    """

    def __init__(self, plan: PlanBuilder, mixed: Sequence[Req], continuing: Sequence[Claim]) -> None:
        view = plan.view
        self.no_room: WhyNot | None = None
        self.pages_short = 0
        self.passed_over: WhyNot | None = None
        self._plan = plan
        self._drafts = plan.drafts
        self._ledger = plan.ledger
        self._cache = view.cache
        self._admitted = plan.admitted
        self._pages_held = pages_held_for(self._admitted, view.ratio.value, view.cache)
        self._pages_held += sum(
            pages_to_come(claim, claim.tokens_to_come, view.cache) for claim in plan.admissions.values()
        )
        reqs = [*self._admitted, *plan.admissions]
        self._all_go_on = all(req.sampling.ignore_eos for req in reqs)
        self._most_output = max((req.max_new_tokens for req in reqs), default=0) if self._all_go_on else 0
        self._forecast: Forecast | None = None  # made when it is needed, as the next
        self._in_progress: PrefixesInProgress | None = None
        self._steps_short = 0  # by the forecast, at the last try
        most = min(view.capacity.max_extend_tokens - len(mixed), view.config.max_prefill_tokens)
        self._budget = view.timing.budget(most, plan.decoding, continuing, mixed)
        self._seqs_left = view.capacity.num_rows - len(mixed)
        if view.config.prefill_max_requests is not None:
            self._seqs_left = min(self._seqs_left, view.config.prefill_max_requests)
        self._buckets = view.buckets
        self._num_mixed = len(mixed)
        self._whole_prompts = view.capacity.whole_prompts
        self._spent_s = 0.0  # of the budget, for resources
        for draft in self._drafts:
            draft.begin_step()
        self._spend()  # for what goes on besides chunks
        self._pages_taken = sum(req.needs_page for req in mixed)
        self._chunks: dict[Claim, int] = {}
        self._loading = [Claim.held(req) for req in plan.prefetching]
        self._loading += plan.deferred.values()

    def add_continuing(self, claims: Sequence[Claim], prompts_wait: bool) -> None:
        """Adds the next chunks of admitted requests, in equal shares; of half the step, if `prompts_wait` too."""
        budget = self._budget.num_tokens
        if prompts_wait:
            budget = max(budget // 2, self._cache.page_size)
        claims = claims[: self._seqs_left]
        for claim, share in zip(claims, fair_shares([claim.extend_left for claim in claims], budget), strict=True):
            self._add(claim, share)

    def add_leftovers(self, claims: Sequence[Claim]) -> None:
        """Gives what waiting requests have left of the step to requests between chunks, oldest first."""
        for claim in claims:
            self._add(claim, self._budget.num_tokens)

    def admit_in_order(self, waiting: Iterable[Req]) -> Req | None:
        """Admits `waiting` and adds their first chunks, until one finds no room; that one, with `no_room` saying why.

        Requests that begin like a prompt in progress are passed over, at most `MAX_REORDERED` of them. None of them
        waits for long: a chunk of that prompt is computed in this step. So are those for which a resource lacks
        something, which learns of one that has been overtaken too often.
        """
        may_preempt, num_held_back = self._plan.view.config.enable_priority_scheduling, 0
        for req in waiting:
            self.no_room, self.pages_short, self._steps_short = self._lack(), 0, 0
            if self.no_room is not None and not (self.no_room is WhyNot.ROWS and may_preempt):
                return req
            if self._drafts and self._pass_over(req):
                continue
            prefix = self._plan.peek(req)
            if self._is_held_back(req, prefix):
                num_held_back += 1
                if num_held_back == MAX_REORDERED:
                    break
            elif self.no_room is not None:
                self._note_pages_short(req, prefix)
                return req
            elif not self._admit(req, prefix):
                return req
        self.no_room = None
        return None

    @property
    def steps_short(self) -> int:
        """After a try to admit that failed: decode steps that must run before another try can succeed."""
        if self.no_room is WhyNot.ROWS:
            return HORIZON_STEPS
        if self.no_room is WhyNot.CHUNK or self._steps_short:
            return max(self._steps_short, 1)
        return ratio_steps_short(self._admitted, self._plan.view.ratio, self.pages_short, self._cache)

    def finished(self) -> list[tuple[Claim, int]]:
        """The chunks, in order."""
        if self._chunks and not self._whole_prompts:
            self._shed_padding()
        return list(self._chunks.items())

    def _is_held_back(self, req: Req, prefix: Peek) -> bool:
        plan = self._plan
        if not self._cache.prefixes.keeps or not (self._chunks or self._loading):
            return False
        if self._in_progress is None:
            self._in_progress = PrefixesInProgress(self._cache, [*self._loading, *self._chunks])
        return self._in_progress.cover(req, prefix) and not plan.view.policy.goes_first(req, plan.num_admitted)

    def _pass_over(self, req: Req) -> bool:
        """Passes `req` over if a resource lacks something for it."""
        for draft in self._drafts:
            why_not = draft.may_admit(req)
            if why_not is not None:
                self.passed_over = why_not
                if self._plan.view.policy.goes_first(req, self._plan.num_admitted):
                    draft.passed_over(req)
                return True
        return False

    def _admit(self, req: Req, prefix: Peek) -> bool:
        """Admits `req`, of which `prefix` is cached; False, with the reason in `no_room`, if it has to wait."""
        claim = Claim.planned(req, prefix, self._cache)
        self._ledger.lock(prefix)  # before anything else: what it locks can't be evicted for it
        pages = pages_to_come(claim, claim.tokens_to_come, self._cache)
        defers = bool(self._drafts) and any(draft.defers(req, prefix) for draft in self._drafts)
        if not self._fits(claim, pages):
            self.no_room = WhyNot.TOKENS
        elif not defers:
            self._add(claim, self._budget.num_tokens)
            if claim not in self._chunks:  # what is left of the step holds no page of it
                self.no_room = WhyNot.CHUNK
        if self.no_room is not None:
            self._ledger.unlock(prefix)
            return False
        self._plan.admissions[req] = claim
        for draft in self._drafts:
            draft.admit(req, prefix)
        if defers:
            self._plan.deferred[req] = claim
            self._loading.append(claim)
        self._all_go_on = self._all_go_on and req.sampling.ignore_eos
        self._most_output = max(self._most_output, req.max_new_tokens)
        if self._forecast is not None:
            self._forecast.add(claim)
        if self._in_progress is not None:
            self._in_progress.add(claim)
        self._pages_held += pages
        return True

    def _note_pages_short(self, req: Req, prefix: Peek) -> None:
        """Notes the pages that `req` lacks besides a row, so that none is taken back for it in vain."""
        claim = Claim.planned(req, prefix, self._cache)
        self._ledger.lock(prefix)
        if self._fits(claim, pages_to_come(claim, claim.tokens_to_come, self._cache)):
            self.pages_short = 0  # others end before it needs them
        self._ledger.unlock(prefix)

    def _lack(self) -> WhyNot | None:
        if not self._plan.num_free_rows:
            return WhyNot.ROWS
        if self._budget.num_tokens <= 0 or not self._seqs_left:
            return WhyNot.CHUNK
        return None

    def _fits(self, claim: Claim, pages: int) -> bool:
        """Whether the pool suffices for the `pages` to come of a claim besides those held for running requests."""
        if not (self._admitted or self._plan.admissions):
            return True
        self.pages_short = max(pages + SPARE_PAGES + self._pages_held - self._ledger.available, 0)
        view = self._plan.view
        in_lockstep = view.speculation.in_lockstep and view.turns.in_lockstep
        if not (self._all_go_on and claim.req.sampling.ignore_eos and in_lockstep):
            return self.pages_short == 0
        if self.pages_short == 0 and max(self._most_output, claim.req.max_new_tokens) <= CLIP_TOKENS:
            return True  # even if no page came free before the last request ends
        if self._forecast is None:
            claims = [*map(Claim.held, self._admitted), *self._plan.admissions.values()]
            self._forecast = Forecast(claims, self._ledger, self._cache)
        self._steps_short = self._forecast.steps_short(claim)
        return not self._steps_short

    def _add(self, claim: Claim, budget: int) -> None:
        """Gives the request up to `budget` tokens more of the step, as far as pages reach."""
        before = self._chunks.get(claim, 0)
        if not before and not self._seqs_left:
            return
        if self._whole_prompts:
            count = claim.extend_left if self._takes_whole(claim) else 0
        else:
            room = max(min(budget, self._budget.num_tokens), self._together(claim))
            count = min(before + room, self._in_time(claim, before), claim.extend_left)
        wanted = count
        if self._drafts:
            count = self._longest(claim, before, wanted)
        pages_before = new_pages(claim, before, self._cache) if before else 0
        is_cut = self._whole_prompts and count < wanted
        count = before if is_cut else self._chunk_len(claim, count, pages_before)
        if self._drafts:
            for draft in self._drafts:
                draft.take(claim.req, claim.kv_len, max(count, before), wanted)
            self._spend()
        if count <= before:
            return
        self._pages_taken += new_pages(claim, count, self._cache) - pages_before
        self._budget.take(claim.kv_len, before, count)
        self._seqs_left -= not before
        self._chunks[claim] = count

    def _longest(self, claim: Claim, before: int, wanted: int) -> int:
        """At most `wanted`: tokens that the chunk may have for all resources, in the time that they leave."""
        count, seconds = wanted, 0.0
        for draft in self._drafts:
            extent = draft.longest(claim.req, claim.kv_len, count)
            count, seconds = extent.num_tokens, seconds + extent.seconds
        return count if self._whole_prompts else min(count, self._in_time(claim, before, seconds))

    def _spend(self) -> None:
        """Takes the seconds that resources have noted off the budget."""
        noted_s = sum([draft.seconds for draft in self._drafts])
        if noted_s != self._spent_s:
            self._budget.spend(noted_s - self._spent_s)
            self._spent_s = noted_s

    def _takes_whole(self, claim: Claim) -> bool:
        """Whether the prompt gets into the step uncut. The first one always does, whatever the budget."""
        pages_left = self._ledger.available - self._pages_taken
        if new_pages(claim, claim.extend_left, self._cache) > pages_left:
            return False
        return not self._chunks or claim.extend_left <= self._budget.num_tokens

    def _in_time(self, claim: Claim, before: int, besides_s: float = 0.0) -> int:
        """Tokens that the chunk may have so that the step ends in time; a page if it is the step's first chunk."""
        longest = self._budget.longest_chunk(claim.kv_len, before, besides_s)
        return longest if self._chunks else max(longest, self._cache.page_size, self._together(claim))

    def _together(self, claim: Claim) -> int:
        """Tokens that the step's first chunk has at once, whatever its share, since they go together; else 0."""
        if self._chunks:
            return 0
        together = max([draft.least(claim.req, claim.kv_len) for draft in self._drafts], default=1)
        return together if together > 1 else 0

    def _chunk_len(self, claim: Claim, count: int, pages_before: int) -> int:
        """At most `count`: what pages can be allocated for, and unless it is the rest, up to a page border."""
        cache = self._cache
        pages_left = self._ledger.available - self._pages_taken + pages_before
        count = min(count, cache.tokens_of(claim.num_pages + max(pages_left, 0)) - claim.kv_len)
        if count >= claim.extend_left:
            return claim.extend_left
        whole = max(cache.page_floor(claim.kv_len + count) - claim.kv_len, 0)
        chosen = whole if whole or self._chunks else max(count, 0)
        for draft in self._drafts:
            chosen = draft.ends(claim.req, claim.kv_len, count, chosen)
        return chosen

    def _shed_padding(self) -> None:
        """Leaves the tail of the last chunk to the next step where that costs less than the padding."""
        claim, count = next(reversed(self._chunks.items()))
        total = sum(self._chunks.values())
        better = without_much_padding(total, self._sizes(), count - 1)
        kept = self._cache.page_floor(claim.kv_len + count - (total - better)) - claim.kv_len
        for draft in self._drafts:
            kept = draft.ends(claim.req, claim.kv_len, kept, kept)
        if better < total and kept > 0:
            self._chunks[claim] = kept

    def _sizes(self) -> list[int]:
        """Tokens that its chunks may have in a step of each size, next to decodes; a step that scores takes none."""
        in_few = any(claim.req.in_few_sizes for claim in self._chunks)
        num_mixed = 0 if any(claim.req.scores_prompt for claim in self._chunks) else self._num_mixed
        sizes = self._buckets.score_sizes if in_few else self._buckets.extend_sizes
        return [size - num_mixed for size in sizes if size > num_mixed]


def new_pages(claim: Claim, count: int, cache: CacheManager) -> int:
    """Pages that a chunk of `count` tokens takes."""
    return max(cache.pages_for(claim.kv_len + count) - claim.num_pages, 0)
