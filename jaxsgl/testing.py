"""Fakes that are real implementations: an engine whose KV cache holds token ids, and a mailbox that is a script.

`FakeEngine` writes each token at its slot and rebuilds every sequence through the page table; the next token is a
hash of the rebuilt sequence. A stale page, a wrong slot, an early eviction or a use after free therefore changes the
tokens. `next_token` of the plain sequence is the oracle for chunking, caching and overlap alike.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxsgl.batch.capacity import Capacity
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.cache.pages import IntArray, slots_of, tokens_in
from jaxsgl.messages import Reply, Shutdown, ToEngine


def next_token(sequence: Sequence[int] | IntArray, vocab_size: int) -> int:
    """The token that `FakeEngine` yields after `sequence`."""
    return zlib.crc32(np.asarray(sequence, dtype=np.int32).tobytes()) % vocab_size


def generate(prompt: Sequence[int], max_new_tokens: int, stop_ids: frozenset[int], vocab_size: int) -> list[int]:
    """What a request must yield, whatever runs beside it."""
    sequence = list(prompt)
    while len(sequence) < len(prompt) + max_new_tokens:
        sequence.append(next_token(sequence, vocab_size))
        if sequence[-1] in stop_ids:
            break
    return sequence[len(prompt) :]


class FakeHandle:
    """A launched fake step."""

    def __init__(self, engine: FakeEngine, inputs: StepInputs, ready_at: float) -> None:
        self.inputs = inputs
        self._engine = engine
        self._ready_at = ready_at
        self.result: npt.NDArray[np.int32] | None = None

    def tokens(self) -> npt.NDArray[np.int32]:
        """Runs all steps up to this one, in order; waits until the fake device would be done."""
        while self.result is None:
            self._engine.run_oldest()
        delay = self._ready_at - time.perf_counter()
        if delay > 0:
            time.sleep(delay)
        return self.result


class FakeEngine:
    """A `StepEngine` without a model. Steps run as late as possible, so that inputs changed meanwhile would show.

    Args:
      capacity: sizes of the pool and rows.
      step_s: how long the fake device takes for a step, in seconds.
    """

    def __init__(self, capacity: Capacity, step_s: float = 0.0) -> None:
        self._capacity = capacity
        self._step_s = step_s
        self._free_at = 0.0
        num_slots = tokens_in(capacity.num_pages, capacity.page_size)
        self._kv: npt.NDArray[np.int32] = np.full((num_slots, 2), -1, dtype=np.int32)  # token id, position
        self._last_tokens: IntArray = np.zeros(capacity.num_rows + 1, dtype=np.int32)
        self._pending: deque[FakeHandle] = deque()

    def submit(self, inputs: StepInputs) -> FakeHandle:
        """Queues a step behind the ones before."""
        self._free_at = max(self._free_at, time.perf_counter()) + self._step_s
        handle = FakeHandle(self, inputs, self._free_at)
        self._pending.append(handle)
        return handle

    def run_oldest(self) -> None:
        """Runs the oldest step that has not run yet."""
        handle = self._pending.popleft()
        handle.result = self._step(handle.inputs)

    def _step(self, inputs: StepInputs) -> npt.NDArray[np.int32]:
        arrays = inputs.arrays
        ids = np.where(arrays.token_ids < 0, self._last_tokens[~np.minimum(arrays.token_ids, -1)], arrays.token_ids)
        self._kv[arrays.slots] = np.stack((ids, arrays.positions), axis=1)
        tokens = np.zeros(inputs.bucket.num_seqs, dtype=np.int32)
        for s in range(inputs.num_seqs):
            length = int(arrays.lengths[s])
            first, end = arrays.query_offsets[s : s + 2]
            assert end > first, f"sequence {s} of {inputs.bucket} has no token to compute, so no logits"
            assert arrays.positions[first:end].tolist() == list(range(length - (end - first), length))
            stored = self._kv[slots_of(arrays.page_table[s], 0, length, self._capacity.page_size)]
            assert (stored[:, 1] == np.arange(length)).all(), f"sequence {s} of {inputs.bucket} reads a foreign page"
            tokens[s] = next_token(np.ascontiguousarray(stored[:, 0]), self._capacity.vocab_size)
        self._last_tokens[arrays.sample_rows] = tokens
        return tokens[: inputs.num_seqs]


class ScriptedMailbox:
    """A `Mailbox` that delivers `script[i]` at the i-th call and then, when all is said and done, `Shutdown`.

    Args:
      script: messages by call.
      host_work_s: how long every call keeps the host busy, in seconds.
    """

    def __init__(self, script: Sequence[Sequence[ToEngine]], host_work_s: float = 0.0) -> None:
        self._script = deque(script)
        self._host_work_s = host_work_s
        self.replies: list[Reply] = []
        self.num_calls = 0

    def receive(self, block: bool) -> list[ToEngine]:
        """The next entry of the script; `Shutdown` once the loop would block and the script has ended."""
        self.num_calls += 1
        busy_until = time.perf_counter() + self._host_work_s
        while time.perf_counter() < busy_until:
            pass
        if self._script:
            return list(self._script.popleft())
        return [Shutdown()] if block else []

    def send(self, replies: Sequence[Reply]) -> None:
        """Keeps the replies."""
        self.replies.extend(replies)

    def output_ids(self, request_id: str) -> list[int]:
        """All tokens of one request so far."""
        return [token for reply in self.replies if reply.request_id == request_id for token in reply.token_ids]
