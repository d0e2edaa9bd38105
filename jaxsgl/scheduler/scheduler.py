"""The scheduler: a core without I/O and without a device. `loop.py` calls it, an engine runs what it launches.

    receive(messages)  ->  launch() -> StepInputs  ->  collect(tokens)  ->  take_replies()

Up to one step may be launched before the tokens of the one before are collected: everything that launch() decides
follows from what has been launched, not from tokens. A request that turns out to have ended gets its extra token
dropped. Pages freed while a step is in flight may be handed out at once, since steps run in order.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import takewhile

import numpy as np

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.build import BatchBuilder, Work
from jaxsgl.batch.capacity import Capacity
from jaxsgl.batch.engine_api import StepScores
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.logit_edits import MAX_EOS_TOKEN_IDS
from jaxsgl.batch.sampling_rows import SamplingRows
from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.naive import NaiveCache
from jaxsgl.cache.radix import RadixCache
from jaxsgl.cache.table import PageTable
from jaxsgl.errors import CheckpointError, InvalidRequest
from jaxsgl.messages import Abort, Load, Refusal, RefusalKind, Reply, TokenLogprob
from jaxsgl.request import FinishReason, Request, check_request, max_new_tokens
from jaxsgl.scheduler.admit import Chunk, PrefillAdder, pages_promised
from jaxsgl.scheduler.launched import Launched, ScoredChunk, token_logprobs
from jaxsgl.scheduler.req import Key, Req
from jaxsgl.scheduler.states import State
from jaxsgl.scheduler.totals import Totals
from jaxsgl.scheduler.waiting import WaitingQueue

NO_SCORES = StepScores()


class Scheduler:
    """Owns all requests between arrival and end, and through the cache manager all pages and rows.

    Args:
      capacity: sizes of pool, rows, context and steps.
      buckets: shapes that the engine has compiled.
      eos_token_ids: tokens that end every request that doesn't ignore them.
      radix_cache: share prefixes between requests.
      random_seed: seeds of requests that bring none are drawn from it.
      max_queued_requests: a request that finds so many samples waiting is refused; None: none is.

    Raises:
      CheckpointError: the model has more EOS tokens than the step can hold back until min_tokens.
    """

    def __init__(
        self,
        capacity: Capacity,
        buckets: BucketSet,
        eos_token_ids: Iterable[int],
        *,
        radix_cache: bool = True,
        random_seed: int = 0,
        max_queued_requests: int | None = None,
    ) -> None:
        self._capacity = capacity
        self._max_queued = max_queued_requests
        self._eos_token_ids = frozenset(eos_token_ids)
        if len(self._eos_token_ids) > MAX_EOS_TOKEN_IDS:
            raise CheckpointError(
                f"the model has {len(self._eos_token_ids)} EOS tokens, but {MAX_EOS_TOKEN_IDS} are the most: shorten "
                "eos_token_id in its generation_config.json"
            )
        self._seeds = random.Random(random_seed)
        table = PageTable(capacity.num_rows, capacity.max_pages_per_seq)
        prefixes = RadixCache(capacity.page_size) if radix_cache else NaiveCache()
        self.cache = CacheManager(capacity.num_pages, capacity.page_size, table, prefixes)
        self._sampling = SamplingRows(capacity.num_rows)
        self._builder = BatchBuilder(buckets, table.pages, self._sampling, capacity.page_size)
        self._waiting = WaitingQueue()
        self._live: dict[str, list[Req]] = {}  # samples that have not ended, by request
        self._admitted: dict[Key, Req] = {}  # EXTENDING and RUNNING, in order of admission
        self._extending: dict[Key, Req] = {}  # between chunks
        self._decoding: dict[Key, Req] = {}  # RUNNING, with tokens left to launch
        self._in_flight: deque[Launched] = deque()
        self._replies: list[Reply] = []
        self._totals = Totals()

    @property
    def is_idle(self) -> bool:
        """Whether nothing can happen before the next message."""
        return not (self._waiting or self._admitted or self._in_flight or self._replies)

    @property
    def num_waiting(self) -> int:
        """Samples in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Samples that hold a row."""
        return len(self._admitted)

    @property
    def num_in_flight(self) -> int:
        """Steps that are launched and not collected."""
        return len(self._in_flight)

    def receive(self, messages: Sequence[Request | Abort]) -> None:
        """Queues new requests (or refuses them) and ends aborted ones."""
        for message in messages:
            if isinstance(message, Abort):
                self._abort(message)
            else:
                self._enqueue(message)

    def launch(self) -> StepInputs | None:
        """Decides the next step and accounts for it as launched. Prefill first: waiting prompts go before decoding."""
        chunks = self._decide_extend()
        if chunks:
            return self._launch_extend(chunks)
        if self._decoding:
            return self._launch_decode(list(self._decoding.values()))
        return None

    def collect(self, tokens: Sequence[int] | np.ndarray, scores: StepScores = NO_SCORES) -> None:
        """Takes what the oldest step in flight yields: `[num_seqs]` tokens in the order of its batch, and scores."""
        launched = self._in_flight.popleft()
        num_replies = len(self._replies)
        for chunk in launched.scored:
            assert scores.prompt is not None and chunk.req.sampling.prompt_logprobs is not None
            logprobs = token_logprobs(scores.prompt, chunk.first, chunk.count, chunk.req.sampling.prompt_logprobs)
            chunk.req.add_prompt_logprobs(chunk.start, logprobs)
        for s, (req, token_id) in enumerate(zip(launched.entries, np.asarray(tokens).tolist(), strict=True)):
            if req is None or req.state is State.FINISHED:
                continue  # a chunk that yields no token, or the extra token of a request that has ended
            reason = req.append(token_id)
            logprob, of_prompt = _logprobs(req, s, scores) if req.wants_scores else (None, None)
            self._replies.append(
                Reply(req.request_id, (token_id,), reason, req.cached_tokens, None, req.index, logprob, of_prompt)
            )
            if reason is not None:
                self._release(req)
        self._totals.output_tokens += len(self._replies) - num_replies

    def take_replies(self) -> list[Reply]:
        """All news since the last call."""
        replies, self._replies = self._replies, []
        return replies

    def load(self, recompiles: int) -> Load:
        """How busy it is; `recompiles` is what the engine says of itself. Costs the same whatever waits or runs."""
        totals = self._totals
        return Load(
            num_running=len(self._admitted),
            num_waiting=len(self._waiting),
            waiting_tokens=self._waiting.num_tokens,
            used_tokens=self.cache.used_tokens,
            cached_tokens=self.cache.cached_tokens,
            prompt_tokens_total=totals.prompt_tokens,
            cached_prompt_tokens_total=totals.cached_prompt_tokens,
            output_tokens_total=totals.output_tokens,
            steps_total=totals.steps,
            decode_rows_total=totals.decode_rows,
            decode_rows_padded_total=totals.decode_rows_padded,
            extend_tokens_total=totals.extend_tokens,
            extend_tokens_padded_total=totals.extend_tokens_padded,
            recompiles_total=recompiles,
        )

    def flush_cache(self) -> None:
        """Drops every cached prefix that no request uses."""
        self.cache.flush()

    def check(self) -> None:
        """Integrity of requests, rows and pages; raises AssertionError."""
        self.cache.check(req.lease for req in self._admitted.values() if req.lease)
        for req in self._admitted.values():
            assert req.lease is not None and req.state in (State.EXTENDING, State.RUNNING)
            assert (req.state is State.EXTENDING) == (req.key in self._extending)
            assert req.can_launch == (req.key in self._decoding)
            assert self.cache.pages_for(req.kv_len) <= req.lease.num_pages, f"{req.key} lacks pages"
            assert req in self._live[req.request_id]
        self._waiting.check()
        promised = pages_promised(self._admitted.values(), self.cache)
        assert promised <= self.cache.num_available, f"{promised} pages promised, {self.cache.num_available} left"

    def _enqueue(self, request: Request) -> None:
        refusal = self._refusal(request)
        if refusal is not None:
            self._replies.append(Reply(request.request_id, refusal=refusal))
            return
        sampling = request.sampling
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(32)
        max_new = max_new_tokens(request, self._capacity.limits)
        leader: Req | None = None
        samples = self._live[request.request_id] = []
        for index in range(sampling.n):
            req = Req(request, max_new, self._eos_token_ids, seed, index, leader)
            leader = leader or req
            samples.append(req)
            self._waiting.add(req)

    def _refusal(self, request: Request) -> Refusal | None:
        """Why `request` can't be taken. The queue holds samples, but a request is taken or refused as a whole."""
        try:
            check_request(request, self._capacity.limits)
        except InvalidRequest as error:
            return Refusal(RefusalKind.INVALID, str(error))
        if self._max_queued is not None and len(self._waiting) >= self._max_queued:
            text = (
                f"the queue is full: {len(self._waiting)} wait for admission, and --max-queued-requests is "
                f"{self._max_queued}: try again later"
            )
            return Refusal(RefusalKind.OVERLOADED, text)
        return None

    def _abort(self, message: Abort) -> None:
        for req in list(self._live.get(message.request_id, ())):  # none, if all have ended already
            if message.index is None or message.index == req.index:
                self._replies.append(_end(req, FinishReason.ABORT))
                self._release(req)

    def _decide_extend(self) -> list[Chunk]:
        """Fills an extend step: requests between chunks first, then the queue in its order."""
        if not (self._extending or self._waiting):
            return []
        promised = pages_promised(self._admitted.values(), self.cache)
        adder = PrefillAdder(self.cache, self._capacity.max_extend_tokens, self._capacity.num_rows, promised)
        for req in self._extending.values():
            if not adder.add_continuation(req):
                break
        for req in list(takewhile(adder.add_waiting, self._waiting.in_turn())):
            self._waiting.remove(req)
        return adder.chunks

    def _launch_extend(self, chunks: list[Chunk]) -> StepInputs:
        works: list[Work] = []
        entries: list[Req | None] = []
        scored: list[ScoredChunk] = []
        for chunk in chunks:
            req, start = chunk.req, chunk.req.kv_len
            assert req.lease is not None
            if req.key not in self._admitted:
                self._admitted[req.key] = req
                self._totals.admitted(req)
                self._sampling.set(req.lease.row, req.sampling, req.seed)
            self.cache.grow(req.lease, start + chunk.num_tokens)
            req.launch_chunk(chunk.num_tokens)
            self._file(req)
            last = req.state is State.RUNNING
            targets = req.targets(start, req.kv_len)
            if targets is not None:
                first = sum(len(work.token_ids) for work in works)
                scored.append(ScoredChunk(req, first, chunk.num_tokens, start))
            setup = req.edit_setup(self._capacity.vocab_size) if last else None
            works.append(Work(req.lease.row, req.prompt_ids[start : req.kv_len], start, last, targets, setup))
            entries.append(req if last else None)
        inputs = self._builder.extend(works)
        self._totals.launched(inputs)
        self._in_flight.append(Launched(entries, tuple(scored)))
        for chunk in chunks:  # only now: no request of a batch may count on KV that the same batch computes
            assert chunk.req.lease is not None
            self.cache.share(chunk.req.lease, chunk.req.stored_ids())
        return inputs

    def _launch_decode(self, reqs: list[Req]) -> StepInputs:
        for req in reqs:
            assert req.lease is not None
            self.cache.grow(req.lease, req.kv_len + 1)
        rows = np.fromiter((req.lease.row for req in reqs if req.lease), np.int32, len(reqs))
        positions = np.fromiter((req.kv_len for req in reqs), np.int32, len(reqs))
        inputs = self._builder.decode(rows, positions)
        self._totals.launched(inputs)
        self._in_flight.append(Launched(list(reqs)))
        for req in reqs:
            req.launch_decode()
            if not req.can_launch:
                self._file(req)
        return inputs

    def _file(self, req: Req) -> None:
        """Keeps the sets by state in step with the request's state."""
        for reqs, belongs in ((self._extending, req.state is State.EXTENDING), (self._decoding, req.can_launch)):
            if belongs:
                reqs[req.key] = req
            else:
                reqs.pop(req.key, None)

    def _release(self, req: Req) -> None:
        """Ends a request in whatever state it is; what it computed stays in the prefix cache."""
        self._waiting.remove(req)
        stored = req.stored_ids()
        lease = req.finish()
        self._file(req)
        self._live[req.request_id].remove(req)
        if not self._live[req.request_id]:
            del self._live[req.request_id]
        if lease is not None:
            del self._admitted[req.key]
            self.cache.release(lease, stored)


def _end(req: Req, reason: FinishReason) -> Reply:
    return Reply(req.request_id, (), reason, req.cached_tokens, index=req.index)


def _logprobs(req: Req, place: int, scores: StepScores) -> tuple[TokenLogprob | None, tuple[TokenLogprob, ...] | None]:
    """Of the token that `req` just got, which stands at `place` in its batch, and of the prompt if it is the first."""
    logprob: TokenLogprob | None = None
    if req.sampling.logprobs is not None:
        assert scores.sampled is not None, f"{req.key} wants log-probabilities, but its step has none"
        (logprob,) = token_logprobs(scores.sampled, place, 1, req.sampling.logprobs)
    return logprob, req.take_prompt_logprobs()
