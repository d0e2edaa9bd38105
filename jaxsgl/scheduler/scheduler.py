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

import numpy as np

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.build import BatchBuilder, Work
from jaxsgl.batch.capacity import Capacity
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.sampling_rows import SamplingRows
from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.naive import NaiveCache
from jaxsgl.cache.radix import RadixCache
from jaxsgl.cache.table import PageTable
from jaxsgl.errors import InvalidRequest
from jaxsgl.messages import Abort, Reply
from jaxsgl.request import FinishReason, Request, check_request, max_new_tokens
from jaxsgl.scheduler.admit import Chunk, PrefillAdder, pages_promised
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.states import State
from jaxsgl.scheduler.waiting import WaitingQueue


class Scheduler:
    """Owns all requests between arrival and end, and through the cache manager all pages and rows.

    Args:
      capacity: sizes of pool, rows, context and steps.
      buckets: shapes that the engine has compiled.
      eos_token_ids: tokens that end every request that doesn't ignore them.
      radix_cache: share prefixes between requests.
      random_seed: seeds of requests that bring none are drawn from it.
    """

    def __init__(
        self,
        capacity: Capacity,
        buckets: BucketSet,
        eos_token_ids: Iterable[int],
        *,
        radix_cache: bool = True,
        random_seed: int = 0,
    ) -> None:
        self._capacity = capacity
        self._eos_token_ids = frozenset(eos_token_ids)
        self._seeds = random.Random(random_seed)
        table = PageTable(capacity.num_rows, capacity.max_pages_per_seq)
        prefixes = RadixCache(capacity.page_size) if radix_cache else NaiveCache()
        self.cache = CacheManager(capacity.num_pages, capacity.page_size, table, prefixes)
        self._sampling = SamplingRows(capacity.num_rows)
        self._builder = BatchBuilder(buckets, table.pages, self._sampling, capacity.page_size)
        self._waiting = WaitingQueue()
        self._admitted: dict[str, Req] = {}  # EXTENDING and RUNNING, in order of admission
        self._extending: dict[str, Req] = {}  # between chunks
        self._decoding: dict[str, Req] = {}  # RUNNING, with tokens left to launch
        self._in_flight: deque[list[Req | None]] = deque()  # per step: whose token each entry of the batch is
        self._replies: list[Reply] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing can happen before the next message."""
        return not (self._waiting or self._admitted or self._in_flight or self._replies)

    def receive(self, messages: Sequence[Request | Abort]) -> None:
        """Queues new requests (or refuses them) and ends aborted ones."""
        for message in messages:
            if isinstance(message, Abort):
                self._abort(message.request_id)
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

    def collect(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Takes the sampled tokens of the oldest step in flight, `[num_seqs]` in the order of its batch."""
        entries = self._in_flight.popleft()
        for req, token_id in zip(entries, np.asarray(tokens).tolist(), strict=True):
            if req is None or req.state is State.FINISHED:
                continue  # a chunk that yields no token, or the extra token of a request that has ended
            reason = req.append(token_id)
            self._replies.append(Reply(req.request_id, (token_id,), reason, req.cached_tokens))
            if reason is not None:
                self._release(req)

    def take_replies(self) -> list[Reply]:
        """All news since the last call."""
        replies, self._replies = self._replies, []
        return replies

    def flush_cache(self) -> None:
        """Drops every cached prefix that no request uses."""
        self.cache.flush()

    def check(self) -> None:
        """Integrity of requests, rows and pages; raises AssertionError."""
        self.cache.check(req.lease for req in self._admitted.values() if req.lease)
        for req in self._admitted.values():
            assert req.lease is not None and req.state in (State.EXTENDING, State.RUNNING)
            assert (req.state is State.EXTENDING) == (req.request_id in self._extending)
            assert req.can_launch == (req.request_id in self._decoding)
            assert self.cache.pages_for(req.kv_len) <= req.lease.num_pages, f"{req.request_id} lacks pages"
        promised = pages_promised(self._admitted.values(), self.cache)
        assert promised <= self.cache.num_available, f"{promised} pages promised, {self.cache.num_available} left"

    def _enqueue(self, request: Request) -> None:
        try:
            check_request(request, self._capacity.limits)
        except InvalidRequest as error:
            self._replies.append(Reply(request.request_id, error=str(error)))
            return
        seed = request.sampling.seed if request.sampling.seed is not None else self._seeds.getrandbits(32)
        self._waiting.add(Req(request, max_new_tokens(request, self._capacity.limits), self._eos_token_ids, seed))

    def _abort(self, request_id: str) -> None:
        req = self._waiting.get(request_id) or self._admitted.get(request_id)
        if req is None:
            return  # it has ended already
        self._replies.append(Reply(request_id, (), FinishReason.ABORT, req.cached_tokens))
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
        while (waiting := self._waiting.first()) is not None and adder.add_waiting(waiting):
            self._waiting.remove(waiting)
        return adder.chunks

    def _launch_extend(self, chunks: list[Chunk]) -> StepInputs:
        works: list[Work] = []
        entries: list[Req | None] = []
        for chunk in chunks:
            req, start = chunk.req, chunk.req.kv_len
            assert req.lease is not None
            if req.request_id not in self._admitted:
                self._admitted[req.request_id] = req
                self._sampling.set(req.lease.row, req.sampling, req.seed)
            self.cache.grow(req.lease, start + chunk.num_tokens)
            req.launch_chunk(chunk.num_tokens)
            self._file(req)
            last = req.state is State.RUNNING
            works.append(Work(req.lease.row, req.prompt_ids[start : req.kv_len], start, last))
            entries.append(req if last else None)
        inputs = self._builder.extend(works)
        self._in_flight.append(entries)
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
        self._in_flight.append(list(reqs))
        for req in reqs:
            req.launch_decode()
            if not req.can_launch:
                self._file(req)
        return inputs

    def _file(self, req: Req) -> None:
        """Keeps the sets by state in step with the request's state."""
        for reqs, belongs in ((self._extending, req.state is State.EXTENDING), (self._decoding, req.can_launch)):
            if belongs:
                reqs[req.request_id] = req
            else:
                reqs.pop(req.request_id, None)

    def _release(self, req: Req) -> None:
        """Ends a request in whatever state it is; what it computed stays in the prefix cache."""
        self._waiting.remove(req)
        stored = req.stored_ids()
        lease = req.finish()
        self._file(req)
        if lease is not None:
            del self._admitted[req.request_id]
            self.cache.release(lease, stored)
