"""`Arrivals`: what becomes of requests when they come, and of those that end outside a step: refused, late, aborted.

scheduler.py calls it between steps and keeps the replies. It knows the queue and its limits, and nothing of steps.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np

from jaxsgl.config.engine import Limits
from jaxsgl.errors import InvalidRequest
from jaxsgl.messages.orders import Abort
from jaxsgl.messages.replies import Refusal, RefusalKind, Reply
from jaxsgl.requests.grammar_work import Mark
from jaxsgl.requests.outputs import LAST_TOKEN, PoolingSpec
from jaxsgl.requests.request import FinishReason, Request, check_request, max_new_tokens
from jaxsgl.scheduler.apply import Applier
from jaxsgl.scheduler.grammars.constraint import Matcher, TokenLimits
from jaxsgl.scheduler.grammars.queue import Grammars
from jaxsgl.scheduler.outputs import HiddenStates, OutputCollector, PooledPrompt, PromptLogprobs, SampledLogprobs
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.request_table import RequestTable
from jaxsgl.scheduler.state import SchedulerState


class Arrivals:
    """Puts requests into the queue and ends them there.

    Args:
      state: the scheduler's.
      queue_limits: what the queue takes.
      eos_token_ids: tokens that end every request that doesn't ignore them.
      random_seed: seed for the seeds of requests that bring none.
      applier: ends requests that may hold pages.
      grammars: compiles grammars, or refuses them.
      mark: notes whose grammar is worked on.
    """

    def __init__(
        self,
        state: SchedulerState,
        queue_limits: QueueLimits,
        eos_token_ids: frozenset[int],
        random_seed: int,
        applier: Applier,
        grammars: Grammars,
        mark: Mark,
    ) -> None:
        self._state = state
        self._requests = state.requests
        self._queue_limits = queue_limits
        self._eos_token_ids = eos_token_ids
        self._seeds = random.Random(random_seed)
        self._applier = applier
        self._grammars, self._mark = grammars, mark

    def go_on_from(self, former: Arrivals) -> None:
        """Draws the seeds that `former`, in whose place this comes, would have drawn next."""
        self._seeds = former._seeds

    def refusal(self, request: Request) -> Refusal | None:
        """Why `request` can't be queued: its adapter is not loaded, or the queue is full; None: it can."""
        refusal = self._refuse_adapter(request.adapter) if request.adapter else None
        return refusal if refusal is not None else self._queue_limits.refusal(request, self._requests)

    def receive(self, message: Request | Abort, since_s: float | None = None) -> list[Reply]:
        """Queues or refuses a request, which waits since now or `since_s`, or aborts one; returns immediate replies."""
        if isinstance(message, Request):
            return self._enqueue(message, since_s)
        samples = self._requests.samples_of(message.request_id)
        return self.abort(req for req in samples if message.index is None or message.index == req.index)

    def abort(self, reqs: Iterable[Req]) -> list[Reply]:
        """Ends `reqs`, whose clients have left."""
        replies = []
        for req in reqs:
            replies.append(Reply(req.request_id, (), FinishReason.ABORT, req.cached_tokens, index=req.index))
            self._applier.end(req)
            self._forget(req.request_id)
        return replies

    def _forget(self, request_id: str) -> None:
        """Compiles no grammar for a request whose samples have all ended."""
        if self._grammars.num_waiting and not self._requests.samples_of(request_id):
            self._grammars.forget(request_id)

    def end_overdue(self) -> list[Reply]:
        """Refuses requests that have waited too long, and ends those that have run too long."""
        return [self._refuse(request_id, refusal) for request_id, refusal in self._requests.overdue()]

    def _enqueue(self, request: Request, since_s: float | None) -> list[Reply]:
        refusal, displaced = self.refusal(request), list[Req]()
        if refusal is not None and refusal.kind is RefusalKind.OVERLOADED:
            displaced = self._displaced_by(request)
        if refusal is not None and not displaced:
            return [Reply(request.request_id, refusal=refusal)]
        answer = None
        if request.sampling.masked:
            answer = self._grammars.ask(request.request_id, request.sampling.grammar)
        if isinstance(answer, Refusal):
            return [Reply(request.request_id, refusal=answer)]
        samples = self._samples(request)
        if answer is not None:
            self._constrain(samples, answer)
        for resource in self._state.resources:
            resource.arrived(samples)  # first, as it may fail at a request, which no list may hold then
        replies = [] if refusal is None else [self._refuse(req.request_id, refusal) for req in displaced]
        self.take_over(samples, since_s)
        return replies

    def take_over(self, samples: list[Req], since_s: float | None) -> None:
        """Puts `samples` at the end of the queue, which wait since now, or elsewhere since `since_s`."""
        for i, req in enumerate(samples):
            req.num_ahead = self._state.num_admitted + len(self._requests.waiting) + i
        self._may_be_admitted(samples[0])
        self._requests.add(samples, since_s)

    def _may_be_admitted(self, arrival: Req) -> None:
        """Has the queue read again if `arrival` may go before the request that found no room."""
        failed = self._state.failed_admission  # one that no longer stands is void already
        if failed is not None and self._state.policy.may_precede(arrival, failed.head, self._requests.in_turn()):
            self._requests.reordered()

    def take_grammars(self) -> list[Reply]:
        """Lets requests go on whose grammars are compiled by now, and refuses those whose grammars are not."""
        replies = []
        for request_id, answer in self._grammars.poll():
            samples = self._requests.samples_of(request_id)
            if not samples:
                continue
            if isinstance(answer, Refusal):
                replies.append(self._refuse(request_id, answer))
            else:
                self._constrain(samples, answer)
                self._requests.constrained(samples)
                self._may_be_admitted(samples[0])
        return replies

    def _constrain(self, samples: list[Req], matcher: Matcher) -> None:
        sampling, limits = samples[0].sampling, None
        if sampling.allowed_token_ids or sampling.bad_word_ids:
            limits = TokenLimits(sampling, self._state.capacity.vocab_size)
        for req in samples:
            req.constrain(matcher, self._eos_token_ids, limits, self._mark)

    def _samples(self, request: Request) -> list[Req]:
        """All samples of a request that was not refused; sample 0 leads the others."""
        sampling = request.sampling
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(32)
        capacity = self._state.capacity
        max_new = max_new_tokens(request, capacity.limits)
        adapter = self._state.adapters.named(request.adapter) if request.adapter else None
        outputs = [collectors_of(request, index, capacity.pooling) for index in range(sampling.n)]
        drafters = [self._state.speculation.drafter_of(request) for _ in range(sampling.n)]
        samples: list[Req] = []
        for index in range(sampling.n):
            leader = samples[0] if samples else None
            of_sample = index, leader, outputs[index], adapter, drafters[index], capacity.has_axes
            samples.append(Req(request, max_new, self._eos_token_ids, seed, *of_sample))
        return samples

    def _refuse_adapter(self, name: str) -> Refusal | None:
        """Refuses a request for an adapter that isn't loaded."""
        adapters = self._state.adapters
        if adapters.named(name) is not None:
            return None
        known = f"loaded are {', '.join(adapters.by_name)}" if adapters.by_name else "none is"
        return Refusal(RefusalKind.INVALID, f"no adapter named {name:.256} is loaded: {known:.500}")

    def _displaced_by(self, request: Request) -> list[Req]:
        """One sample of each waiting request to refuse in place of `request`; []: they don't make room for it."""
        if not self._state.config.enable_priority_scheduling:
            return []
        displaced: list[Req] = []
        num_samples = num_tokens = 0
        for req in self._state.policy.lower_than(request, self._requests.never_admitted()):
            displaced.append(req)
            count = len(self._requests.samples_of(req.request_id))
            num_samples, num_tokens = num_samples + count, num_tokens + count * req.prompt_len
            if self._queue_limits.takes_for(num_samples, num_tokens, request, self._requests):
                return displaced
        return []

    def _refuse(self, request_id: str, refusal: Refusal) -> Reply:
        """Ends all samples of a request that have not ended; one reply tells of all."""
        for req in self._requests.samples_of(request_id):
            self._applier.end(req)
        self._forget(request_id)
        return Reply(request_id, refusal=refusal)


