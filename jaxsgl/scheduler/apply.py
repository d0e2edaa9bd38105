"""`Applier`: carries plans out. The only code that moves lengths, leases and states of requests. Decides nothing.

    apply(plan) -> StepInputs     retract, preempt, admit, allocate pages, move lengths, build the batch
    share_prefixes(plan)          gives the pages that the step computes to the prefix cache
    masks(num_choices, mark)      which token each constrained row of the newest step may get
    collect(tokens) -> replies    what the oldest step in flight yields

scheduler.py calls it. `outputs.py` says what requests make of what a step yields besides tokens.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from jaxsgl.batch.build import Work
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.outputs import HostOutputs
from jaxsgl.batch.sampling import SamplingRows
from jaxsgl.cache.pages import IntArray
from jaxsgl.errors import EngineUnavailable, InvalidRequest
from jaxsgl.messages.replies import Reply, Run
from jaxsgl.requests.request import FinishReason
from jaxsgl.scheduler.failure import RequestFailure, blame, failed_reply
from jaxsgl.scheduler.grammars.constraint import ALL, Bound, Words
from jaxsgl.scheduler.in_flight import InFlightStep, ReadDrafts, Stopwatch
from jaxsgl.scheduler.outputs import with_outputs
from jaxsgl.scheduler.plan import Admission, Part, StepPlan, WhyNot
from jaxsgl.scheduler.req import Req, State
from jaxsgl.scheduler.state import SchedulerState


class Builder(Protocol):
    """Makes padded batches; `BatchBuilder` is the real one."""

    def decode(
        self, rows: IntArray, positions: IntArray, steps: IntArray | None = None, token_ids: IntArray | None = None
    ) -> StepInputs:
        """One token for each row `[S]`, stored at `positions [S]`; or `steps [S]` from there on, in several steps.

        They are `token_ids [S]`.
        """
        ...

    def extend(self, works: Sequence[Work]) -> StepInputs:
        """Several tokens for each of `works`."""
        ...

    def verify(self, works: Sequence[Work]) -> StepInputs:
        """The last token and drafts for each of `works`, to choose a token after each."""
        ...


MakeBuilder: TypeAlias = Callable[..., Builder]  # as `BatchBuilder.__init__`, without `adapters` if there are none


class Applier:
    """Carries plans out on `state`.

    Args:
      state: the scheduler's state.
      builder: makes the batches.
      sampling: sampling parameters by row, which the builder reads.
      stopwatch: measures steps.

    Attributes:
      builder: the one that makes the next batches.
    """

    def __init__(self, state: SchedulerState, builder: Builder, sampling: SamplingRows, stopwatch: Stopwatch) -> None:
        self._state = state
        self._cache = state.cache
        self._requests = state.requests
        self.builder = builder
        self._sampling = sampling
        self._stopwatch = stopwatch
        self._resources = state.resources
        self._in_flight: deque[InFlightStep] = deque()

    def apply(self, plan: StepPlan) -> StepInputs | None:
        """Does what `plan` says; returns the batch to launch, if there is one, which counts as launched.

        Raises `RequestFailure` if the batch can't be built because of one request. No length has moved then, and what
        was retracted, admitted and allocated before is as it should be: `fail` that request, and plan again.
        """
        state = self._state
        for req in (*plan.retract, *plan.preempt):
            self.take_back(req)
        if plan.out_of_pages:
            state.ratio.retracted(state.requests.admitted.values())
        elif plan.decodes:
            state.ratio.decoded(plan.num_steps)
        state.admission_closed, state.blocked = plan.admission_closed, plan.blocked
        state.failed_admission = plan.failed_admission
        for resource in self._resources:
            resource.prepare(plan.actions)
        for admission in plan.admit:
            try:
                self._admit(admission)
            except Exception as error:
                raise RequestFailure(admission.req) from error
        for resource in self._resources:
            resource.carry_out(plan.actions)
        if plan.chunks:
            return self._extend(plan)
        if plan.drafts:
            return self._verify(plan)
        return self._decode(plan) if plan.decodes else None

    def share_prefixes(self, plan: StepPlan) -> None:
        """Gives the full pages of all chunks to the prefix cache.

        Called after the whole batch is built, since no request may rely on KV that the same batch computes.
        """
        for req, _ in plan.chunks:
            assert req.lease is not None
            self._cache.share(req.lease, req.stored_ids())
        for resource in self._resources:
            resource.carried_out(plan.actions)

    def collect(self, tokens: npt.NDArray[np.int32], outputs: HostOutputs, drafts: ReadDrafts) -> list[Reply]:
        """Gives what the oldest step in flight yields to its requests, and ends those that stop; their replies.

        A request for which that fails is ended alone. `drafts` waits for what it has drafted.
        """
        state = self._state
        state.steps_in_flight -= 1
        step_s = self._stopwatch.collected()
        state.timing.collected(step_s)
        step = self._in_flight.popleft()
        for resource in self._resources:
            resource.collected(step.extend_tokens, step_s)
        replies: list[Reply] = []
        ends: list[Reply] = []
        runs: list[tuple[Req, int, Run]] = []
        if step.drafts:
            num_tokens = self._collect_runs(step, tokens, outputs, replies, ends, runs)
        else:
            num_tokens = self._collect_tokens(step, tokens, outputs, replies, ends)
        state.speculation.collected(step, runs, drafts)
        state.totals.output_tokens += num_tokens
        replies += ends
        return replies

    def _collect_tokens(
        self,
        step: InFlightStep,
        tokens: npt.NDArray[np.int32],
        outputs: HostOutputs,
        replies: list[Reply],
        ends: list[Reply],
    ) -> int:
        """`collect` for steps that yield as many tokens for each request; returns how many were taken."""
        num_tokens, silent, num_chunks = 0, step.silent, step.num_chunks
        for place, req, sampled in step.yielded(tokens):
            try:
                collectors = req.outputs
                if collectors:
                    part = step.part(place)
                    for collector in collectors:
                        collector.take(outputs, part)
                    if not part.is_last:
                        continue
                    if req.ends_with_prompt:
                        replies.append(self._end_with_prompt(req))
                        continue
                elif silent and req in silent:
                    continue
                token_ids, reason = req.take(sampled)
                num_tokens += len(token_ids)
                times = self._requests.first_token(req.key) if place < num_chunks else None
                reply = Reply(req.request_id, token_ids, reason, req.cached_tokens, None, req.index, times=times)
                if collectors:
                    reply = with_outputs(reply, collectors)
                if reason is not None:
                    reply = self._end_with(reply, req, ends)
                replies.append(reply)
            except Exception as error:
                replies.append(self.fail(req.request_id, error))
        return num_tokens

    def _collect_runs(
        self,
        step: InFlightStep,
        tokens: npt.NDArray[np.int32],
        outputs: HostOutputs,
        replies: list[Reply],
        ends: list[Reply],
        runs: list[tuple[Req, int, Run]],
    ) -> int:
        """`collect` for steps that verify drafts; adds to `runs` what became of them. Returns how many were taken."""
        num_tokens = 0
        for place, req, run in step.runs(tokens):
            try:
                bound, num_drafts = step.bound(place), len(step.drafts[place])
                token_ids, reason = req.take(run[: bound.num_tokens])
                num_tokens += len(token_ids)
                req.launch_decode(len(token_ids) - (1 + num_drafts))  # what was computed after them is not theirs
                self._requests.moved(req)
                of_drafts = None
                if num_drafts:
                    of_drafts = Run(num_drafts, min(len(token_ids), len(run) - 1), req.drafter.of_prediction)
                    runs.append((req, len(run) - 1, of_drafts))
                parts = self._replies_of_run(req, token_ids, step, place, outputs)
                parts[0] = msgspec.structs.replace(parts[0], run=of_drafts)
                parts[-1] = msgspec.structs.replace(parts[-1], finish_reason=reason)
                if reason is not None:
                    parts[-1] = self._end_with(parts[-1], req, ends)
                replies += parts
                if reason is None and len(run) > bound.num_tokens:
                    replies.append(self._end_at_bound(req, bound))
            except Exception as error:
                replies.append(self.fail(req.request_id, error))
        return num_tokens

    def _replies_of_run(
        self, req: Req, token_ids: tuple[int, ...], step: InFlightStep, place: int, outputs: HostOutputs
    ) -> list[Reply]:
        """One reply with all tokens of a run; or one for each of them, if the client gets something besides."""
        if not req.outputs:
            return [Reply(req.request_id, token_ids, None, req.cached_tokens, None, req.index)]
        replies = []
        for count, token_id in enumerate(token_ids):
            part = step.part_of_run(place, count)
            for collector in req.outputs:
                collector.take(outputs, part)
            reply = Reply(req.request_id, (token_id,), None, req.cached_tokens, None, req.index)
            replies.append(with_outputs(reply, req.outputs))
        return replies

    def _end_at_bound(self, req: Req, bound: Bound) -> Reply:
        """Ends a request whose run went as far as its grammar lets it."""
        if bound.error is not None:
            return self.fail(req.request_id, bound.error)
        self.end(req)
        return Reply(req.request_id, (), FinishReason.STOP, req.cached_tokens, index=req.index)

    def masks(self, num_choices: int) -> tuple[Words, list[Reply]]:
        """`[num_choices, ceil(V / 32)]` for the step that was launched last, and replies of requests that end here.

        Called between its forward program and the program that chooses tokens, once the tokens before of its requests
        are collected.
        Rows without a constraint may get any token, and so may those of requests that have ended meanwhile: their
        tokens are dropped. A request ends if its output is complete and can't go on, or its grammar can't be followed.
        """
        step = self._in_flight[-1]
        words = np.full((num_choices, -(-self._state.capacity.vocab_size // 32)), ALL, dtype=np.uint32)
        replies: list[Reply] = []
        for place, (req, number) in enumerate(zip(step.reqs, step.lease_numbers, strict=True)):
            if req.constraint is None or req.lease_number != number or req in step.silent:
                continue
            drafts = step.drafts_of(place)
            assert req.num_launched == len(req.output_ids) + 1 + len(drafts), "its tokens of a step before are not read"
            try:
                of_req = words[step.choices(place)]
                if req.constraint.mask_into(of_req[0], req.output_ids):
                    if drafts:
                        step.bounds[place] = req.constraint.masks_ahead(of_req, req.output_ids, drafts)
                    continue
                replies.append(Reply(req.request_id, (), FinishReason.STOP, req.cached_tokens, index=req.index))
                self.end(req)
            except Exception as error:
                replies.append(self.fail(req.request_id, error))
            words[step.choices(place)] = ALL
        return words, replies

    def _end_with(self, reply: Reply, req: Req, ends: list[Reply]) -> Reply:
        """Ends the request with `reply`; or with one more of `ends`, if its last token is a part of the text.

        A stop token is not, but a grammar may end an output that has none.
        """
        if reply.finish_reason is FinishReason.STOP and req.is_complete:
            ends.append(Reply(req.request_id, (), FinishReason.STOP, req.cached_tokens, index=req.index))
            reply = msgspec.structs.replace(reply, finish_reason=None)
        self.end(req)
        return reply

    def _end_with_prompt(self, req: Req) -> Reply:
        """Ends a request that samples no token; its only reply."""
        times = self._requests.first_token(req.key)
        reply = Reply(req.request_id, (), FinishReason.LENGTH, req.cached_tokens, index=req.index, times=times)
        reply = with_outputs(reply, req.outputs)
        self.end(req)
        return reply

    def fail(self, request_id: str, error: BaseException | None) -> Reply:
        """Ends all samples of a request for which our work raised `error`; what they computed is not shared."""
        for req in self._requests.samples_of(request_id):
            self.end(req, share=False)
        self._state.totals.failed_requests += not isinstance(error, InvalidRequest | EngineUnavailable)
        return failed_reply(request_id, error)

    def take_back(self, req: Req) -> None:
        """Moves a running request to the head of the queue; its pages come free at once."""
        for resource in self._resources:
            resource.left(req, ends=False)
        self._cache.drop(req.retract())
        self._requests.moved(req)
        self._state.totals.retractions += 1

    def end(self, req: Req, share: bool = True) -> None:
        """Ends a request in whatever state it is; what it computed stays in the prefix cache if it is to `share`."""
        stored = req.stored_ids() if share else None
        for resource in self._resources:
            resource.left(req, ends=True)
        lease = req.finish()
        self._state.speculation.ended(req)
        self._requests.moved(req)
        if lease is not None:
            if stored is not None:
                self._cache.release(lease, stored)
            else:
                self._cache.drop(lease)
            self._state.admission_closed = False
        if not self._requests.admitted:
            self._state.ratio.reset()

    def _admit(self, admission: Admission) -> None:
        req, state = admission.req, self._state
        planned = req.matchable_ids[: admission.cached_tokens + 1]  # the plan's ledger locked no more than this
        lease = self._cache.acquire(self._cache.match(planned, req.namespace), req.name, req.namespace, req.page_names)
        assert lease.num_tokens == admission.cached_tokens, f"{req.name}: the cache changed since the plan"
        req.admit(lease, admission.cached_tokens)
        for resource in self._resources:
            resource.admitted(req)
        self._requests.moved(req)
        state.num_admitted += 1
        if req.on_first_lease:
            state.totals.prompt_tokens += req.prompt_len
            state.totals.cached_prompt_tokens += req.cached_tokens

    def _extend(self, plan: StepPlan) -> StepInputs:
        try:
            works, inputs = self._built(plan)
        except Exception:
            for resource in self._resources:
                resource.not_launched()
            raise
        inputs = self._completed(inputs)
        reqs, decoding = [req for req, _ in (*plan.chunks, *plan.decodes)], [req for req, _ in plan.decodes]
        for req, num_tokens in plan.chunks:
            if req.launch_chunk(num_tokens):
                self._requests.moved(req)
        for req, num_tokens in plan.decodes:
            if not req.launch_decode(num_tokens):
                self._requests.moved(req)
        self._state.turns.launched(self._requests, decoding)
        if len(decoding) == self._state.capacity.max_mixed_decodes:
            self._requests.decoded(decoding)  # others may have found no room: they go first in the next step
        for resource in self._resources:
            resource.launched(plan.chunks)
        silent = frozenset([req for req, _ in plan.chunks if req.state is State.EXTENDING])
        return self._launched_works(plan, inputs, reqs, works, silent)

    def _built(self, plan: StepPlan) -> tuple[list[Work], StepInputs]:
        """The batch of an extend step, and the work for each of its requests, whose pages are allocated."""
        works: list[Work] = []
        for req, num_tokens in plan.chunks:
            try:
                works.append(self._work_of(req, num_tokens))
            except Exception as error:
                raise RequestFailure(req) from error
        works += [self._decoding_work_of(req) for req, _ in plan.decodes]
        try:
            return works, self.builder.extend(works)
        except Exception:
            reqs = [req for req, _ in (*plan.chunks, *plan.decodes)]
            blame((req, partial(self.builder.extend, [work])) for req, work in zip(reqs, works, strict=True))
            raise

    def _decode(self, plan: StepPlan) -> StepInputs:
        for resource in self._resources:
            resource.decoding(plan.decodes)
        reqs: list[Req] = []
        rows: list[int] = []
        positions: list[int] = []
        for req, count in plan.decodes:
            lease, start = req.lease, req.kv_len
            assert lease is not None
            reqs.append(req)
            rows.append(lease.row)
            positions.append(start)
            if start + count > lease.num_tokens:
                self._cache.grow(lease, start + count)
            if not req.launch_decode(count):
                self._requests.moved(req)
        rows_S, positions_S = np.array(rows, dtype=np.int32), np.array(positions, dtype=np.int32)
        ids_S = self._state.turns.token_ids(reqs, rows_S)
        steps_S = None
        if plan.num_steps > 1:
            steps_S = np.array([count for _, count in plan.decodes], dtype=np.int32)
        try:
            inputs = self.builder.decode(rows_S, positions_S, steps_S, ids_S)
        except Exception:
            self._undo_decodes(plan.decodes)
            blame(
                (req, partial(self.builder.decode, rows_S[i : i + 1], positions_S[i : i + 1]))
                for i, req in enumerate(reqs)
            )
            raise
        self._state.turns.launched(self._requests, reqs)
        inputs = self._launched(plan, self._completed(inputs), reqs, rows, positions, range(len(reqs) + 1))
        self._state.timing.decodes(inputs, positions_S, steps_S)
        return inputs

    def _verify(self, plan: StepPlan) -> StepInputs:
        """Decodes with drafts. No step is in flight, so that all tokens are known."""
        reqs = [req for req, _ in plan.decodes]
        works = [self._run_of(req, drafts) for req, drafts in zip(reqs, plan.drafts, strict=True)]
        try:
            inputs = self.builder.verify(works)
        except Exception:
            blame((req, partial(self.builder.verify, [work])) for req, work in zip(reqs, works, strict=True))
            raise
        inputs = self._completed(inputs)
        for req, num_tokens in plan.decodes:
            if not req.launch_decode(num_tokens):
                self._requests.moved(req)
        return self._launched_works(plan, inputs, reqs, works)

    def _run_of(self, req: Req, drafts: tuple[int, ...]) -> Work:
        """The last token of a request and drafts, whose pages are allocated."""
        assert req.lease is not None and not self._state.steps_in_flight
        start, stop = req.kv_len, req.kv_len + 1 + len(drafts)
        self._cache.grow(req.lease, stop)
        ids = np.array([req.output_ids[-1], *drafts], dtype=np.int32)
        work = Work(req.lease.row, ids, start, True, rope_positions=req.rope_positions(start, stop))
        for resource in self._resources:
            work = resource.placed_decode(work, req)
        return work

    def _undo_decodes(self, decodes: Sequence[Part]) -> None:
        """Moves lengths back after a step that is not launched; pages that its tokens took stay with their requests."""
        for req, count in decodes:
            req.launch_decode(-count)
            self._requests.moved(req)

    def _work_of(self, req: Req, num_tokens: int) -> Work:
        """Allocates a chunk's pages, and with the last chunk writes the request's sampling parameters to its row."""
        start, stop = req.kv_len, req.kv_len + num_tokens
        assert req.lease is not None
        self._cache.grow(req.lease, stop)
        last, setup = stop == req.extend_to, None
        samples = last and not req.ends_with_prompt
        if samples:
            self._sampling.set(req.lease.row, req.sampling, req.seed, req.rope_delta)
            setup = req.edit_setup(self._state.capacity.vocab_size)
        ids, positions = req.known_ids[start:stop], req.rope_positions(start, stop)
        work = Work(req.lease.row, ids, start, samples, setup=setup, rope_positions=positions)
        for collector in req.outputs:
            work = collector.ask(work, last)
        for resource in self._resources:
            work = resource.placed(work, req)
        return work

    def _decoding_work_of(self, req: Req) -> Work:
        """One token in a mixed step."""
        assert req.lease is not None
        row, start = req.lease.row, req.kv_len
        self._cache.grow(req.lease, start + 1)
        positions = req.rope_positions(start, start + 1)
        ids = self._state.turns.token_ids([req], np.array([row], dtype=np.int32))
        work = Work(row, ids, start, True, rope_positions=positions)
        for resource in self._resources:
            work = resource.placed_decode(work, req)
        return work

    def _completed(self, inputs: StepInputs) -> StepInputs:
        """The batch with what must run on the device before it."""
        for resource in self._resources:
            inputs = resource.completed(inputs)
        return inputs

    def _launched_works(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        reqs: Sequence[Req],
        works: Sequence[Work],
        silent: frozenset[Req] = frozenset(),
    ) -> StepInputs:
        """`_launched` for the batch of `works`, one for each of `reqs`."""
        rows, starts = [work.row for work in works], [work.start for work in works]
        offsets = [0, *itertools.accumulate(len(work.token_ids) for work in works)]
        inputs = self._launched(plan, inputs, reqs, rows, starts, offsets, silent)
        self._state.timing.extends(inputs, works)
        return inputs

    def _launched(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        reqs: Sequence[Req],
        rows: Sequence[int],
        starts: Sequence[int],
        offsets: Sequence[int],
        silent: frozenset[Req] = frozenset(),
    ) -> StepInputs:
        """Counts the batch of `plan` as launched, see `InFlightStep`; returns it, which may ask for drafts."""
        choosers = [req for req in reqs if req not in silent] if silent else reqs
        inputs = self._state.speculation.asking(inputs, choosers)
        numbers, num_chunks = [req.lease_number for req in reqs], len(plan.chunks)
        step = InFlightStep(
            reqs, numbers, starts, offsets, silent, num_chunks, plan.num_steps, plan.drafts, plan.dropped, inputs.drafts
        )
        if inputs.table_changes:
            self._cache.sent(rows)
        self._in_flight.append(step)
        self._state.extended_last = num_chunks > 0
        self._stopwatch.launched(inputs.bucket)
        self._state.steps_in_flight += 1
        totals, blocked = self._state.totals, self._state.blocked
        totals.steps += 1
        totals.short_of_tokens += blocked is WhyNot.TOKENS
        totals.short_of_rows += blocked is WhyNot.ROWS
        totals.short_of_chunk += blocked is WhyNot.CHUNK
        totals.short_of_adapters += blocked is WhyNot.ADAPTERS
        if inputs.bucket.kind in ("decode", "verify"):
            totals.decode_rows += inputs.num_tokens
            totals.decode_rows_padded += inputs.bucket.padded_tokens
        else:
            totals.extend_tokens += inputs.num_tokens
            totals.extend_tokens_padded += inputs.bucket.num_tokens
        return inputs
