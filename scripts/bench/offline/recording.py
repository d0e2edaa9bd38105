"""Time stamps of a run of the serving loop, taken between the loop and its engine.

`RecordingEngine` is a `ServedEngine` that passes every call on, and stamps when the loop submits a step and when it
waits for one. The mailbox (`RecordedMailbox` in run.py) stamps where turns begin and messages are sent. A step may
become ready while the loop computes: a thread waits for such steps and stamps when it saw them ready; the loop's own
reading counts if it comes first. The thread learns of a step when the loop is about to wait for the step before, since
waking the thread at another time would cost the loop up to 100 us. The time that recording takes is stamped too, so
that no figure contains it. Knows no figures.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from jaxsgl.batch.engine_api import PageLayout, StepHandle
from jaxsgl.batch.inputs import Bucket, StepInputs, layout
from jaxsgl.batch.outputs import HostOutputs
from jaxsgl.scheduler.served_engine import ServedEngine

StepKind: TypeAlias = Literal["decode", "extend", "mixed", "score", "verify"]
SWITCH_S = 20e-6  # how long the loop's thread keeps the interpreter while the watching thread waits for it


@dataclass(slots=True, eq=False)
class Step:
    """One step. Times are seconds of `time.perf_counter`.

    Attributes:
      kind: "mixed" is an extend step in which sequences decode.
      bucket, num_seqs, num_tokens: see `StepInputs`.
      lengths: `[num_seqs]` KV tokens of each sequence, those of this step included.
      new: `[num_seqs]` tokens that each sequence computes; of a program of several steps, in all of them.
      submitted_s: when `submit` returned.
      read_from_s, read_s: when the loop began to wait for the tokens, and when it had them.
      seen_s: when the watching thread saw that the step was ready.
    """

    kind: StepKind
    bucket: Bucket
    num_seqs: int
    num_tokens: int
    lengths: npt.NDArray[np.int32]
    new: npt.NDArray[np.int32]
    submitted_s: float
    read_from_s: float = 0.0
    read_s: float = 0.0
    seen_s: float = float("inf")

    @property
    def ready_s(self) -> float:
        """When the step was first seen to be ready."""
        return min(self.seen_s, self.read_s)

    @property
    def waited_s(self) -> float:
        """Seconds that the loop waited for the step; 0 if it was ready before."""
        return self.read_s - self.read_from_s if self.ready_s > self.read_from_s else 0.0


@dataclass(slots=True, eq=False)
class Turn:
    """One turn of the loop: receive, launch, submit, collect, send. Stamps of parts that did not run are None.

    Attributes:
      begin_s, end_s: begin and end; the time that recording takes between turns is outside of both turns.
      begin_cpu_s, end_cpu_s: CPU seconds of the thread.
      received_s, submit_s, submitted_s, send_s, sent_s: in this order.
      recording_s: seconds that recording took between `submitted_s` and `send_s`.
      submitted, read: the step that was launched, and the steps whose tokens were read.
    """

    begin_s: float
    begin_cpu_s: float
    end_s: float = 0.0
    end_cpu_s: float = 0.0
    received_s: float = 0.0
    submit_s: float | None = None
    submitted_s: float | None = None
    recording_s: float = 0.0
    send_s: float = 0.0
    sent_s: float = 0.0
    submitted: Step | None = None
    read: list[Step] = field(default_factory=list)


class Recording:
    """All stamps of one run of the loop, in order. Used by the loop's thread; `close` ends the watching thread."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.turns: list[Turn] = []
        self.watching_cpu_s = 0.0  # CPU of the watching thread
        self._unwatched: list[tuple[Step, StepHandle]] = []
        self._to_watch: queue.SimpleQueue[tuple[Step, StepHandle] | None] = queue.SimpleQueue()
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._watching = threading.Thread(target=self._watch, name="watch-steps")
        self._watching.start()

    def turn_begins(self) -> None:
        """Notes that the loop asks for messages: the turn before has ended."""
        now_s, cpu_s = time.perf_counter(), time.thread_time()
        self._watch_but(None)
        if self.turns:
            self.turns[-1].end_s, self.turns[-1].end_cpu_s = now_s, cpu_s
        self.turns.append(Turn(0.0, 0.0))
        self.turns[-1].begin_cpu_s, self.turns[-1].begin_s = time.thread_time(), time.perf_counter()

    def submitted(self, inputs: StepInputs, handle: StepHandle, begin_s: float, end_s: float) -> Step:
        """Notes a step whose `submit` ran from `begin_s` to `end_s`."""
        lengths, offsets = _field(inputs, "lengths"), _field(inputs, "query_offsets")
        step = Step(_kind(inputs), inputs.bucket, inputs.num_seqs, inputs.num_tokens, lengths, offsets, end_s)
        if inputs.bucket.num_steps > 1:
            step.new = _field(inputs, "steps")
            step.lengths += step.new - 1
        else:
            step.new = np.ones_like(lengths) if step.kind == "decode" else np.diff(offsets)
        self.steps.append(step)
        self._unwatched.append((step, handle))
        turn = self.turns[-1]
        turn.submitted, turn.submit_s, turn.submitted_s = step, begin_s, end_s
        turn.recording_s += time.perf_counter() - end_s
        return step

    def reading(self, step: Step) -> None:
        """Notes that the loop is about to wait for `step`."""
        begin_s = time.perf_counter()
        self._watch_but(step)
        step.read_from_s = time.perf_counter()
        self.turns[-1].recording_s += step.read_from_s - begin_s

    def read(self, step: Step) -> None:
        """Notes that the loop has the tokens of `step`."""
        step.read_s = time.perf_counter()
        self.turns[-1].read.append(step)

    def close(self) -> None:
        """Waits for the watching thread, and drops turns that neither submitted nor read a step."""
        self._to_watch.put(None)
        self._watching.join()
        sys.setswitchinterval(self._switch_s)
        self.turns = [turn for turn in self.turns if turn.end_s and (turn.submitted or turn.read)]

    def _watch_but(self, read: Step | None) -> None:
        """Makes the watching thread wait for all steps except the one that the loop itself waits for."""
        for step, handle in self._unwatched:
            if step is not read:
                self._to_watch.put((step, handle))
        self._unwatched.clear()

    def _watch(self) -> None:
        while (watched := self._to_watch.get()) is not None:
            step, handle = watched
            handle.tokens()
            step.seen_s = time.perf_counter()
        self.watching_cpu_s = time.thread_time()


