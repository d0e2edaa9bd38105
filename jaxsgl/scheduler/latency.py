"""Bounds the time between two tokens of a running request (`--max-itl-ms`): measures steps, and sizes extend steps.

In mixed steps, the extend step has to end within the bound; otherwise a decode step follows every extend step, and both
together have to. Steps without a prompt are not bounded. `StepTimes` learns how long a step takes:

    seconds <= base[T] + kv_token x KV + pair x pairs

T: tokens, padding included; KV: tokens whose keys and values are read; pairs: (token, token that it attends to). What
varies between steps of one T is attention, so its two coefficients come from there, by least squares. base[T] is the
rest of the second slowest recent step: a bound, not a mean, that a new T inherits from its neighbours.

Exists only where the flag is set, in place of `Timing`. planner.py asks it for budgets; apply.py reports steps to it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.build import Work
from jaxsgl.batch.inputs import Bucket, StepInputs
from jaxsgl.cache.pages import IntArray
from jaxsgl.scheduler.budget import Claim, Timing, TokenBudget
from jaxsgl.scheduler.req import Req

WINDOW = 64  # steps of each size that are remembered
FIT_EVERY = 32  # steps
TOLERATED = 1.02  # times the predicted seconds; a slower step causes a new fit
OUTLIERS_FROM = 16  # from this many steps of a size on, its slowest one doesn't count
DOUBT = 3.0  # standard errors
FORGET_AFTER = 2048  # steps without one of a size: it may be worth another try
Floats = npt.NDArray[np.float64]


class Latency(Timing):
    """The bound and the measured steps.

    Args:
      max_itl_s: seconds between two tokens of a request at most.
      buckets: sizes of steps.
      page_size: the fewest tokens of an extend step, however long they take, so that prompts make progress.

    Attributes:
      for_encoding_s: seconds that all images of a step may take together, encoded or copied back; a single one may take
        longer.
    """

    is_bounded = True

    def __init__(self, max_itl_s: float, buckets: BucketSet, page_size: int) -> None:
        self.for_encoding_s = max_itl_s / 2
        self._max_itl_s = max_itl_s
        self._buckets = buckets
        self._page_size = page_size
        self._times = {"extend": StepTimes(), "decode": StepTimes(), "verify": StepTimes()}
        self._in_flight: deque[tuple[Bucket, float, float, int, int]] = deque()  # KV, pairs, patches, embeddings
        self._patch_s: deque[float] = deque(maxlen=OUTLIERS_FROM)  # of recent calls of the vision tower
        self._embedding_s: deque[float] = deque(maxlen=OUTLIERS_FROM)  # of recent copies back from host memory
        self._num_restored = 0  # embeddings that are copied back before the next step

    def restores(self, num_embeddings: int) -> None:
        """So many embeddings are copied back from host memory before the step that is launched next."""
        self._num_restored += num_embeddings

    def extends(self, inputs: StepInputs, works: Sequence[Work]) -> None:
        """An extend step, made of `works`, goes to the device."""
        kv_tokens = sum(work.start + len(work.token_ids) for work in works)
        pairs = sum(len(work.token_ids) * (work.start + (len(work.token_ids) + 1) / 2) for work in works)
        self._launched(inputs, kv_tokens, pairs)

    def decodes(self, inputs: StepInputs, positions_S: IntArray, steps_S: IntArray | None) -> None:
        """A decode step goes to the device: for each row, `steps_S` tokens from `positions_S` on; None: one token."""
        if steps_S is None:
            steps_S = np.ones_like(positions_S)
        self._launched(inputs, int((steps_S * (2 * positions_S + steps_S + 1)).sum()) // 2, 0.0)

    def _launched(self, inputs: StepInputs, kv_tokens: float, pairs: float) -> None:
        num_patches = sum(call.cost_patches for call in inputs.encodes)
        self.launched(inputs.bucket, kv_tokens, pairs, num_patches, self._num_restored)
        self._num_restored = 0

    def launched(
        self, bucket: Bucket, kv_tokens: float, pairs: float, num_patches: int = 0, num_restored: int = 0
    ) -> None:
        """Notes a program that goes to the device.

        Args:
          bucket, kv_tokens, pairs: of the step.
          num_patches: of calls of the vision tower before it, padding too.
          num_restored: embeddings that are copied back from host memory before it.
        """
        self._in_flight.append((bucket, kv_tokens, pairs, num_patches, num_restored))

    def collected(self, seconds: float) -> None:
        """Learns from the oldest program in flight, which took `seconds`."""
        bucket, kv_tokens, pairs, num_patches, num_restored = self._in_flight.popleft()
        times = self._times.get(bucket.kind)
        if times is None:
            return  # steps that score prompts are rare, and not bounded
        if num_patches or num_restored:
            known_s = (times.base(bucket.num_tokens) or 0.0) + times.attention(kv_tokens, pairs)
            of_images_s = max(seconds - known_s, 0.0)
            if not num_restored:
                self._patch_s.append(of_images_s / num_patches)
            elif not num_patches:  # of both together it isn't known how much is whose
                self._embedding_s.append(of_images_s / num_restored)
        else:
            of_step_s = seconds / bucket.num_steps
            times.measured(bucket.num_tokens, kv_tokens / bucket.num_steps, pairs, of_step_s)

    def encode_s(self, num_patches: int) -> float | None:
        """Seconds that the vision tower takes for so many patches at most; None before any were measured."""
        return max(self._patch_s) * num_patches if self._patch_s else None

    def restore_s(self, num_embeddings: int) -> float | None:
        """Seconds that so many embeddings take to come back from host memory at most; None before any was measured."""
        return max(self._embedding_s) * num_embeddings if self._embedding_s else None

    def leaves_time_for(self, num_steps: int, decoding: Collection[Req]) -> bool:
        """Whether `num_steps` decode steps in one program end within the bound; their tokens come together."""
        if self._times["decode"].base(1) is None:
            return False  # nothing is measured
        return num_steps * self._seconds_of_decoding(decoding, (), ()) <= self._max_itl_s

    def budget(
        self, most: int, decoding: Collection[Req], continuing: Sequence[Claim], mixed: Sequence[Req]
    ) -> TokenBudget:
        """What the next extend step may hold next to the decodes of `mixed`.

        Takes the size that extends most tokens a second, of all that end in time, supposing that all chunks begin at
        the deepest position. Before anything is measured, and where no size ends in time, it takes the smallest.

        Args:
          most: tokens at most, whatever time they take.
          decoding: requests that wait for their next token, those of `mixed` included.
          continuing: requests between chunks.
          mixed: requests that decode in the same step.
        """
        if not decoding:
            return TokenBudget(most)
        times = self._times["extend"]
        ending = [claim for claim in continuing if claim.extend_left <= most]
        left_s = self._max_itl_s - self._seconds_of_decoding(decoding, ending, mixed)
        deepest = max((claim.kv_len for claim in continuing), default=0)
        best, best_rate = None, 0.0
        for smaller, size in pairwise((0, *self._buckets.extend_sizes)):
            room = min(size - len(mixed), most)
            if room < min(self._page_size, most) or smaller - len(mixed) >= most:
                continue
            base_s = times.base(size)
            for_chunks_s = left_s - (base_s or 0.0)
            if base_s is None or for_chunks_s <= 0:
                best = best or TokenBudget(room, math.inf if base_s is None else 0.0)
                continue
            length = TokenBudget(room, for_chunks_s, times.kv_token_s, times.pair_s).longest_chunk(deepest)
            seconds = self._max_itl_s - for_chunks_s + times.attention(deepest + length, deepest * length)
            rate = length / max(seconds, 1e-9)
            if best is None or rate > best_rate:
                num_tokens = max(length, min(self._page_size, room))
                best, best_rate = TokenBudget(num_tokens, for_chunks_s, times.kv_token_s, times.pair_s), rate
        return best or TokenBudget(most)

    def _seconds_of_decoding(self, decoding: Collection[Req], ending: Sequence[Claim], mixed: Sequence[Req]) -> float:
        """Seconds of one token for each: the decodes' part of a mixed step, or a decode step.

        In the latter, the requests in `ending`, whose last chunk may be next, will have joined.
        """
        if mixed:
            kv_tokens = sum(req.kv_len + 1 for req in mixed)
            return self._times["extend"].attention(kv_tokens, kv_tokens)
        times = self._times["decode"]
        kv_tokens = sum(req.kv_len + 1 for req in decoding) + sum(claim.extend_to for claim in ending)
        rows = min(len(decoding) + len(ending), self._buckets.decode_sizes[-1])
        size = self._buckets.decode(rows).num_tokens
        return (times.base(size) or 0.0) + times.attention(kv_tokens, 0)


@dataclass(slots=True)
class _Window:
    """Recent steps of one size, in no order."""

    steps: Floats = field(default_factory=lambda: np.empty((WINDOW, 3)))  # KV, pairs, seconds
    count: int = 0
    last: int = 0  # number of the last one among all steps

    def add(self, *step: float) -> None:
        """Adds a step in place of the oldest one."""
        self.steps[self.count % WINDOW] = step
        self.count += 1

    @property
    def rows(self) -> Floats:
        """`[n, 3]` KV, pairs, seconds."""
        return self.steps[: self.count]


class StepTimes:
    """Learns how long steps of one kind take.

    Attributes:
      kv_token_s, pair_s: seconds per KV token read and per pair.
    """

    def __init__(self) -> None:
        self.kv_token_s = 0.0
        self.pair_s = 0.0
        self._windows: dict[int, _Window] = {}
        self._bases: dict[int, float] = {}
        self._num_steps = 0

    def measured(self, num_tokens: int, kv_tokens: float, pairs: float, seconds: float) -> None:
        """Notes that a step of `num_tokens`, padding included, took `seconds`. Fits again if that was much too long."""
        window = self._windows.setdefault(num_tokens, _Window())
        window.add(kv_tokens, pairs, seconds)
        self._num_steps += 1
        window.last = self._num_steps
        known = self._bases.get(num_tokens, -1.0) + self.attention(kv_tokens, pairs)
        if seconds > TOLERATED * known or self._num_steps % FIT_EVERY == 0:
            self._fit()

    def base(self, num_tokens: int) -> float | None:
        """Seconds that a step of `num_tokens` takes at most, attention left out; None before any was measured.

        A size that was not measured takes no longer than a larger one, and per token no longer than a smaller one.
        """
        if num_tokens in self._bases:
            return self._bases[num_tokens]
        return min((base * max(num_tokens / size, 1.0) for size, base in self._bases.items()), default=None)

    def attention(self, kv_tokens: float, pairs: float) -> float:
        """Seconds that the attention of a step takes."""
        return self.kv_token_s * kv_tokens + self.pair_s * pairs

    def _fit(self) -> None:
        oldest = self._num_steps - FORGET_AFTER
        self._windows = {size: window for size, window in self._windows.items() if window.last > oldest}
        steps = {size: window.rows for size, window in self._windows.items()}
        centred = [(rows - rows.mean(axis=0)) / rows[:, 2].mean() for rows in steps.values() if rows[:, 2].mean() > 0]
        if centred:
            self.kv_token_s, self.pair_s = _least_squares(np.concatenate(centred))
        coefficients = np.array([-self.kv_token_s, -self.pair_s, 1.0])
        self._bases = {size: _slowest(rows @ coefficients) for size, rows in steps.items()}


def _slowest(seconds: Floats) -> float:
    """The largest of `seconds`, or the second largest if there are many."""
    rank = -1 if len(seconds) < OUTLIERS_FROM else -2
    return max(float(np.partition(seconds, rank)[rank]), 0.0)


def _least_squares(rows: Floats) -> tuple[float, float]:
    """Coefficients c, d >= 0 such that c x column 0 + d x column 1 is next to column 2.

    Along both principal axes they are reduced by `DOUBT` standard errors, to 0 at least: differences between steps that
    were much alike are mostly noise, and would be extrapolated far.
    """
    seconds, used = rows[:, 2], [0, 1]
    scale = np.linalg.norm(rows[:, :2], axis=0)
    found = np.zeros(2)
    while used := [i for i in used if scale[i] > 0]:
        columns = rows[:, used] / scale[used]
        squares, axes = np.linalg.eigh(columns.T @ columns)
        squares = np.maximum(squares, 1e-9)
        along = axes.T @ (columns.T @ seconds) / squares
        errors = seconds - columns @ (axes @ along)
        doubt = DOUBT * np.sqrt(errors @ errors / max(len(rows) - 2, 1) / squares)
        values = axes @ (np.sign(along) * np.maximum(np.abs(along) - doubt, 0.0))
        if (values >= 0).all():
            found[used] = values / scale[used]
            break
        used.pop(int(np.argmin(values)))
    return float(found[0]), float(found[1])
