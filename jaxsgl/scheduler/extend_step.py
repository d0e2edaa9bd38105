"""`ExtendStep`: the chunks of one step, request by request, within the budgets of tokens, sequences, rows and pages.

A waiting request is admitted if what it has to extend and its output fit besides what is held for running ones
(budget.py). One that begins like a prompt in progress is held back, so that their common prefix is computed once.
`Draft` is the plan in the making that the step belongs to. Reads only, apart from the draft; called by planner.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.prefix import Peek
from jaxsgl.scheduler.adapters import Adapter, AdapterLedger
from jaxsgl.scheduler.budget import (
    CLIP_TOKENS,
    HORIZON_STEPS,
    Claim,
    Forecast,
    Ledger,
    TokenBudget,
    fair_shares,
    pages_held_for,
    pages_to_come,
    without_much_padding,
)
from jaxsgl.scheduler.failed_admission import ratio_steps_short
from jaxsgl.scheduler.plan import Ahead, NoRoom
from jaxsgl.scheduler.policy import MAX_REORDERED, PrefixesInProgress
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.state import SchedulerState

SPARE_PAGES = 1  # beyond the estimate, for each request that is admitted


class Draft:
    """A plan in the making: the state after the what-ifs so far.

    Attributes:
      view: the state before.
      ledger: the pages after all what-ifs.
      decoding: running requests that decode, without those taken back.
      admissions: requests to admit, with what they will hold.
      loads: of those, the ones whose prefix goes on in the host tier, with the pages that they load from it.
      taken_back: requests to take back to the queue.
      adapters: what it brings to the device; None: no flag asks for adapters.
    """

    def __init__(self, view: SchedulerState) -> None:
        self.view = view
        self.ledger = Ledger(view.cache)
        self.decoding = list(view.requests.decoding.values())
        self.admissions: dict[Req, Claim] = {}
        self.loads: dict[Req, int] = {}
        self.taken_back: dict[Req, None] = {}
        self.adapters = None if view.adapters is None else AdapterLedger(view.adapters)
        self._peeks: dict[Req, Peek] = {}

    def peek(self, req: Req) -> Peek:
        """The cached prefix of `req`, which is looked up once, since the cache doesn't change meanwhile."""
        prefix = self._peeks.get(req)
        if prefix is None:
            prefix = self._peeks[req] = self.view.cache.peek(req.matchable_ids, req.namespace)
        return prefix

    def pages_to_load(self, req: Req, prefix: Peek) -> int:
        """Pages behind the cached `prefix` of `req` that it should load from the host tier."""
        cache, rule = self.view.cache, self.view.loads
        if rule is None or cache.tier is None or req.computes_prompt:
            return 0
        most = cache.pages_for(cache.page_floor(len(req.matchable_ids) - 1))  # a token is left to compute
        count = len(cache.tier.run_of(req.page_names[:most], prefix.num_pages))
        return count if rule.pays(cache.tokens_of(count)) else 0

    @property
    def loading(self) -> list[Req]:
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


