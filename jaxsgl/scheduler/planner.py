"""`plan_step`: decides the next step, and changes nothing. apply.py carries the plan out.

    prompts first: chunks of admitted requests, then of waiting ones as they are admitted, unless a decode step is due;
    in mixed steps the running requests decode in the same step; without chunks, all running requests decode.

Where the pages don't suffice for the next tokens of the running requests, the plan takes some back to the queue
(policy.py). What-ifs go through the ledger, never through the cache. extend_step.py admits waiting requests by an
estimate of the pages that running ones will need. It may turn out too low: then a later plan retracts. An empty pool
takes any request, since one that could never fit was refused on arrival. While requests wait for pages and nothing
changes that could make room, the queue isn't read (`FailedAdmission`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from jaxsgl.scheduler import policy
from jaxsgl.scheduler.budget import HORIZON_STEPS, Claim, FailedAdmission
from jaxsgl.scheduler.extend_step import ExtendBuilder, PlanBuilder, new_pages
from jaxsgl.scheduler.failure import blame
from jaxsgl.scheduler.in_flight import NOTHING, Drafts
from jaxsgl.scheduler.plan import Admission, Part, StepPlan, WhyNot
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.state import SchedulerState

ONE_EACH = itertools.repeat(1)
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
    planner = _Planner(view)
    in_order = view.policy.order([req], view.num_admitted, planner.peek)
    ExtendBuilder(planner, [], []).admit_in_order(in_order)


def epoch_of(view: SchedulerState) -> int:
    """Rises whenever something comes free that a request may have waited for, as the owners of it count."""
    return view.requests.epoch + view.cache.epoch + sum([resource.epoch for resource in view.resources])


class _Planner(PlanBuilder):
    """Makes one plan."""

    def __init__(self, view: SchedulerState) -> None:
        super().__init__(view)
        self._retract: list[Req] = []
        self._preempt: list[Req] = []
        self._decode_pages = 0  # that the next tokens of all running requests take
        self._out_of_pages = False
        self._admission_closed = view.admission_closed
        self._blocked: WhyNot | None = None
        self._failed_admission: FailedAdmission | None = None
        self._preempting: dict[Req, None] = {}  # waiting requests for which others were taken back

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
        elif self.decoding and view.extended_last and (config.decode_first or view.timing.is_bounded):
            self._blocked = view.blocked
            for draft in self.drafts:
                draft.begin_step()
            return self._decode_plan(prompts_wait=True)
        else:
            decodes, chunks = [], self._chunks([]) if has_prompts else []
        if not chunks:
            extending = any(req not in self.taken_back for req in view.requests.extending.values())
            return self._decode_plan(prompts_wait=extending or self.is_working)
        if any(claim.req.scores_prompt for claim, _ in chunks):
            decodes = []  # the program that scores prompts takes no decodes
        pages = sum(new_pages(claim, count, view.cache) for claim, count in chunks)
        pages += sum(req.needs_page for req in decodes)
        return self._finished(pages, tuple([(claim.req, count) for claim, count in chunks]), decodes)

    def _decode_plan(self, prompts_wait: bool) -> StepPlan:
        """All running requests decode; one token, if `prompts_wait` for the next step, or with drafts to verify."""
        decodes = self._retracted_for_room()
        drafts = NOTHING
        if decodes and not (prompts_wait and self.view.timing.is_bounded):
            room = self.ledger.available - self._decode_pages
            drafts = self.view.speculation.drafts(decodes, self.view.steps_in_flight, room)
        if drafts.tokens:
            counts = [1 + len(tokens) for tokens in drafts.tokens]
            return self._finished(self._decode_pages + drafts.num_pages, (), decodes, counts, drafts=drafts)
        if self.view.buckets.decode_steps > 1 and decodes and not prompts_wait:
            counts, pages = self._several_steps(decodes)
            if counts:
                return self._finished(pages, (), decodes, counts, self.view.buckets.decode_steps)
        return self._finished(self._decode_pages if decodes else 0, (), decodes, drafts=drafts)

    def _finished(
        self,
        num_pages: int,
        chunks: tuple[Part, ...],
        decodes: Sequence[Req],
        counts: Iterable[int] = ONE_EACH,
        num_steps: int = 1,
        drafts: Drafts = NOTHING,
    ) -> StepPlan:
        self.ledger.take(num_pages)
        actions = tuple([action for draft in self.drafts for action in draft.actions(bool(decodes))])
        failed = self._failed_admission
        if failed is not None:
            tokens = max(map(len, drafts.tokens), default=0) + num_steps
            if decodes and failed.steps:
                failed = dataclasses.replace(failed, steps=max(failed.steps - tokens, 0))
        return StepPlan(
            retract=tuple(self._retract),
            preempt=tuple(self._preempt),
            admit=tuple([Admission(req, claim.kv_len) for req, claim in self.admissions.items()]),
            actions=actions,
            chunks=chunks,
            decodes=tuple(zip(decodes, counts, strict=False)),
            num_steps=num_steps,
            drafts=drafts.tokens,
            dropped=drafts.dropped,
            out_of_pages=self._out_of_pages,
            admission_closed=self._admission_closed,
            blocked=self._blocked,
            failed_admission=failed,
            pages=self.ledger.count,
        )

    def _retracted_for_room(self) -> list[Req]:
        """The requests that can store their next token, after retracting as many others as that takes.

        Returns [] if the last token of another request is in flight: its pages are about to come free.
        """
        while (pages := self._pages_to_decode()) > self.ledger.available:
            admitted = self.admitted
            candidates = policy.retractable(admitted)
            if len(candidates) < len(admitted):
                return []
            assert len(candidates) > 1, f"{candidates[0].name} runs alone and lacks pages: it was checked on arrival"
            self._retract_one(candidates)
            self._out_of_pages = True
        self._decode_pages = pages
        return self.decoding

    def _pages_to_decode(self) -> int:
        return sum([req.kv_len >= req.lease.num_tokens for req in self.decoding if req.lease])  # `needs_page`, but fast

    def _retract_one(self, candidates: Sequence[Req]) -> None:
        """Retracts the request that loses least, and admits none for now."""
        self._admission_closed = True
        self._take_back(policy.in_order_of_loss(candidates, self.view.policy.rank)[:1], self._retract)

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

    def _several_steps(self, decodes: Sequence[Req]) -> tuple[list[int], int]:
        """Tokens of each request in a program of several steps, and the pages that they take; [] if one step is better.

        Several steps cost the host as much as one, but a request that arrives or ends meanwhile waits until all are
        done. Takes several if each step yields tokens, few rows idle, no logits are edited, scored or masked, there
        are pages for all these tokens without taking any from other requests, and the tokens come in time.
        """
        cache, several = self.view.cache, self.view.buckets.decode_steps
        one: tuple[list[int], int] = ([], 0)
        if any(req.single_steps or req.constraint is not None for req in decodes):
            return one
        counts = [min(several, req.num_left) for req in decodes]
        if max(counts) < several or sum(counts) < LEAST_USED * several * len(decodes):
            return one
        pages = sum(
            max(cache.pages_for(req.kv_len + count) - req.lease.num_pages, 0)
            for req, count in zip(decodes, counts, strict=True)
            if req.lease
        )
        if pages > self.ledger.available or not self.view.timing.leaves_time_for(several, decodes):
            return one
        return counts, pages

    def _chunks(self, mixed: list[Req]) -> list[tuple[Claim, int]]:
        """Fills an extend step: requests between chunks, then the queue in its order, in what `mixed` decodes leave.

        Starts over after it has taken requests back for one of higher priority, or because all requests between chunks
        hold pages that the others wait for.
        """
        view = self.view
        if self._would_fail_again():
            self._blocked, self._failed_admission = view.blocked, self._standing_failure
            return []
        while True:
            continuing = [Claim.held(req) for req in view.requests.extending.values() if req not in self.taken_back] + [
                claim for req, claim in self.admissions.items() if req not in self.deferred
            ]
            waiting = self._waiting_in_order()
            head = next(waiting, None)
            if head is None and not continuing:
                if not self.is_working:
                    self._note_failure(None, HORIZON_STEPS)
                return []
            step = ExtendBuilder(self, mixed, continuing)
            step.add_continuing(continuing, prompts_wait=head is not None)
            first = None if head is None else step.admit_in_order(itertools.chain((head,), waiting))
            if first is not None and step.no_room is not WhyNot.CHUNK and self._preempt_for(first, step.pages_short):
                mixed = [req for req in mixed if req not in self.taken_back]
                continue
            self._blocked = self._blocked or step.no_room or step.passed_over
            step.add_leftovers(continuing)
            chunks = step.finished()
            if not (chunks or continuing or self.is_working):
                if first is not None:
                    self._note_failure(first, 0 if self._standing_failure is None else step.steps_short)
                elif step.passed_over:  # until something comes free
                    self._note_failure(None, HORIZON_STEPS)
            if chunks or not continuing or self.decoding or view.steps_in_flight or self.is_working:
                return chunks
            self._retract_one(policy.retractable(self.admitted))

    @property
    def _standing_failure(self) -> FailedAdmission | None:
        """The last try to admit, if it failed and nothing has come free since."""
        failed = self.view.failed_admission
        return failed if failed is not None and failed.epoch == epoch_of(self.view) else None

    def _would_fail_again(self) -> bool:
        """Whether the last try to admit failed and nothing has changed since that could make room."""
        failed = self._standing_failure
        if failed is None or not failed.steps or self.taken_back:
            return False
        if failed.head is None or not self.view.policy.by_prefix or failed.num_evicted == self.view.cache.num_evicted:
            return True
        return self.peek(failed.head).num_pages == failed.head_pages

    def _note_failure(self, head: Req | None, steps: int) -> None:
        """Notes that no request was admitted, of which `head` is the first, and that none can be for so many steps.

        Looking ahead costs as much as several tries: so the first time, `steps` is 0.
        """
        view = self.view
        if self.taken_back:
            return
        if head is not None and self._outranks(head):
            steps = 0  # what the requests that it may preempt give back grows with every step
        pages = 0 if head is None else self.peek(head).num_pages
        self._failed_admission = FailedAdmission(head, pages, view.cache.num_evicted, epoch_of(view), steps)

    def _waiting_in_order(self) -> Iterator[Req]:
        """The requests to admit, in order; none, with the reason in `_blocked`, if none can be admitted."""
        view = self.view
        self._blocked = None
        if len(view.requests.waiting) + len(self.taken_back) == len(self.admissions):
            return iter(())
        if self._admission_closed:
            self._blocked = WhyNot.TOKENS
        elif not self.num_free_rows and not view.config.enable_priority_scheduling:
            self._blocked = WhyNot.ROWS
        if self._blocked is not None and not view.config.enable_priority_scheduling:
            return iter(())  # before the queue is read, which may hold thousands
        waiting = itertools.chain(reversed(self.taken_back), view.requests.in_turn())
        in_order = view.policy.order(
            (req for req in waiting if req not in self.admissions), self.num_admitted, self.peek
        )
        return itertools.takewhile(self._outranks, in_order) if self._admission_closed else in_order

    def _outranks(self, req: Req) -> bool:
        """Whether `req` may preempt running requests, or others were taken back for it."""
        if not self.view.config.enable_priority_scheduling:
            return False
        threshold = self.view.config.priority_scheduling_preemption_threshold
        return req in self._preempting or bool(policy.outranked(self.view.policy.rank, req, self.admitted, threshold))

    def _preempt_for(self, waiting: Req, pages_short: int) -> bool:
        """Takes requests of lower priority back to the queue if that makes room for `waiting`."""
        config = self.view.config
        if not config.enable_priority_scheduling:
            return False
        prefix = self.peek(waiting)
        self.ledger.lock(prefix)  # what it shares with a running request doesn't come free for it
        chosen = policy.victims(
            self.view.policy.rank,
            waiting,
            policy.retractable(self.admitted),
            config.priority_scheduling_preemption_threshold,
            pages_short,
            lambda req: self.ledger.num_exclusive(Claim.held(req)),
        )
        self.ledger.unlock(prefix)
        if chosen:
            self._preempting[waiting] = None
        self._take_back(chosen, self._preempt)
        return bool(chosen)
