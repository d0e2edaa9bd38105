"""`plan_step`: decides the next step, and changes nothing. apply.py carries the plan out.

    prompts first: chunks of admitted requests, then of waiting ones as they are admitted, unless a decode step is due;
    in mixed steps the running requests decode in the same step; without chunks, all running requests decode.

Where the pages don't suffice for the next tokens of the running requests, the plan takes some back to the queue
(preemption.py). What-ifs go through the ledger, never through the cache. A waiting request is admitted if what it has
to extend and its output fit besides what is held for running ones (budget.py). The estimate may turn out too low: then
a later plan retracts. An empty pool takes any request, since one that could never fit was refused on arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from jaxsgl.cache.manager import CacheManager
from jaxsgl.scheduler import preemption
from jaxsgl.scheduler.budget import (
    Claim,
    Forecast,
    Ledger,
    TokenBudget,
    fair_shares,
    pages_held_for,
    pages_to_come,
    without_much_padding,
)
from jaxsgl.scheduler.failure import blame
from jaxsgl.scheduler.plan import Admission, Chunk, NoRoom, SchedulerState, StepPlan
from jaxsgl.scheduler.req import Req

SPARE_PAGES = 1  # beyond the estimate, for each request that is admitted
LEAST_USED = 0.75  # of the rows of several decode steps; the others have all their tokens before the last step


def plan_step(view: SchedulerState) -> StepPlan:
    """The next step. Reads only: planning twice gives equal plans.

    Raises `RequestFailure` if a waiting request can't be planned for.
    """
    try:
        return _Planner(view).plan()
    except Exception:
        blame((req, partial(_plan_alone, view, req)) for req in view.requests.waiting.values())
        raise


def _plan_alone(view: SchedulerState, req: Req) -> None:
    """Does what a plan does with the tokens of a waiting request."""
    view.policy.order([req], view.num_admitted, view.totals.steps)
    _ExtendStep(_Planner(view), [], []).admit(req)


class _Planner:
    """One plan in the making: the state after the what-ifs so far."""

    def __init__(self, view: SchedulerState) -> None:
        self.view = view
        self.ledger = Ledger(view.cache)
        self.decoding = list(view.requests.decoding.values())
        self.admissions: dict[Req, Claim] = {}
        self.taken_back: dict[Req, None] = {}
        self._retract: list[Req] = []
        self._preempt: list[Req] = []
        self._decode_pages = 0  # that the next tokens of all running requests take
        self._out_of_pages = False
        self._admission_closed = view.admission_closed
        self._blocked: NoRoom | None = None

    @property
    def admitted(self) -> list[Req]:
        """Requests that hold a lease, without those taken back and those that this plan admits."""
        admitted = self.view.requests.admitted.values()
        return [req for req in admitted if req not in self.taken_back] if self.taken_back else list(admitted)

    @property
    def num_free_rows(self) -> int:
        """Rows that are left."""
        return self.view.cache.table.num_free_rows + len(self.taken_back) - len(self.admissions)

    def plan(self) -> StepPlan:
        """See `plan_step`."""
        view, config = self.view, self.view.config
        if view.retract_also is not None:
            self._take_back(view.retract_also(view), self._retract)
        has_prompts = bool(view.requests.waiting or view.requests.extending or self.taken_back)
        if config.enable_mixed_chunk and has_prompts:
            decodes = self._retracted_for_room()[: view.capacity.max_mixed_decodes]
            chunks = self._chunks(decodes)
            decodes = [req for req in decodes if req not in self.taken_back]
        elif self.decoding and view.extended_last and (config.decode_first or view.latency is not None):
            self._blocked = view.blocked
            return self._decode_plan(prompts_wait=True)
        else:
            decodes, chunks = [], self._chunks([]) if has_prompts else []
        if not chunks:
            extending = any(req not in self.taken_back for req in view.requests.extending.values())
            return self._decode_plan(prompts_wait=extending)
        if any(claim.req.scores_prompt for claim, _ in chunks):
            decodes = []  # the program that scores prompts takes no decodes
        pages = sum(_new_pages(claim, count, view.cache) for claim, count in chunks)
        pages += sum(req.needs_page for req in decodes)
        return self._finished(pages, tuple(Chunk(claim.req, count) for claim, count in chunks), decodes)

    def _decode_plan(self, prompts_wait: bool) -> StepPlan:
        """All running requests decode; one token, if `prompts_wait` for the next step."""
        decodes = self._retracted_for_room()
        num_steps, pages = 1, self._decode_pages if decodes else 0
        if self.view.buckets.decode_steps > 1 and decodes and not prompts_wait:
            num_steps, pages = self._several_steps(decodes, pages)
        return self._finished(pages, (), decodes, num_steps)

    def _finished(
        self, num_pages: int, chunks: tuple[Chunk, ...], decodes: Sequence[Req], num_steps: int = 1
    ) -> StepPlan:
        self.ledger.take(num_pages)
        return StepPlan(
            retract=tuple(self._retract),
            preempt=tuple(self._preempt),
            admit=tuple(Admission(req, claim.kv_len) for req, claim in self.admissions.items()),
            chunks=chunks,
            decodes=tuple(decodes),
            num_steps=num_steps,
            out_of_pages=self._out_of_pages,
            admission_closed=self._admission_closed,
            blocked=self._blocked,
            pages=self.ledger.count,
        )

    def _retracted_for_room(self) -> list[Req]:
        """The requests that can store their next token, after retracting as many others as that takes.

        Returns [] if the last token of another request is in flight: its pages are about to come free.
        """
        while (pages := self._pages_to_decode()) > self.ledger.available:
            admitted = self.admitted
            candidates = preemption.retractable(admitted)
            if len(candidates) < len(admitted):
                return []
            assert len(candidates) > 1, f"{candidates[0].name} runs alone and lacks pages: it was checked on arrival"
            self._retract_one(candidates)
            self._out_of_pages = True
        self._decode_pages = pages
        return self.decoding

    def _pages_to_decode(self) -> int:
        return sum([req.needs_page for req in self.decoding])

    def _retract_one(self, candidates: Sequence[Req]) -> None:
        """Retracts the request that loses least, and admits none for now."""
        self._admission_closed = True
        self._take_back(preemption.in_order_of_loss(candidates)[:1], self._retract)

    def _take_back(self, reqs: Sequence[Req], into: list[Req]) -> None:
        """Takes `reqs` back to the queue. Reopens admission if no request is left whose end could do so."""
        for req in reqs:
            assert req.lease is not None
            self.ledger.give_back(req.lease)
            self.taken_back[req] = None
            into.append(req)
        self.decoding = [req for req in self.decoding if req not in self.taken_back]
        if not (self.admissions or self.admitted):
            self._admission_closed = False

    def _several_steps(self, decodes: Sequence[Req], pages_for_one: int) -> tuple[int, int]:
        """Steps in one program in which no request needs the host in between, and the pages that they take.

        Several steps cost the host as much as one, but a request that arrives or ends meanwhile waits until all are
        done. Takes several if each step yields tokens, few rows idle, no logits are edited or scored, there are pages
        for all these tokens without taking any from other requests, and the tokens come in time.
        """
        cache, several = self.view.cache, self.view.buckets.decode_steps
        one = (1, pages_for_one)
        if any(req.is_featured for req in decodes):
            return one
        counts = [min(several, req.num_left) for req in decodes]
        if max(counts) < several or sum(counts) < LEAST_USED * several * len(decodes):
            return one
        pages = sum(
            cache.pages_for(req.kv_len + count) - req.lease.num_pages
            for req, count in zip(decodes, counts, strict=True)
            if req.lease
        )
        latency = self.view.latency
        if pages > self.ledger.available or not (latency is None or latency.leaves_time_for(several, decodes)):
            return one
        return several, pages

    def _chunks(self, mixed: list[Req]) -> list[tuple[Claim, int]]:
        """Fills an extend step: requests between chunks, then the queue in its order, in what `mixed` decodes leave.

        Starts over after it has taken requests back for one of higher priority, or because all requests between chunks
        hold pages that the others wait for.
        """
        view = self.view
        while True:
            continuing = [
                Claim.held(req) for req in view.requests.extending.values() if req not in self.taken_back
            ] + list(self.admissions.values())
            waiting = self._waiting_in_order()
            if not (continuing or waiting):
                return []
            step = _ExtendStep(self, mixed, continuing)
            step.add_continuing(continuing, prompts_wait=bool(waiting))
            first = next((req for req in waiting if not step.admit(req)), None)
            if first is not None and step.no_room is not NoRoom.CHUNK and self._preempt_for(first, step.pages_short):
                mixed = [req for req in mixed if req not in self.taken_back]
                continue
            self._blocked = self._blocked or step.no_room
            step.add_leftovers(continuing)
            chunks = step.finished()
            if chunks or not continuing or self.decoding or view.steps_in_flight:
                return chunks
            self._retract_one(preemption.retractable(self.admitted))

    def _waiting_in_order(self) -> list[Req]:
        """The requests to admit, in order; [] with the reason in `_blocked` if none can be admitted."""
        view = self.view
        self._blocked = None
        if len(view.requests.waiting) + len(self.taken_back) == len(self.admissions):
            return []
        if self._admission_closed:
            self._blocked = NoRoom.TOKENS
        elif not self.num_free_rows and not view.config.enable_priority_scheduling:
            self._blocked = NoRoom.ROWS
        if self._blocked is not None:  # before the queue is read, which may hold thousands
            return []
        waiting = [*reversed(self.taken_back), *view.requests.in_turn()]
        waiting = [req for req in waiting if req not in self.admissions]
        if len(waiting) <= 1:
            return waiting
        return view.policy.order(waiting, view.num_admitted + len(self.admissions), view.totals.steps)

    def _preempt_for(self, waiting: Req, pages_short: int) -> bool:
        """Takes requests of lower priority back to the queue if that makes room for `waiting`."""
        config = self.view.config
        if not config.enable_priority_scheduling:
            return False
        chosen = preemption.victims(
            self.view.policy.rank,
            waiting,
            preemption.retractable(self.admitted),
            config.priority_scheduling_preemption_threshold,
            pages_short,
            lambda req: self.ledger.num_exclusive(Claim.held(req)),
        )
        self._take_back(chosen, self._preempt)
        return bool(chosen)


class _ExtendStep:
    """One extend step in the making, request by request, within the budgets of tokens, sequences, rows and pages.

    Args:
      planner: its plan.
      mixed: requests that decode in the same step.
      continuing: requests between chunks.

    Attributes:
      no_room: why the last waiting request was not admitted; None while all were.
      pages_short: pages that it lacks, if any.
    """

    def __init__(self, planner: _Planner, mixed: Sequence[Req], continuing: Sequence[Claim]) -> None:
        view = planner.view
        self.no_room: NoRoom | None = None
        self.pages_short = 0
        self._planner = planner
        self._ledger = planner.ledger
        self._cache = view.cache
        self._admitted = planner.admitted
        self._pages_held = pages_held_for(self._admitted, view.ratio.value, view.cache)
        self._pages_held += sum(
            pages_to_come(claim, claim.tokens_to_come, view.cache) for claim in planner.admissions.values()
        )
        self._all_go_on = all(req.sampling.ignore_eos for req in [*self._admitted, *planner.admissions])
        self._forecast: Forecast | None = None  # made when it is needed
        most = min(view.capacity.max_extend_tokens - len(mixed), view.config.max_prefill_tokens)
        self._budget = (
            TokenBudget(most)
            if view.latency is None
            else view.latency.budget(most, planner.decoding, continuing, mixed)
        )
        self._seqs_left = view.capacity.num_rows - len(mixed)
        self._sizes = [size - len(mixed) for size in view.buckets.extend_sizes if size > len(mixed)]
        self._score_sizes = view.buckets.score_sizes
        self._whole_prompts = view.capacity.whole_prompts
        self._pages_taken = sum(req.needs_page for req in mixed)
        self._chunks: dict[Claim, int] = {}

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

    def admit(self, req: Req) -> bool:
        """Admits `req` and adds its first chunk; False, with the reason in `no_room`, if it has to wait."""
        self.no_room = self._lack()
        if self.no_room is not None:
            return False
        prefix = self._cache.peek(req.matchable_ids, req.cache_salt)
        claim = Claim.planned(req, prefix, self._cache)
        self._ledger.lock(prefix)  # before anything else: what it locks can't be evicted for it
        pages = pages_to_come(claim, claim.tokens_to_come, self._cache)
        if not self._fits(claim, pages):
            self.no_room = NoRoom.TOKENS
        else:
            self._add(claim, self._budget.num_tokens)
            if claim not in self._chunks:  # what is left of the step holds no page of it
                self.no_room = NoRoom.CHUNK
        if self.no_room is not None:
            self._ledger.unlock(prefix)
            return False
        self._planner.admissions[req] = claim
        self._all_go_on = self._all_go_on and req.sampling.ignore_eos
        if self._forecast is not None:
            self._forecast.add(claim)
        self._pages_held += pages
        return True

    def finished(self) -> list[tuple[Claim, int]]:
        """The chunks, in order."""
        if self._chunks and not self._whole_prompts:
            self._shed_padding()
        return list(self._chunks.items())

    def _lack(self) -> NoRoom | None:
        if not self._planner.num_free_rows:
            return NoRoom.ROWS
        if self._budget.num_tokens <= 0 or not self._seqs_left:
            return NoRoom.CHUNK
        return None

    def _fits(self, claim: Claim, pages: int) -> bool:
        """Whether the pool suffices for the `pages` to come of a claim besides those held for running requests."""
        if not (self._admitted or self._planner.admissions):
            return True
        self.pages_short = max(pages + SPARE_PAGES + self._pages_held - self._ledger.available, 0)
        if not (self._all_go_on and claim.req.sampling.ignore_eos):
            return self.pages_short == 0
        if self._forecast is None:
            claims = [*map(Claim.held, self._admitted), *self._planner.admissions.values()]
            self._forecast = Forecast(claims, self._ledger, self._cache)
        return self._forecast.fits(claim)

    def _add(self, claim: Claim, budget: int) -> None:
        """Gives the request up to `budget` tokens more of the step, as far as pages reach."""
        before = self._chunks.get(claim, 0)
        if not before and not self._seqs_left:
            return
        if self._whole_prompts:
            count = claim.extend_left if self._takes_whole(claim) else 0
        else:
            count = min(before + min(budget, self._budget.num_tokens), self._in_time(claim, before), claim.extend_left)
        pages_before = _new_pages(claim, before, self._cache) if before else 0
        count = self._chunk_len(claim, count, pages_before)
        if count <= before:
            return
        self._pages_taken += _new_pages(claim, count, self._cache) - pages_before
        self._budget.take(claim.kv_len, before, count)
        self._seqs_left -= not before
        self._chunks[claim] = count

    def _takes_whole(self, claim: Claim) -> bool:
        """Whether the prompt gets into the step uncut. The first one always does, whatever the budget."""
        pages_left = self._ledger.available - self._pages_taken
        if _new_pages(claim, claim.extend_left, self._cache) > pages_left:
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
        scores = any(claim.req.scores_prompt for claim in self._chunks)
        better = without_much_padding(total, self._score_sizes if scores else self._sizes, count - 1)
        kept = self._cache.page_floor(claim.kv_len + count - (total - better)) - claim.kv_len
        if better < total and kept > 0:
            self._chunks[claim] = kept


def _new_pages(claim: Claim, count: int, cache: CacheManager) -> int:
    """Pages that a chunk of `count` tokens takes."""
    return max(cache.pages_for(claim.kv_len + count) - claim.num_pages, 0)