class RecordedHandle:
    """The handle of a step; reading its tokens is stamped."""

    def __init__(self, handle: StepHandle, step: Step, recording: Recording) -> None:
        self._handle, self._step, self._recording = handle, step, recording

    def tokens(self) -> npt.NDArray[np.int32]:
        """See `StepHandle`."""
        self._recording.reading(self._step)
        tokens = self._handle.tokens()
        self._recording.read(self._step)
        return tokens

    def outputs(self) -> HostOutputs:
        """See `StepHandle`."""
        return self._handle.outputs()

    def drafts(self) -> npt.NDArray[np.int32]:
        """See `StepHandle`."""
        return self._handle.drafts()


class RecordingEngine:
    """A `ServedEngine` that records the steps of another one."""

    def __init__(self, engine: ServedEngine, recording: Recording) -> None:
        self._engine, self._recording = engine, recording
        self.weight_store, self.adapters = engine.weight_store, engine.adapters
        self.apply, self.poll = engine.apply, engine.poll
        self.start_profile, self.stop_profile = engine.start_profile, engine.stop_profile

    def submit(self, inputs: StepInputs) -> RecordedHandle:
        """See `StepEngine`."""
        begin_s = time.perf_counter()
        handle = self._engine.submit(inputs)
        end_s = time.perf_counter()
        return RecordedHandle(handle, self._recording.submitted(inputs, handle, begin_s, end_s), self._recording)

    @property
    def recompiles(self) -> int:
        """See `StepEngine`."""
        return self._engine.recompiles

    @property
    def page_layout(self) -> PageLayout:
        """See `PageEngine`."""
        return self._engine.page_layout


def _kind(inputs: StepInputs) -> StepKind:
    kind = inputs.bucket.kind
    if kind != "extend":
        return kind
    first, _ = layout(inputs.bucket)["token_ids"]
    return "mixed" if (inputs.packed[first : first + inputs.num_tokens] < 0).any() else "extend"


def _field(inputs: StepInputs, name: str) -> npt.NDArray[np.int32]:
    """A copy of the real entries of a field that has one entry per sequence (offsets: one more)."""
    first, _ = layout(inputs.bucket)[name]
    return inputs.packed[first : first + inputs.num_seqs + (name == "query_offsets")].copy()
