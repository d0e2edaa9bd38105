"""Fakes that are real implementations: an engine whose KV cache holds token ids, and a mailbox that is a script.

`FakeEngine` writes each token at its slot and rebuilds every sequence through its own page table, of which it knows no
more than steps tell; the next token is a hash of the rebuilt sequence. A stale page, a change that was not sent, a
wrong slot, an early eviction or a use after free therefore changes the tokens. `next_token` of the plain sequence is
the oracle for chunking, caching and overlap alike. With snapshots it keeps a hash of its tokens for each place of a
state, and refuses a sequence whose state is that of other tokens. It holds the tables of logit edits too, as the host
set them and steps moved them, and compares them with the sequence that it rebuilt.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsgl.batch.buckets import Capacity
from jaxsgl.batch.engine_api import EngineOp, Gather, GatherRows, HostPages, PageLayout, PlaceAdapter, RestoreRows
from jaxsgl.batch.inputs import StepArrays, StepFeatures, StepInputs
from jaxsgl.batch.outputs import NO_OUTPUTS, HostOutputs, StepOutputs
from jaxsgl.batch.sampling import EDITS_LEN, IDS, PENALTIES, SCORED, UNTIL, VALUES, neutral_edits
from jaxsgl.cache.pages import IntArray
from jaxsgl.config.engine import DEFAULT_WEIGHT_VERSION
from jaxsgl.errors import CheckpointError
from jaxsgl.messages.orders import MemoryTag, News, Shutdown, ToEngine
from jaxsgl.messages.replies import Load, Replies, Reply
from jaxsgl.scheduler.policy import in_order_of_loss
from jaxsgl.scheduler.req import Req
from jaxsgl.scheduler.state import SchedulerState
from jaxsgl.testing.device import FakeAdapters, FakeImages, FakePageTable, FakePool, FakeStates
from jaxsgl.testing.grammars import masked_tokens
from jaxsgl.testing.outputs import FakeStep, outputs_of

NUM_DRAFTS = 5  # after a step that drafts


def next_token(sequence: Sequence[int] | IntArray, vocab_size: int, seed: int = 0) -> int:
    """The token that `FakeEngine` yields after `sequence`; `seed` is that of the weights which computed its KV."""
    return zlib.crc32(np.asarray(sequence, dtype=np.int32).tobytes(), seed) % vocab_size


def seed_of(weights: Sequence[int] | IntArray) -> int:
    """The seed of KV that was computed by `weights`, token by token; 0 if all is of the first weights."""
    of_tokens = np.asarray(weights, dtype=np.int32)
    return zlib.crc32(of_tokens.tobytes()) if of_tokens.any() else 0


def state_of(stored: IntArray) -> int:
    """The state of a sequence, of which `stored [n, 3]` is in its pages."""
    return zlib.crc32(np.ascontiguousarray(stored[:, 0], np.int32).tobytes())


def next_allowed(sequence: Sequence[int] | IntArray, banned: Collection[int], vocab_size: int, seed: int = 0) -> int:
    """`next_token`, or the first token behind it that isn't banned."""
    token = next_token(sequence, vocab_size, seed)
    while token in banned:
        token = (token + 1) % vocab_size
    return token


def likely_next(sequence: Sequence[int] | IntArray, count: int, vocab_size: int) -> list[int]:
    """What `FakeEngine` drafts after `sequence`: `next_token`, but another token after every third sequence."""
    known = np.asarray(sequence, dtype=np.int32).tolist()
    for _ in range(count):
        token = next_token(known, vocab_size)
        known.append(token if token % 3 else (token + 1) % vocab_size)
    return known[-count:]


