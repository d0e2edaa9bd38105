"""What changes a request's logits before a token is chosen, as one int32 array per row that stays on the device.

Penalties, bias, and stop tokens that must wait for min_tokens. Written once, when a request starts to sample, so that
steps transfer none of it. The step that reads it is in the engine (`engine/edits.py`). Knows no batches.

    edits [EDITS_LEN] = [ penalties (3) | token ids | values | until ]
                          float bits      MAX_ADDED each: adds `value` (float bits) to the logit of `id` at positions
                                          below `until`; unused entries are all 0
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from jaxsgl.cache.pages import IntArray
from jaxsgl.request import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams

MAX_EOS_TOKEN_IDS = 20  # models have 1 to 5
MAX_ADDED = MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + MAX_EOS_TOKEN_IDS
PENALTIES = slice(0, 3)  # frequency, presence, repetition
IDS = slice(3, 3 + MAX_ADDED)
VALUES = slice(IDS.stop, IDS.stop + MAX_ADDED)
UNTIL = slice(VALUES.stop, VALUES.stop + MAX_ADDED)
EDITS_LEN = UNTIL.stop
FOR_EVER = 2**31 - 1  # the largest int32; no sequence gets as long


def pack_edits(params: SamplingParams, stop_ids: Collection[int], prompt_len: int) -> IntArray:
    """`[EDITS_LEN]` for a request that `stop_ids` end, and whose first new token stands at position `prompt_len`."""
    edits = np.zeros(EDITS_LEN, dtype=np.int32)
    edits[PENALTIES].view(np.float32)[:] = (
        params.frequency_penalty,
        params.presence_penalty,
        params.repetition_penalty,
    )
    banned = sorted(stop_ids) if params.min_tokens else []
    ids = [*params.logit_bias, *banned]
    num_bias, count = len(params.logit_bias), len(ids)
    edits[IDS][:count] = ids
    edits[VALUES].view(np.float32)[:count] = [*params.logit_bias.values(), *[-np.inf] * len(banned)]
    edits[UNTIL][:num_bias] = FOR_EVER
    edits[UNTIL][num_bias:count] = min(prompt_len + params.min_tokens, FOR_EVER)
    return edits


def neutral_edits() -> IntArray:
    """`[EDITS_LEN]` that change nothing."""
    return pack_edits(SamplingParams(), (), 0)


def token_counts(prompt_ids: IntArray, output_ids: Sequence[int], vocab_size: int) -> IntArray:
    """`[V]`: per token, twice how often it stands in the output, plus 1 if it stands in the prompt.

    From nothing but token ids, so that it can be made again for a request that starts over.
    """
    counts = 2 * np.bincount(np.asarray(output_ids, dtype=np.int64), minlength=vocab_size)
    counts[prompt_ids] += 1
    return counts.astype(np.int32)


def row_setup(row: int, edits: IntArray, counts: IntArray) -> IntArray:
    """`[1 + EDITS_LEN + V]`: one transfer that sets `row` of both tables."""
    return np.concatenate((np.array([row], dtype=np.int32), edits, counts))


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
