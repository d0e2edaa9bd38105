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
        self._dummy_row = num_rows
        self._sampled = np.zeros(num_rows + 1, dtype=bool)
        self._edited = np.zeros(num_rows + 1, dtype=bool)
        self._logprobs = np.zeros(num_rows + 1, dtype=bool)

    def set(self, row: int, params: SamplingParams, seed: int) -> None:
        """Writes the parameters of the request that took `row`; `seed` is a uint32."""
        self.temperature[row] = params.temperature
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.top_k[row] = max(params.top_k, 0)
        self.seeds[row] = np.uint32(seed).view(np.int32)
        self._sampled[row] = not params.greedy
        self._edited[row] = params.edits_logits
        self._logprobs[row] = params.logprobs is not None

    def any_sampled(self, rows: IntArray) -> bool:
        """Whether any of `rows` needs more than the most likely token."""
        return bool(self._sampled[rows].any())

    def any_featured(self, rows: IntArray) -> bool:
        """Whether any of `rows` changes its logits or wants log-probabilities."""
        return bool(self._edited[rows].any()) or self.any_logprobs(rows)

    def any_logprobs(self, rows: IntArray) -> bool:
        """Whether any of `rows` wants log-probabilities of its tokens."""
        return bool(self._logprobs[rows].any())

    def edit_rows(self, rows: IntArray) -> IntArray:
        """`rows`, with the dummy row in place of those that leave their logits as they are."""
        return np.where(self._edited[rows], rows, self._dummy_row).astype(np.int32)