def generate(
    prompt: Sequence[int],
    max_new_tokens: int,
    stop_ids: frozenset[int],
    vocab_size: int,
    min_tokens: int = 0,
    weights: int = 0,
) -> list[int]:
    """What a request must yield that `weights` serve, whatever runs beside it."""
    sequence = list(prompt)
    while len(sequence) < len(prompt) + max_new_tokens:
        banned = stop_ids if len(sequence) < len(prompt) + min_tokens else ()
        sequence.append(next_allowed(sequence, banned, vocab_size, seed_of([weights] * len(sequence))))
        if sequence[-1] in stop_ids:
            break
    return sequence[len(prompt) :]


class FakeHandle:
    """A launched fake step."""

    def __init__(self, run_oldest: Callable[[], None], inputs: StepInputs, ready_at: float) -> None:
        self.inputs = inputs
        self._run_oldest = run_oldest
        self._ready_at = ready_at
        self.result: tuple[npt.NDArray[np.int32], HostOutputs, npt.NDArray[np.int32]] | None = None
        self.masks: npt.NDArray[np.uint32] | None = None

    def choose(self, masks: npt.NDArray[np.uint32]) -> None:
        """Keeps the masks for the time when the step runs."""
        assert self.inputs.masked and self.masks is None
        assert len(masks) == self.inputs.bucket.num_choices
        self.masks = masks

    def tokens(self) -> npt.NDArray[np.int32]:
        """Runs all steps up to this one, in order; waits until the fake device would be done."""
        return self._wait()[0]

    def outputs(self) -> HostOutputs:
        """Likewise."""
        return self._wait()[1]

    def drafts(self) -> npt.NDArray[np.int32]:
        """Likewise; see `likely_next`."""
        assert self.inputs.drafts, "the step was not to draft"
        return self._wait()[2]

    def _wait(self) -> tuple[npt.NDArray[np.int32], HostOutputs, npt.NDArray[np.int32]]:
        while self.result is None:
            self._run_oldest()
        delay = self._ready_at - time.perf_counter()
        if delay > 0:
            time.sleep(delay)
        return self.result


