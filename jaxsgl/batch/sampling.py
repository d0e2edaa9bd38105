"""Sampling parameters as arrays: what the scheduler keeps by row, what a step carries, and what the sampler reads.

`SamplingArrays` declares each filter once. The table of rows, the packed inputs of a step and the sampler iterate over
its fields, so that a new filter is a field here, its use in `engine/sampling/filters.py`, and its fields in the APIs.

Edits of the logits (penalties, bias, stop tokens banned until min_tokens) take too many numbers to be carried by every
step. They are one int32 array per row that stays on the device; the host writes it once, when the request first
samples. `engine/tables.py` applies them.

    edits [EDITS_LEN] = [ penalties (3) | token ids | values | until | scored ]
                          float bits      MAX_ADDED each: adds `value` (float bits) to the logit of `id` at positions
                                          below `until`; unused entries are all 0

`scored` are token ids whose log-probabilities are wanted in the place of each output token; unused ones are 0.

`AdapterRows` is kept by row too: which adapter each row's request has, and which columns of the device's pool each
adapter has. Knows `SamplingParams`, but no scheduler's request, no batch, no names of adapters and no device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from jaxsgl.cache.pages import IntArray
from jaxsgl.requests.request import MAX_LOGIT_BIAS, MAX_LOGPROB_TOKEN_IDS, MAX_STOP_TOKEN_IDS, SamplingParams

ArrayT = TypeVar("ArrayT", bound=Any)
Bits: TypeAlias = type[np.int32] | type[np.float32]  # of 32 bits each, so that one int32 array holds all fields
Value: TypeAlias = Callable[[SamplingParams, int], float | np.int32]
Bitcast: TypeAlias = Callable[[ArrayT, Bits], ArrayT]

MAX_EOS_TOKEN_IDS = 20  # models have 1 to 5
MAX_ADDED = MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + MAX_EOS_TOKEN_IDS
PENALTIES = slice(0, 3)  # frequency, presence, repetition
IDS = slice(3, 3 + MAX_ADDED)
VALUES = slice(IDS.stop, IDS.stop + MAX_ADDED)
UNTIL = slice(VALUES.stop, VALUES.stop + MAX_ADDED)
SCORED = slice(UNTIL.stop, UNTIL.stop + MAX_LOGPROB_TOKEN_IDS)
EDITS_LEN = SCORED.stop
MIN_REPETITION_PENALTY = 1e-5  # dividing by less, or by what float32 rounds to 0, would make logits infinite
FOR_EVER = 2**31 - 1  # the largest int32; no sequence gets as long


@dataclass(frozen=True)
class Column:
    """How a field of `SamplingArrays` is stored and filled.

    Attributes:
      dtype: of its array.
      neutral: the value that filters nothing, for padding and for rows without a request.
      value: a request's value, from its parameters and its seed (a uint32).
    """

    dtype: Bits
    neutral: float
    value: Value


def _column(dtype: Bits, neutral: float, value: Value) -> dict[str, Column]:
    return {"column": Column(dtype, neutral, value)}


@dataclass(frozen=True)
class SamplingArrays(Generic[ArrayT]):
    """The sampling parameters of n rows or sequences: NumPy arrays on the host, JAX arrays inside a program.

    Attributes:
      top_k: `[n]` int32; 0 keeps all tokens.
      seeds: `[n]` int32, the bits of a uint32.
      temperature, top_p, min_p: `[n]` float32, as in `SamplingParams`.
    """

    top_k: ArrayT = field(metadata=_column(np.int32, 0, lambda params, _: max(params.top_k, 0)))
    seeds: ArrayT = field(metadata=_column(np.int32, 0, lambda _, seed: np.uint32(seed).view(np.int32)))
    temperature: ArrayT = field(metadata=_column(np.float32, 0.0, lambda params, _: params.temperature))
    top_p: ArrayT = field(metadata=_column(np.float32, 1.0, lambda params, _: params.top_p))
    min_p: ArrayT = field(metadata=_column(np.float32, 0.0, lambda params, _: params.min_p))

    def __iter__(self) -> Iterator[ArrayT]:
        """The arrays in the order of `COLUMNS`."""
        return iter(vars(self).values())

    @classmethod
    def unpack(cls, bits: ArrayT, bitcast: Bitcast[ArrayT]) -> SamplingArrays[ArrayT]:
        """The rows of `bits [len(COLUMNS), n]` int32, each `bitcast` to the dtype of its field."""
        return cls(*(bitcast(bits[i], column.dtype) for i, column in enumerate(COLUMNS)))


COLUMNS: tuple[Column, ...] = tuple(spec.metadata["column"] for spec in fields(SamplingArrays))
NEUTRAL_BITS: IntArray = np.array([np.array(column.neutral, column.dtype).view(np.int32) for column in COLUMNS])


class Variant(NamedTuple):
    """What a batch asks of the programs that choose its tokens.

    Attributes:
      sampled: whether any row needs more than the most likely token, or a grammar's most likely one.
      featured: whether any row edits its logits or wants log-probabilities; implies `sampled`.
      filtered: whether any row draws from a part of the vocabulary: by top-k, top-p or min-p.
    """

    sampled: bool
    featured: bool = False
    filtered: bool = False


# What a request asks of the programs that choose its tokens, as bits; 0: the most likely token.
DRAWS, FILTERS, EDITS, LOGPROBS, MASKS, STATES = (1 << i for i in range(6))


def _needs_of(params: SamplingParams) -> int:
    asked = {
        DRAWS: not params.greedy,
        FILTERS: params.filtered,
        EDITS: params.has_row,
        LOGPROBS: params.logprobs is not None,
        MASKS: params.masked,
        STATES: params.wants_states,
    }
    return sum(need for need, is_asked in asked.items() if is_asked)


@cache
def variant_of(needs: int) -> Variant:
    """The programs for rows of which any has each of `needs`."""
    featured = bool(needs & (EDITS | LOGPROBS))
    sampled = featured or bool(needs & (DRAWS | MASKS))
    return Variant(sampled, featured, filtered=bool(needs & DRAWS and needs & FILTERS))


class SamplingRows:
    """The sampling parameters of every row and of the dummy row. The scheduler writes a row when a request takes it.

    Attributes:
      rope_deltas: `[rows + 1]` what is added to the index of a row's new tokens to get their positions.
    """

    def __init__(self, num_rows: int) -> None:
        self._bits: IntArray = np.tile(NEUTRAL_BITS[:, None], num_rows + 1)
        self._arrays = SamplingArrays.unpack(self._bits, np.ndarray.view)
        self._dummy_row = num_rows
        self.rope_deltas: IntArray = np.zeros(num_rows + 1, dtype=np.int32)
        self._needs = np.zeros(num_rows + 1, dtype=np.uint8)
        self._masks = False  # whether any row ever was: without masks, steps aren't searched for them

    def move_to(self, bits: IntArray, needs: npt.NDArray[np.uint8]) -> None:
        """Keeps its values in `bits [len(COLUMNS), rows + 1]` and `needs [rows + 1]` from now on: see `RankTables`."""
        bits[:], needs[:] = self._bits, self._needs
        self._bits, self._needs = bits, needs
        self._arrays = SamplingArrays.unpack(bits, np.ndarray.view)

    def set(self, row: int, params: SamplingParams, seed: int, rope_delta: int = 0) -> None:
        """Writes the parameters of the request that took `row`; `seed` is a uint32."""
        self.rope_deltas[row] = rope_delta
        for array, column in zip(self._arrays, COLUMNS, strict=True):
            array[row] = column.value(params, seed)
        self._needs[row] = needs = _needs_of(params)
        self._masks = self._masks or bool(needs & MASKS)

    def bits(self, rows: IntArray) -> IntArray:
        """`[len(COLUMNS), len(rows)]`: what `SamplingArrays.unpack` reads, of `rows` in their order."""
        return self._bits[:, rows]

    def variant(self, rows: IntArray) -> Variant:
        """Which programs `rows` need."""
        return variant_of(self._needs_of_any(rows))

    def any_masked(self, rows: IntArray) -> bool:
        """Whether masks say which tokens any of `rows` may get."""
        return self._masks and bool(self._needs_of_any(rows) & MASKS)

    def any_logprobs(self, rows: IntArray) -> bool:
        """Whether any of `rows` wants log-probabilities of its tokens."""
        return bool(self._needs_of_any(rows) & LOGPROBS)

    def any_states(self, rows: IntArray) -> bool:
        """Whether any of `rows` wants what is computed for its tokens."""
        return bool(self._needs_of_any(rows) & STATES)

    def _needs_of_any(self, rows: IntArray) -> int:
        return int(np.bitwise_or.reduce(self._needs[rows]))

    def edit_rows(self, rows: IntArray) -> IntArray:
        """`rows`, with the dummy row in place of those that edit no logits, and score no tokens that they name."""
        return np.where(self._needs[rows] & EDITS, rows, self._dummy_row).astype(np.int32)


def pack_edits(params: SamplingParams, stop_ids: Collection[int], prompt_len: int) -> IntArray:
    """`[EDITS_LEN]` for a request that `stop_ids` end, and whose first new token stands at position `prompt_len`."""
    edits = np.zeros(EDITS_LEN, dtype=np.int32)
    edits[PENALTIES].view(np.float32)[:] = (
        params.frequency_penalty,
        params.presence_penalty,
        max(params.repetition_penalty, MIN_REPETITION_PENALTY),
    )
    banned = sorted(stop_ids) if params.bans_stop_tokens else []
    ids = [*params.logit_bias, *banned]
    num_bias, count = len(params.logit_bias), len(ids)
    edits[IDS][:count] = ids
    edits[VALUES].view(np.float32)[:count] = [*params.logit_bias.values(), *[-np.inf] * len(banned)]
    edits[UNTIL][:num_bias] = FOR_EVER
    edits[UNTIL][num_bias:count] = min(prompt_len + params.min_tokens, FOR_EVER)
    edits[SCORED][: len(params.logprob_token_ids)] = params.logprob_token_ids
    return edits


def neutral_edits() -> IntArray:
    """`[EDITS_LEN]` that change nothing."""
    return pack_edits(SamplingParams(), (), 0)


def token_counts(prompt_ids: IntArray, output_ids: Sequence[int], vocab_size: int) -> IntArray:
    """`[V]`: per token, twice how often the output holds it, plus 1 if the prompt holds it.

    Computed from token ids alone, so that it can be computed again for a request that was retracted.
    """
    counts = 2 * np.bincount(np.asarray(output_ids, dtype=np.int64), minlength=vocab_size)
    counts[prompt_ids] += 1
    return counts.astype(np.int32)


def row_setup(row: int, edits: IntArray, counts: IntArray) -> IntArray:
    """`[1 + EDITS_LEN + V]`: one transfer that sets `row` of both edit tables."""
    return np.concatenate((np.array([row], dtype=np.int32), edits, counts))


class AdapterRows:
    """Adapters by row and by column.

    Attributes:
      number_of_row: `[rows + 1]` int32; 0 for a row without an adapter, and for the dummy row.
      column_owners: `[columns]` int32, the number of the adapter that has each column; 0 if it is free.
    """

    def __init__(self, num_rows: int, max_adapters: int, num_columns: int) -> None:
        self.number_of_row: IntArray = np.zeros(num_rows + 1, np.int32)
        self.column_owners: IntArray = np.zeros(num_columns, np.int32)
        self._reach: IntArray = np.zeros(max_adapters + 1, np.int32)

    def columns_of(self, rows: IntArray) -> int:
        """Columns up to the last one that an adapter of `rows` has; 0 if none of them has an adapter."""
        return int(self._reach[self.number_of_row[rows]].max(initial=0))

    def place(self, number: int, rank: int) -> tuple[int, ...]:
        """Gives adapter `number` the first free columns; asserts that there are `rank`."""
        columns = np.flatnonzero(self.column_owners == 0)[:rank]
        assert len(columns) == rank and not (self.column_owners == number).any(), "the pool is full"
        self.column_owners[columns] = number
        self._reach[number] = columns[-1] + 1
        return tuple(columns.tolist())

    def remove(self, number: int) -> None:
        """Frees the columns of adapter `number`."""
        assert not (self.number_of_row == number).any(), "a row has the adapter still"
        self.column_owners[self.column_owners == number] = 0
        self._reach[number] = 0

    def set_row(self, row: int, number: int) -> None:
        """Gives `row` the adapter `number`, 0 for none."""
        self.number_of_row[row] = number
