"""How long a step will take, learnt from steps that were measured. Knows no requests; called by `pace.py`.

    seconds <= base[T] + kv_token x KV + pair x pairs

T: tokens, padding included; KV: tokens whose keys and values are read; pairs: (token, token that it attends to). What
varies between steps of one T is attention, so its two coefficients come from there, by least squares. base[T] is what
is left of the slowest recent steps but one: a bound, not a mean, that a new T inherits from its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

WINDOW = 64  # steps of each size that are remembered
FIT_EVERY = 32  # steps
TOLERATED = 1.02  # times what was foreseen, until the next fit
OUTLIERS_FROM = 16  # from so many steps of a size on, its slowest one doesn't count
DOUBT = 3.0  # standard errors
FORGET_AFTER = 2048  # steps without one of a size: it may be worth another try
Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class _Window:
    """Recent steps of one size, in no order."""

    steps: Floats = field(default_factory=lambda: np.empty((WINDOW, 3)))  # KV, pairs, seconds
    count: int = 0
    last: int = 0  # which step of all the last one was

    def add(self, *step: float) -> None:
        """In place of the oldest."""
        self.steps[self.count % WINDOW] = step
        self.count += 1

    @property
    def rows(self) -> Floats:
        """`[n, 3]`."""
        return self.steps[: self.count]


class StepTimes:
    """Of one kind of step.

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
        """A step of `num_tokens`, padding included, took `seconds`. Fits anew if that was much too long."""
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
        """Seconds of the attention of a step."""
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
    """Of `seconds`, the slowest but one, if there are many."""
    rank = -1 if len(seconds) < OUTLIERS_FROM else -2
    return max(float(np.partition(seconds, rank)[rank]), 0.0)


def _least_squares(rows: Floats) -> tuple[float, float]:
    """Coefficients c, d >= 0 such that c x column 0 + d x column 1 is next to column 2.

    Along both principal axes they are less by `DOUBT` standard errors, and 0 at least: what steps that were much alike
    seem to say is mostly noise, and would be extrapolated far.
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