class FakeEngine:
    """A `ServedEngine` without a model, and its own `WeightStore`.

    Steps run as late as possible, so that inputs changed meanwhile would show.

    Its weights are a number, 0 at first, which the KV of each token remembers: tokens of KV that is not all of the same
    weights differ from those of any weights. An adapter makes other weights of them.

    Args:
      capacity: sizes of the pool and rows.
      step_s: how long the fake device takes for a step, in seconds.

    Attributes:
      profiles: for each profile, its folder and how many steps were submitted while it was recorded; the last one is
        being recorded if `recording`.
      adapters: an `AdapterStore` and the columns on the device.
    """

    recompiles = 0

    def __init__(self, capacity: Capacity, step_s: float = 0.0) -> None:
        self._capacity = capacity
        self._step_s = step_s
        self._free_at = 0.0
        self._pool = FakePool(capacity)
        self._table = FakePageTable(capacity)
        self._images = FakeImages(capacity.tower)
        self._states = FakeStates(capacity) if capacity.num_snapshots else None
        self._last_tokens: IntArray = np.zeros(capacity.num_rows + 1, dtype=np.int32)
        self._edits = np.tile(neutral_edits(), (capacity.num_rows + 1, 1))
        self._counts: IntArray = np.zeros((capacity.num_rows + 1, capacity.vocab_size), dtype=np.int32)
        self.adapters = FakeAdapters(capacity)
        self._pending: deque[FakeHandle | tuple[int, EngineOp]] = deque()
        self._gathered: list[tuple[int, HostPages]] = []
        self.profiles: list[tuple[str, int]] = []
        self.recording = False
        self.weight_version = DEFAULT_WEIGHT_VERSION
        self.released: frozenset[MemoryTag] = frozenset()
        self.may_load = threading.Event()
        self.may_load.set()
        self._weights = self._num_updates = 0

    def submit(self, inputs: StepInputs) -> FakeHandle:
        """Queues a step behind the ones before."""
        assert not self.released, "a step needs memory that is released"
        self._free_at = max(self._free_at, time.perf_counter()) + self._step_s
        handle = FakeHandle(self.run_oldest, inputs, self._free_at)
        last = self._pending[-1] if self._pending else None
        assert not isinstance(last, FakeHandle) or last.masks is not None or not last.inputs.masked, "masks came late"
        self._pending.append(handle)
        if self.recording:
            folder, num_steps = self.profiles[-1]
            self.profiles[-1] = folder, num_steps + 1
        return handle

    @property
    def weight_store(self) -> FakeEngine:
        """Itself."""
        return self

    @property
    def page_layout(self) -> PageLayout:
        """That of a page of tokens."""
        return self._pool.layout

    def apply(self, op: EngineOp, number: int) -> None:
        """Queues an operation on pages behind the steps before."""
        of_rows = isinstance(op, GatherRows | RestoreRows)
        assert of_rows or MemoryTag.KV_CACHE not in self.released, "an operation needs the pool, which is released"
        self._pending.append((number, op))

    def poll(self, wait: bool = False) -> list[tuple[int, npt.NDArray[Any]]]:
        """Gathers before which no step is left to run."""
        self._run_ops()
        gathered, self._gathered = self._gathered, []
        assert gathered or not wait, "nothing is gathered, or a step that must be collected comes first"
        return gathered

    def start_profile(self, folder: str) -> None:
        """Counts steps from now on. Raises OSError for the folder "/unwritable"."""
        if folder == "/unwritable":
            raise PermissionError(f"{folder} can't be written")
        assert not self.recording
        self.recording = True
        self.profiles.append((folder, 0))

    def stop_profile(self) -> None:
        """Stops counting."""
        assert self.recording
        self.recording = False

    def stage_weights(self, folder: str | None) -> object:
        """The weights that the last character of `folder` names, once they may be loaded.

        Raises `CheckpointError` if it is no digit.
        """
        self.may_load.wait()
        if folder is None:
            return self._weights
        if not folder[-1].isdigit():
            raise CheckpointError(f"{folder} holds no weights")
        return int(folder[-1])

    def swap_weights(self, staged: object, version: str | None) -> None:
        """Serves `staged` weights."""
        self._run_ops()
        assert isinstance(staged, int) and not self._pending
        self._weights = staged
        self._num_updates += 1
        self.weight_version = str(self._num_updates) if version is None else version
        self.released -= {MemoryTag.WEIGHTS}

    def release_memory(self, tag: MemoryTag) -> None:
        """Refuses steps."""
        self._run_ops()
        assert not self._pending
        self.released |= {tag}
        if tag is MemoryTag.KV_CACHE:
            self._pool.clear()

    def resume_memory(self, tag: MemoryTag, staged: object) -> None:
        """Takes steps again, if all is back."""
        self.released -= {tag}

    def run_oldest(self) -> None:
        """Runs the oldest step that has not run yet, after the operations before it."""
        self._run_ops()
        handle = self._pending.popleft()
        assert isinstance(handle, FakeHandle)
        assert handle.inputs.masked == (handle.masks is not None), "the masks came late, or for nothing"
        tokens, outputs = self._step(handle.inputs, handle.masks)
        handle.result = tokens, outputs, self._drafts(handle.inputs, tokens)

    def _run_ops(self) -> None:
        """Runs operations on pages up to the next step."""
        while self._pending and not isinstance(first := self._pending[0], FakeHandle):
            number, op = first
            self._pending.popleft()
            if isinstance(op, PlaceAdapter):
                self.adapters.place(op)
            elif isinstance(op, Gather):
                self._gathered.append((number, self._pool.gather(op.pages)))
            elif isinstance(op, GatherRows):
                self._gathered.append((number, self._images.gather(op)))
            elif isinstance(op, RestoreRows):
                self._images.restore(op)
            else:
                self._pool.insert(op.pages, op.data)

    def _step(
        self, inputs: StepInputs, masks: npt.NDArray[np.uint32] | None
    ) -> tuple[npt.NDArray[np.int32], HostOutputs]:
        arrays = inputs.arrays
        self._table.update(inputs)
        if arrays.steps is not None:
            return self._several_steps(inputs, arrays.steps), NO_OUTPUTS
        ids = np.where(arrays.token_ids < 0, self._last_tokens[~np.minimum(arrays.token_ids, -1)], arrays.token_ids)
        ids = self._images.embedded(ids, inputs, self._weights)
        self._pool.store(arrays.slots, ids, arrays.positions, self.adapters.weights(self._weights, arrays))
        stored = [self._rebuilt(inputs, arrays, s) for s in range(inputs.num_seqs)]
        if self._states is not None and inputs.bucket.kind != "verify":
            self._check_states(self._states, inputs, ids, stored)
        sequences = [np.ascontiguousarray(of_seq[:, 0]) for of_seq in stored]
        chosen_after = _places(stored, arrays.query_offsets) if inputs.bucket.kind == "verify" else stored
        rows = self._edit_rows(inputs, [np.ascontiguousarray(of_seq[:, 0]) for of_seq in chosen_after])
        tokens = np.zeros(inputs.bucket.num_choices, dtype=np.int32)
        for c, (row, of_seq) in enumerate(zip(rows, chosen_after, strict=True)):
            sequence = np.ascontiguousarray(of_seq[:, 0])
            banned, seed = self._banned(row, len(sequence)), seed_of(of_seq[:, 2])
            if masks is not None:
                banned += masked_tokens(masks[c], self._capacity.vocab_size)
            tokens[c] = next_allowed(sequence, banned, self._capacity.vocab_size, seed)
            self._counts[row, tokens[c]] += 2
        chosen = tokens[: inputs.num_choices]
        outputs = outputs_of(FakeStep(self._capacity, inputs, arrays, sequences, chosen, self._edits[rows][:, SCORED]))
        if inputs.bucket.kind == "verify":
            kept = self._kept(inputs, ids, chosen)
            if self._states is not None:
                self._settle(self._states, inputs, ids, stored, kept)
            return kept, outputs
        self._last_tokens[arrays.sample_rows] = tokens
        return chosen, outputs

    def _kept(self, inputs: StepInputs, ids: IntArray, chosen: IntArray) -> IntArray:
        """`chosen` tokens of a verify step, -1 for those after a draft, of `ids`, that was not chosen."""
        kept, arrays = chosen.copy(), inputs.arrays
        for s in range(inputs.num_seqs):
            first, end = arrays.query_offsets[s : s + 2].tolist()
            last = first
            while last + 1 < end and chosen[last] == ids[last + 1]:
                last += 1
            kept[last + 1 : end] = -1
            assert arrays.rows[s] == arrays.sample_rows[s] != self._capacity.num_rows
            self._last_tokens[arrays.rows[s]] = chosen[last]
        return kept

    def _drafts(self, inputs: StepInputs, tokens: IntArray) -> IntArray:
        """`[num_seqs, NUM_DRAFTS]` after the newest token of each sequence; 0 where none is kept."""
        drafts, arrays = np.zeros((inputs.num_seqs, NUM_DRAFTS), np.int32), inputs.arrays
        for s in range(inputs.num_seqs if inputs.drafts else 0):
            row, length = arrays.sample_rows[s], int(arrays.lengths[s])
            if row == self._capacity.num_rows:
                continue
            if inputs.bucket.kind == "verify":
                first, end = arrays.query_offsets[s : s + 2].tolist()
                length -= int((tokens[first:end] < 0).sum())
            stored = self._pool.read(self._table.slots(row, length))[:, 0]
            drafts[s] = likely_next([*stored, self._last_tokens[row]], NUM_DRAFTS, self._capacity.vocab_size)
        return drafts

    def _several_steps(self, inputs: StepInputs, steps: IntArray) -> npt.NDArray[np.int32]:
        """Tokens of each step, one after the other; -1 where a sequence takes no part any more."""
        tokens = np.full((inputs.bucket.num_steps, inputs.num_seqs), -1, dtype=np.int32)
        for i in range(inputs.bucket.num_steps):
            for s in np.flatnonzero(steps > i).tolist():
                tokens[i, s] = self._decode_one(inputs.arrays, s, i)
        return tokens

    def _decode_one(self, arrays: StepArrays[npt.NDArray[Any]], s: int, i: int) -> int:
        row, position = arrays.rows[s], arrays.positions[s] + i
        assert row == arrays.sample_rows[s] == ~arrays.token_ids[s] != self._capacity.num_rows
        self._table.note(row, position, arrays.slots[i, s])
        slots = self._table.slots(row, position + 1)
        weights = self.adapters.weights(self._weights, arrays)
        self._pool.store(slots[-1:], self._last_tokens[row : row + 1], position[None], weights[s : s + 1])
        stored = self._pool.read(slots)
        assert (stored[:, 1] == np.arange(position + 1)).all(), f"sequence {s} reads a foreign page"
        if self._states is not None:
            state = self._states.decode(arrays, s, position, int(stored[-1, 0]))
            assert state == state_of(stored), f"row {row} has the state of other tokens"
        self._last_tokens[row] = next_token(stored[:, 0], self._capacity.vocab_size, seed_of(stored[:, 2]))
        return int(self._last_tokens[row])

    def _rebuilt(self, inputs: StepInputs, arrays: StepArrays[npt.NDArray[Any]], s: int) -> IntArray:
        """Token ids, positions and weights of sequence s, as the page table says."""
        length = int(arrays.lengths[s])
        first, end = arrays.query_offsets[s : s + 2]
        assert end > first, f"sequence {s} of {inputs.bucket} has no token to compute, so no logits"
        assert arrays.positions[first:end].tolist() == list(range(length - (end - first), length))
        stored = self._pool.read(self._table.slots(arrays.rows[s], length))
        assert (stored[:, 1] == np.arange(length)).all(), f"sequence {s} of {inputs.bucket} reads a foreign page"
        return stored

    def _check_states(self, states: FakeStates, inputs: StepInputs, ids: IntArray, stored: Sequence[IntArray]) -> None:
        """Moves the states over the step's tokens: each must be that of the sequence that the page table names."""
        arrays = inputs.arrays
        for s, of_seq in enumerate(stored):
            first, end = arrays.query_offsets[s : s + 2].tolist()
            if inputs.bucket.kind == "decode":
                state = states.decode(arrays, s, int(arrays.positions[s]), int(ids[s]))
            else:
                state = states.extend(arrays, s, np.ascontiguousarray(ids[first:end], np.int32))
            assert state == state_of(of_seq), f"sequence {s} of {inputs.bucket} has the state of other tokens"

    def _settle(
        self, states: FakeStates, inputs: StepInputs, ids: IntArray, stored: Sequence[IntArray], kept: IntArray
    ) -> None:
        """Moves the states over the tokens of a verify step that stand, as many as `kept` are chosen after."""
        arrays = inputs.arrays
        for s, of_seq in enumerate(stored):
            first, end = arrays.query_offsets[s : s + 2].tolist()
            num_standing = int((kept[first:end] >= 0).sum())
            state = states.extend(arrays, s, np.ascontiguousarray(ids[first:end], np.int32), num_standing)
            left = len(of_seq) - (end - first) + num_standing
            assert state == state_of(of_seq[:left]), f"sequence {s} of {inputs.bucket} has the state of other tokens"

    def _banned(self, row: int, position: int) -> list[int]:
        """Tokens that may not stand at `position`."""
        if row == self._capacity.num_rows:
            return []
        edits = self._edits[row]
        where = (edits[VALUES].view(np.float32) == -np.inf) & (position < edits[UNTIL])
        banned: list[int] = edits[IDS][where].tolist()
        return banned

    def _edit_rows(self, inputs: StepInputs, sequences: Sequence[IntArray]) -> list[int]:
        """Sets the rows that the batch brings; every row with penalties must then have counted its whole sequence."""
        dummy_row = self._capacity.num_rows
        if inputs.features is None:
            return [dummy_row] * len(sequences)
        for setup in inputs.features.row_setups:
            self._edits[setup[0]], self._counts[setup[0]] = setup[1 : 1 + EDITS_LEN], setup[1 + EDITS_LEN :]
        rows: list[int] = inputs.features.edit_rows[: len(sequences)].tolist()
        for row, sequence in zip(rows, sequences, strict=True):
            if (self._edits[row][PENALTIES] != neutral_edits()[PENALTIES]).any():  # else nothing reads its counts
                counted = np.flatnonzero(self._counts[row])
                assert counted.tolist() == sorted(set(sequence.tolist())), f"row {row} counts a foreign sequence"
        return rows


