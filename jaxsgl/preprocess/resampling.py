"""Samples at one rate to samples at another, by a windowed sinc, as they come.

Outputs whose places among the inputs are alike are made by one product: a row of inputs, and a matrix with the sinc at
each output's place. Knows no files; `sounds.py` feeds it.
"""

from __future__ import annotations

import math

import numpy as np

from jaxsgl.preprocess.mel import Samples

ZEROS = 24  # of the sinc, on either side
CUT = 0.945  # the highest frequency that passes, as a part of the lower rate's half
_SHAPE = 10.0  # of Kaiser's window: what is folded back is 100 dB lower
MOST_PHASES = 640  # outputs with places of their own: of rates as 11,025
MOST_WEIGHTS = 1 << 19  # of the matrix: bounds its memory, and the time that an output takes
_AT_ONCE = 1 << 14  # outputs


class Resampler:
    """Makes samples at the rate `to` of those at `rate`; any if `is_possible`."""

    def __init__(self, rate: int, to: int) -> None:
        self._up, self._down = _ratio(rate, to)
        cut = CUT * min(1.0, to / rate)
        self._half = _half(rate, to)
        inputs = np.arange(-self._half, self._down + self._half + 1)
        self._matrix = np.empty((len(inputs), self._up), np.float32)
        for number in range(self._up):  # one by one, for what they take meanwhile
            far = number * self._down / self._up - inputs
            window = np.i0(_SHAPE * np.sqrt(np.maximum(1 - (far / (self._half + 1)) ** 2, 0))) / np.i0(_SHAPE)
            self._matrix[:, number] = np.where(np.abs(far) <= self._half, cut * np.sinc(cut * far) * window, 0)
        self._buffer = np.zeros(self._half, np.float32)
        self._num_in = self._num_out = 0

    @staticmethod
    def is_possible(rate: int, to: int) -> bool:
        """Whether the rates have a ratio of small numbers."""
        up, down = _ratio(rate, to)
        return up <= MOST_PHASES and up * (down + 2 * _half(rate, to) + 1) <= MOST_WEIGHTS

    def add(self, samples: Samples) -> Samples:
        """Returns what follows from the samples `[n]` that come next."""
        if self._up == self._down:
            return samples
        self._num_in += len(samples)
        self._buffer = np.concatenate([self._buffer, samples])
        return self._made()

    def finish(self) -> Samples:
        """Returns the rest."""
        if self._up == self._down:
            return np.zeros(0, np.float32)
        left = -(-self._num_in * self._up // self._down) - self._num_out
        self._buffer = np.concatenate([self._buffer, np.zeros(self._down + 2 * self._half + 1, np.float32)])
        return self._made()[:left]

    def _made(self) -> Samples:
        width, made = len(self._matrix), list[Samples]()
        while (count := (len(self._buffer) - width) // self._down + 1) > 0:
            count = min(count, max(_AT_ONCE // self._up, 1))
            rows = np.lib.stride_tricks.sliding_window_view(self._buffer, width)[: count * self._down : self._down]
            made.append((rows @ self._matrix).reshape(-1))
            self._buffer = self._buffer[count * self._down :]
        out = np.concatenate([np.zeros(0, np.float32), *made])
        self._num_out += len(out)
        return out


def _ratio(rate: int, to: int) -> tuple[int, int]:
    """Outputs for so many inputs, in the smallest numbers."""
    divisor = math.gcd(rate, to)
    return to // divisor, rate // divisor


def _half(rate: int, to: int) -> int:
    """Inputs on either side of an output that it is made of."""
    return math.ceil(ZEROS / (CUT * min(1.0, to / rate)))
