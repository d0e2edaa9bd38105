"""Sampling parameters by row, as arrays, so that a decode batch of any size takes them with one index per field."""

from __future__ import annotations

import numpy as np

from jaxsgl.cache.pages import IntArray
from jaxsgl.request import SamplingParams


class SamplingRows:
    """`temperature[row]` and so on, for every row and the dummy row. Written when a request takes its row."""

    def __init__(self, num_rows: int) -> None:
        self.temperature = np.zeros(num_rows + 1, dtype=np.float32)
        self.top_p = np.ones(num_rows + 1, dtype=np.float32)
        self.min_p = np.zeros(num_rows + 1, dtype=np.float32)
        self.top_k = np.zeros(num_rows + 1, dtype=np.int32)
        self.seeds = np.zeros(num_rows + 1, dtype=np.int32)
        self._sampled = np.zeros(num_rows + 1, dtype=bool)

    def set(self, row: int, params: SamplingParams, seed: int) -> None:
        """Writes the parameters of the request that took `row`; `seed` is a uint32."""
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.top_k[row] = max(params.top_k, 0)
        self.seeds[row] = np.uint32(seed).view(np.int32)
        self._sampled[row] = not params.greedy

    def any_sampled(self, rows: IntArray) -> bool:
        """Whether any of `rows` needs more than the most likely token."""
        return bool(self._sampled[rows].any())