def collectors_of(request: Request, index: int, spec: PoolingSpec | None) -> tuple[OutputCollector, ...]:
    """The collectors of sample `index` of a request, on a server that pools as `spec` says.

    Sample 0 collects the log-probabilities of the prompt for all samples.
    """
    sampling = request.sampling
    collectors: list[OutputCollector] = []
    if sampling.prompt_logprobs is not None and index == 0:
        collectors.append(PromptLogprobs(sampling.prompt_logprobs, np.array(request.prompt_ids, dtype=np.int32)))
    if sampling.logprobs is not None:
        collectors.append(SampledLogprobs(sampling.logprobs, len(sampling.logprob_token_ids)))
    if request.pooling is not None:
        collectors.append(PooledPrompt(request.pooling, spec or LAST_TOKEN, len(request.prompt_ids)))
    if sampling.wants_states:
        collectors.append(HiddenStates(sampling))
    return tuple(collectors)


class QueueLimits:
    """What the queue takes. Answers, and changes nothing.

    Args:
      limits: of a single request.
      max_requests: a request that finds this many samples waiting is refused; None: no limit.
      max_tokens: likewise, by the prompt tokens of all waiting samples.
    """

    def __init__(self, limits: Limits, max_requests: int | None, max_tokens: int | None) -> None:
        self._limits = limits
        self._max_requests = max_requests
        self._max_tokens = max_tokens

    def refusal(self, request: Request, requests: RequestTable) -> Refusal | None:
        """Why `request` can't be taken. The queue holds samples, but a request is taken or refused as a whole."""
        try:
            check_request(request, self._limits)
        except InvalidRequest as error:
            return Refusal(RefusalKind.INVALID, str(error))
        return self.full(requests)

    def full(self, requests: RequestTable) -> Refusal | None:
        """Why the queue takes no request at all now; None: it takes one."""
        waits = [
            (self._max_requests, len(requests.waiting), "", "--max-queued-requests"),
            (self._max_tokens, requests.num_waiting_tokens, " prompt tokens", "--max-queued-tokens"),
        ]
        for most, count, what, flag in waits:
            if most is not None and count >= most:
                text = f"the queue is full: {count}{what} wait for admission, and {flag} is {most}: try again later"
                return Refusal(RefusalKind.OVERLOADED, text)
        return None

    def takes_for(self, num_samples: int, num_tokens: int, request: Request, requests: RequestTable) -> bool:
        """Whether the queue takes `request` in place of so many samples: it isn't full then, or gets no longer."""
        n = request.sampling.n
        waits = [
            (self._max_requests, len(requests.waiting), num_samples, n),
            (self._max_tokens, requests.num_waiting_tokens, num_tokens, n * len(request.prompt_ids)),
        ]
        return all(most is None or count - less < most or less >= more for most, count, less, more in waits)