def _places(stored: Sequence[IntArray], query_offsets: IntArray) -> list[IntArray]:
    """What is `stored` of each sequence up to each of its tokens in the step, that one included."""
    counts = np.diff(query_offsets).tolist()
    return [
        of_seq[: end + 1]
        for of_seq, count in zip(stored, counts, strict=False)
        for end in range(len(of_seq) - count, len(of_seq))
    ]


class FakeRanksHandle(FakeHandle):
    """A launched fake step of several ranks, with those `of_ranks`; None: a rank takes no part."""

    def __init__(
        self,
        run_oldest: Callable[[], None],
        inputs: StepInputs,
        ready_at: float,
        of_ranks: Sequence[FakeHandle | None],
    ) -> None:
        super().__init__(run_oldest, inputs, ready_at)
        self.of_ranks = of_ranks

    def choose(self, masks: npt.NDArray[np.uint32]) -> None:
        """Gives each rank its masks."""
        own = np.split(masks, len(self.of_ranks))
        for part, masks_of_rank in zip(self.of_ranks, own, strict=True):
            if part is not None and part.inputs.masked:
                part.choose(masks_of_rank)
        self.masks = masks


class FakeRanks(FakeEngine):
    """The engine of several ranks: a `FakeEngine` for each one, with pages and rows of its own.

    Args:
      capacity: of each rank.
      num_ranks: R.
      step_s: how long the fake device takes for a step, in seconds.
    """

    def __init__(self, capacity: Capacity, num_ranks: int, step_s: float = 0.0) -> None:
        super().__init__(capacity, step_s)
        self._ranks = [FakeEngine(capacity) for _ in range(num_ranks)]

    def submit(self, inputs: StepInputs) -> FakeHandle:
        """Queues a step of all ranks behind the ones before; a rank's part of the arrays goes to its engine."""
        assert inputs.num_tokens <= inputs.padded_tokens, "MLPs lack places for the tokens of all ranks"
        handle = super().submit(inputs)
        self._pending.pop()
        parts = [_as_sent(inputs, rank, self._capacity.num_rows) for rank in range(len(self._ranks))]
        handles = [
            engine.submit(part) if part.num_seqs else None for engine, part in zip(self._ranks, parts, strict=True)
        ]
        of_ranks = FakeRanksHandle(self.run_oldest, inputs, handle._ready_at, handles)
        self._pending.append(of_ranks)
        return of_ranks

    def run_oldest(self) -> None:
        """Runs the oldest step that has not run yet, in all ranks that take part."""
        handle = self._pending.popleft()
        assert isinstance(handle, FakeRanksHandle)
        assert handle.inputs.masked == (handle.masks is not None), "the masks came late, or for nothing"
        tokens = [part.tokens() for part in handle.of_ranks if part is not None]
        outputs = [part.outputs() for part in handle.of_ranks if part is not None]
        handle.result = np.concatenate(tokens), _side_by_side(outputs), np.zeros((0, 0), np.int32)

    def swap_weights(self, staged: object, version: str | None) -> None:
        """Serves `staged` weights in all ranks."""
        super().swap_weights(staged, version)
        for engine in self._ranks:
            engine.swap_weights(staged, version)

    def release_memory(self, tag: MemoryTag) -> None:
        """Refuses steps."""
        super().release_memory(tag)
        for engine in self._ranks:
            engine.release_memory(tag)

    def resume_memory(self, tag: MemoryTag, staged: object) -> None:
        """Takes steps again, if all is back."""
        super().resume_memory(tag, staged)
        for engine in self._ranks:
            engine.resume_memory(tag, staged)


