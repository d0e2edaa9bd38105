"""Carries out what was decided for a step: allocates pages, moves the requests' lengths, builds the batch.

The only place where an admitted request's lengths grow. Decides nothing; called by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.build import Work
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.sampling import SamplingRows
from jaxsgl.cache.manager import CacheManager
from jaxsgl.cache.pages import IntArray
from jaxsgl.scheduler.admit import Chunk
from jaxsgl.scheduler.launched import Launched, ScoredChunk
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.running import Running
from jaxsgl.scheduler.states import State


class Builder(Protocol):
    """What makes steps of decisions; `BatchBuilder` is the real one."""

    def decode(self, rows: IntArray, positions: IntArray, steps: IntArray | None = None) -> StepInputs:
        """One token for each row `[S]`, stored at `positions [S]`; or `steps [S]` from there on, in several steps."""
        ...

    def extend(self, works: Sequence[Work]) -> StepInputs:
        """Several tokens for each of `works`."""
        ...


MakeBuilder: TypeAlias = Callable[[BucketSet, IntArray, SamplingRows, int], Builder]  # as `BatchBuilder.__init__`


class Launcher:
    """Turns decisions into batches.

    Args:
      cache, builder, sampling, running: the scheduler's.
      vocab_size: of the model.
    """

    def __init__(
        self, cache: CacheManager, builder: Builder, sampling: SamplingRows, running: Running, vocab_size: int
    ) -> None:
        self._cache = cache
        self._builder = builder
        self._sampling = sampling
        self._running = running
        self._vocab_size = vocab_size

    def extend(self, chunks: Sequence[Chunk], riders: Sequence[Req]) -> tuple[StepInputs, Launched]:
        """A step that extends `chunks` and decodes one token of each of `riders`."""
        works: list[Work] = []
        scored: list[ScoredChunk] = []
        first = 0
        for chunk in chunks:
            req, start = chunk.req, chunk.req.kv_len
            works.append(self._extend(chunk))
            if req.scores_prompt:
                scored.append(ScoredChunk(req, req.lease_number, first, chunk.num_tokens, start))
            first += chunk.num_tokens
        works += [self._ride(req) for req in riders]
        inputs = self._builder.extend(works)
        for chunk in chunks:  # only now: no request of a batch may count on KV that the same batch computes
            assert chunk.req.lease is not None
            self._cache.share(chunk.req.lease, chunk.req.stored_ids())
        mute = frozenset(chunk.req for chunk in chunks if chunk.req.state is State.EXTENDING)
        kv_tokens = sum(work.start + len(work.token_ids) for work in works)
        pairs = sum(len(work.token_ids) * (work.start + (len(work.token_ids) + 1) / 2) for work in works)
        return inputs, Launched([*(chunk.req for chunk in chunks), *riders], kv_tokens, pairs, mute, scored)

    def decode(self, reqs: Sequence[Req], num_steps: int = 1) -> tuple[StepInputs, Launched]:
        """A step that decodes one token of each of `reqs`; or several, as many as each may still have."""
        counts = [1] * len(reqs) if num_steps == 1 else [min(num_steps, req.num_left) for req in reqs]
        for req, count in zip(reqs, counts, strict=True):
            assert req.lease is not None
            self._cache.grow(req.lease, req.kv_len + count)
        rows = np.fromiter((req.lease.row for req in reqs if req.lease), np.int32, len(reqs))
        positions = np.fromiter((req.kv_len for req in reqs), np.int32, len(reqs))
        steps = np.array(counts, dtype=np.int32)
        inputs = self._builder.decode(rows, positions, steps if num_steps > 1 else None)
        for req, count in zip(reqs, counts, strict=True):
            self._launch_decode(req, count)
        return inputs, Launched(reqs, int((steps * (2 * positions + steps + 1)).sum()) // 2)

    def _extend(self, chunk: Chunk) -> Work:
        req, start = chunk.req, chunk.req.kv_len
        assert req.lease is not None
        self._cache.grow(req.lease, start + chunk.num_tokens)
        token_ids = req.known_ids[start : start + chunk.num_tokens]
        req.launch_chunk(chunk.num_tokens)
        self._running.file(req)
        last = req.state is State.RUNNING
        setup = req.edit_setup(self._vocab_size) if last else None
        if last:
            self._sampling.set(req.lease.row, req.sampling, req.seed)
        return Work(req.lease.row, token_ids, start, last, req.targets(start, req.kv_len), setup)

    def _ride(self, req: Req) -> Work:
        assert req.lease is not None
        row, start = req.lease.row, req.kv_len
        self._cache.grow(req.lease, start + 1)
        self._launch_decode(req)
        return Work(row, np.array([~row], dtype=np.int32), start, True)

    def _launch_decode(self, req: Req, num_tokens: int = 1) -> None:
        req.launch_decode(num_tokens)
        if not req.can_launch:
            self._running.file(req)