class ExtendStep:
    """One extend step in the making.

    Args:
      draft: its plan.
      mixed: requests that decode in the same step.
      continuing: requests between chunks.

    Attributes:
      no_room: why the last waiting request was not admitted; None while all were.
      pages_short: pages that it lacks, if any.
      off_device: whether a request was passed over because there is no place on the device for its adapter.
    """

    def __init__(self, draft: Draft, mixed: Sequence[Req], continuing: Sequence[Claim]) -> None:
        view = draft.view
        self.no_room: NoRoom | None = None
        self.pages_short = 0
        self.off_device = False
        self._keeps_places = False  # for a request that was passed over too often
        self._draft = draft
        self._ledger = draft.ledger
        self._cache = view.cache
        self._admitted = draft.admitted
        self._pages_held = pages_held_for(self._admitted, view.ratio.value, view.cache)
        self._pages_held += sum(
            pages_to_come(claim, claim.tokens_to_come, view.cache) for claim in draft.admissions.values()
        )
        reqs = [*self._admitted, *draft.admissions]
        self._all_go_on = all(req.sampling.ignore_eos for req in reqs)
        self._most_output = max((req.max_new_tokens for req in reqs), default=0) if self._all_go_on else 0
        self._forecast: Forecast | None = None  # made when it is needed, as the next
        self._in_progress: PrefixesInProgress | None = None
        self._steps_short = 0  # by the forecast, at the last try
        most = min(view.capacity.max_extend_tokens - len(mixed), view.config.max_prefill_tokens)
        self._budget = (
            TokenBudget(most) if view.latency is None else view.latency.budget(most, draft.decoding, continuing, mixed)
        )
        self._seqs_left = view.capacity.num_rows - len(mixed)
        if view.config.prefill_max_requests is not None:
            self._seqs_left = min(self._seqs_left, view.config.prefill_max_requests)
        self._sizes = [size - len(mixed) for size in view.buckets.extend_sizes if size > len(mixed)]
        self._score_sizes = view.buckets.score_sizes
        self._whole_prompts = view.capacity.whole_prompts
        bound = view.latency if draft.decoding else None
        self._images = None if view.images is None else view.images.budget(bound)
        if self._images is not None and mixed:
            self._budget.spend(self._images.take_seconds())  # of layers that are encoded ahead
        self._pages_taken = sum(req.needs_page for req in mixed)
        self._chunks: dict[Claim, int] = {}
        self._loading = [Claim.held(req) for req in draft.loading]
        self._loading += [draft.admissions[req] for req in draft.loads]

    @property
    def ahead(self) -> Ahead | None:
        """What is encoded of an image that a later step reads, if this one decodes."""
        return None if self._images is None else self._images.ahead

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
        waits for long: a chunk of that prompt is computed in this step. So are those for whose adapters there is no
        place on the device; behind one that has been overtaken too often, requests are admitted only if they keep no
        adapter there.
        """
        may_preempt, num_held_back = self._draft.view.config.enable_priority_scheduling, 0
        for req in waiting:
            self.no_room, self.pages_short, self._steps_short = self._lack(), 0, 0
            if self.no_room is not None and not (self.no_room is NoRoom.ROWS and may_preempt):
                return req
            if req.adapter is not None and self._is_off_device(req, req.adapter):
                continue
            prefix = self._draft.peek(req)
            if self._is_held_back(req, prefix):
                num_held_back += 1
                if num_held_back == MAX_REORDERED:
                    break
            elif self.no_room is not None or not self._admit(req, prefix):
                return req
        self.no_room = None
        return None

    @property
    def steps_short(self) -> int:
        """After a try to admit that failed: decode steps that must run before another try can succeed."""
        if self.no_room is NoRoom.ROWS:
            return HORIZON_STEPS
        if self.no_room is NoRoom.CHUNK or self._steps_short:
            return max(self._steps_short, 1)
        return ratio_steps_short(self._admitted, self._draft.view.ratio, self.pages_short, self._cache)

    def finished(self) -> list[tuple[Claim, int]]:
        """The chunks, in order."""
        if self._chunks and not self._whole_prompts:
            self._shed_padding()
        return list(self._chunks.items())

    def _is_held_back(self, req: Req, prefix: Peek) -> bool:
        draft = self._draft
        if not self._cache.prefixes.keeps or not (self._chunks or self._loading):
            return False
        if self._in_progress is None:
            self._in_progress = PrefixesInProgress(self._cache, [*self._loading, *self._chunks])
        return self._in_progress.cover(req, prefix) and not draft.view.policy.goes_first(req, draft.num_admitted)

    def _is_off_device(self, req: Req, adapter: Adapter) -> bool:
        """Whether `req` can't run since its adapter isn't on the device, or since others wait for its place."""
        ledger = self._draft.adapters
        assert ledger is not None
        if not ledger.may_admit(adapter):
            self.off_device = True
            if self._draft.view.policy.goes_first(req, self._draft.num_admitted):
                self._keeps_places = True
            return True
        return self._keeps_places and not adapter.pinned

    def _admit(self, req: Req, prefix: Peek) -> bool:
        """Admits `req`, of which `prefix` is cached; False, with the reason in `no_room`, if it has to wait."""
        claim = Claim.planned(req, prefix, self._cache)
        self._ledger.lock(prefix)  # before anything else: what it locks can't be evicted for it
        pages = pages_to_come(claim, claim.tokens_to_come, self._cache)
        num_to_load = self._draft.pages_to_load(req, prefix)
        if not self._fits(claim, pages):
            self.no_room = NoRoom.TOKENS
        elif not num_to_load:
            self._add(claim, self._budget.num_tokens)
            if claim not in self._chunks:  # what is left of the step holds no page of it
                self.no_room = NoRoom.CHUNK
        if self.no_room is not None:
            self._ledger.unlock(prefix)
            return False
        self._draft.admissions[req] = claim
        if req.adapter is not None and self._draft.adapters is not None:
            self._draft.adapters.admit(req.adapter)
        if num_to_load:
            self._draft.loads[req] = num_to_load
            self._loading.append(claim)
        self._all_go_on = self._all_go_on and req.sampling.ignore_eos
        self._most_output = max(self._most_output, req.max_new_tokens)
        if self._forecast is not None:
            self._forecast.add(claim)
        if self._in_progress is not None:
            self._in_progress.add(claim)
        self._pages_held += pages
        return True

    def _lack(self) -> NoRoom | None:
        if not self._draft.num_free_rows:
            return NoRoom.ROWS
        if self._budget.num_tokens <= 0 or not self._seqs_left:
            return NoRoom.CHUNK
        return None

    def _fits(self, claim: Claim, pages: int) -> bool:
        """Whether the pool suffices for the `pages` to come of a claim besides those held for running requests."""
        if not (self._admitted or self._draft.admissions):
            return True
        self.pages_short = max(pages + SPARE_PAGES + self._pages_held - self._ledger.available, 0)
        if not (self._all_go_on and claim.req.sampling.ignore_eos):
            return self.pages_short == 0
        if self.pages_short == 0 and max(self._most_output, claim.req.max_new_tokens) <= CLIP_TOKENS:
            return True  # even if no page came free before the last request ends
        if self._forecast is None:
            claims = [*map(Claim.held, self._admitted), *self._draft.admissions.values()]
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
            count = min(before + min(budget, self._budget.num_tokens), self._in_time(claim, before), claim.extend_left)
        if self._images is not None and claim.req.media:
            whole = count
            count = self._images.longest_chunk(claim.req, claim.kv_len, count)
            self._budget.spend(self._images.take_seconds())
            if not self._whole_prompts:
                count = min(count, self._in_time(claim, before))
            if self._whole_prompts and count < whole:
                return
        pages_before = new_pages(claim, before, self._cache) if before else 0
        count = self._chunk_len(claim, count, pages_before)
        if count <= before:
            return
        if self._images is not None and claim.req.media:
            self._images.take(claim.req, claim.kv_len, count)
        self._pages_taken += new_pages(claim, count, self._cache) - pages_before
        self._budget.take(claim.kv_len, before, count)
        self._seqs_left -= not before
        self._chunks[claim] = count

    def _takes_whole(self, claim: Claim) -> bool:
        """Whether the prompt gets into the step uncut. The first one always does, whatever the budget."""
        pages_left = self._ledger.available - self._pages_taken
        if new_pages(claim, claim.extend_left, self._cache) > pages_left:
            return False
        return not self._chunks or claim.extend_left <= self._budget.num_tokens

    def _in_time(self, claim: Claim, before: int) -> int:
        """Tokens that the chunk may have so that the step ends in time; a page if it is the step's first chunk."""
        longest = self._budget.longest_chunk(claim.kv_len, before)
        return longest if self._chunks else max(longest, self._cache.page_size)

    def _chunk_len(self, claim: Claim, count: int, pages_before: int) -> int:
        """At most `count`: what pages can be allocated for, and unless it is the rest, up to a page border."""
        cache = self._cache
        pages_left = self._ledger.available - self._pages_taken + pages_before
        count = min(count, cache.tokens_of(claim.num_pages + max(pages_left, 0)) - claim.kv_len)
        if count >= claim.extend_left:
            return claim.extend_left
        whole = max(cache.page_floor(claim.kv_len + count) - claim.kv_len, 0)
        return whole if whole or self._chunks else max(count, 0)

    def _shed_padding(self) -> None:
        """Leaves the tail of the last chunk to the next step where that costs less than the padding."""
        claim, count = next(reversed(self._chunks.items()))
        total = sum(self._chunks.values())
        few_sizes = any(claim.req.scores_prompt or claim.req.pooled is not None for claim in self._chunks)
        better = without_much_padding(total, self._score_sizes if few_sizes else self._sizes, count - 1)
        kept = self._cache.page_floor(claim.kv_len + count - (total - better)) - claim.kv_len
        if better < total and kept > 0:
            self._chunks[claim] = kept


def new_pages(claim: Claim, count: int, cache: CacheManager) -> int:
    """Pages that a chunk of `count` tokens takes."""
    return max(cache.pages_for(claim.kv_len + count) - claim.num_pages, 0)