def _as_sent(inputs: StepInputs, rank: int, dummy_row: int) -> StepInputs:
    """The batch of a rank as its devices get it: cut out of the arrays of all, which must say no more than its own."""
    num_ranks, own = len(inputs.of_ranks), inputs.of_ranks[rank]
    features = None
    if inputs.features is not None:
        edit_rows, *setups = (
            np.split(array, num_ranks)[rank] for array in (inputs.features.edit_rows, *inputs.features.row_setups)
        )
        setups = [setup for setup in setups if setup[0] != dummy_row]
        features = StepFeatures(edit_rows, tuple(setups), inputs.features.logprobs)
    changes = tuple(np.split(array, num_ranks, axis=1)[rank] for array in inputs.table_changes)
    sent = replace(own, packed=np.split(inputs.packed, num_ranks)[rank], features=features, table_changes=changes)
    assert own.num_seqs or not (sent.arrays.lengths.any() or sent.arrays.slots.any()), "a rank without a batch computes"
    return sent


def _side_by_side(parts: Sequence[HostOutputs]) -> HostOutputs:
    """What the ranks of a step yield, one after the other."""
    return StepOutputs(*(None if arrays[0] is None else np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


class RetractEvery:
    """Names a running request to retract at every so-many-th step, whether pages are short or not.

    Only a request that has got further since its admission, so that all requests end nevertheless.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def __call__(self, view: SchedulerState) -> list[Req]:
        """The request to retract before the next step, if any. Reads only."""
        if (view.totals.steps + 1) % self._num_steps:
            return []
        decoding = view.requests.decoding.values()
        got_further = [req for req in decoding if req.prompt_len + len(req.output_ids) > req.extend_to]
        return in_order_of_loss(got_further, lambda req: 0)[:1]


class ScriptedMailbox:
    """A `Mailbox` that delivers `script[i]` at the i-th call and then, when all is said and done, `Shutdown`.

    Args:
      script: messages by call.
      host_work_s: how long every call keeps the host busy, in seconds.

    Attributes:
      replies: all of them, in order.
      loads: one of each turn of the loop.
      other_news: answers and cache events, in order.
      num_calls: of `receive`.
    """

    def __init__(self, script: Sequence[Sequence[ToEngine]], host_work_s: float = 0.0) -> None:
        self._script = deque(script)
        self._host_work_s = host_work_s
        self.replies: list[Reply] = []
        self.loads: list[Load] = []
        self.other_news: list[News] = []
        self.num_calls = 0

    def receive(self, wait_s: float) -> list[ToEngine]:
        """The next entry of the script; `Shutdown` once the loop would wait and the script has ended."""
        self.num_calls += 1
        busy_until = time.perf_counter() + self._host_work_s
        while time.perf_counter() < busy_until:
            pass
        if self._script:
            return list(self._script.popleft())
        return [Shutdown()] if wait_s else []

    def send(self, news: News) -> None:
        """Keeps the replies, and what else was said."""
        if isinstance(news, Replies):
            self.replies.extend(news.replies)
            self.loads.append(news.load)
        else:
            self.other_news.append(news)

    def output_ids(self, request_id: str) -> list[int]:
        """All tokens of one request so far."""
        return [token for reply in self.replies if reply.request_id == request_id for token in reply.token_ids]
