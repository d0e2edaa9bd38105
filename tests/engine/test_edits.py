"""Logit edits and their tables against NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsgl.batch.sampling import pack_edits, row_setup, token_counts
from jaxsgl.engine.tables import EditTables, count_tokens, edit_logits, neutral_tables, set_row
from jaxsgl.requests.request import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams
from tests import numpy_sampling

VOCAB, ROWS = 397, 5
STOPS = frozenset({3, 300})
PROMPT, OUTPUT = [5, 5, 9, 3, 396], [9, 7, 7, 0, 7]
NEUTRAL = SamplingParams()

apply, count, write_row = jax.jit(edit_logits), jax.jit(count_tokens), jax.jit(set_row)


def logits_of(num_rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (num_rows, VOCAB)).astype(np.float32)


def setup(row: int, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    counts = token_counts(np.array(prompt, np.int32), output, VOCAB)
    return row_setup(row, pack_edits(params, STOPS, len(prompt)), counts)


def tables_with(params: SamplingParams, row: int = 2, output: list[int] = OUTPUT) -> EditTables:
    return write_row(neutral_tables(ROWS, VOCAB), setup(row, params, PROMPT, output))


@pytest.mark.parametrize(
    "params",
    [
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -1.1},
        {"presence_penalty": 1.3},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.4},
        {"logit_bias": {0: 3.0, 396: -100.0, 8: 100.0}},
        {"min_tokens": 6},
        {"min_tokens": 5},
        {
            "frequency_penalty": 2,
            "presence_penalty": -2,
            "repetition_penalty": 1.2,
            "logit_bias": {7: 1},
            "min_tokens": 9,
        },
        {"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS), -1.5), "min_tokens": 9},
    ],
)
def test_edited_logits_are_those_of_numpy(params: dict[str, Any]) -> None:
    asked = SamplingParams(**params)
    logits = logits_of(2)
    rows, positions = np.array([2, ROWS], np.int32), np.full(2, len(PROMPT) + len(OUTPUT), np.int32)
    done = np.asarray(apply(logits, tables_with(asked), rows, positions))
    expected = numpy_sampling.edited(logits[0], asked, PROMPT, OUTPUT, STOPS)
    np.testing.assert_allclose(done[0], expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(done[1], logits[1])


def test_counting_drawn_tokens_equals_setting_the_row_up_again() -> None:
    params = SamplingParams(frequency_penalty=1.0)
    tables = tables_with(params, output=[])
    for token in OUTPUT:
        tables = count(tables, np.array([ROWS, 2, ROWS], np.int32), np.array([1, token, 2], np.int32))
    np.testing.assert_array_equal(tables.counts[2], tables_with(params).counts[2])
    assert not np.asarray(tables.counts)[[0, 1, 3, 4]].any()


def test_setting_a_row_replaces_all_of_it_and_nothing_else() -> None:
    full = SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0), frequency_penalty=1.0)
    before = tables_with(full, row=2)
    after = write_row(before, setup(3, full, [1], []))
    after = write_row(after, setup(2, NEUTRAL, [], []))
    empty = neutral_tables(ROWS, VOCAB)
    for table, blank in zip(after, empty, strict=True):
        np.testing.assert_array_equal(np.delete(table, 3, axis=0), np.delete(blank, 3, axis=0))


def test_a_row_holds_as_many_entries_as_a_request_may_have() -> None:
    params = SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0), min_tokens=1)
    stops = frozenset(range(300, 300 + MAX_STOP_TOKEN_IDS + 20))
    packed = pack_edits(params, stops, prompt_len=0)
    tables = write_row(neutral_tables(ROWS, VOCAB), row_setup(0, packed, np.zeros(VOCAB, np.int32)))
    done = np.asarray(apply(jnp.zeros((1, VOCAB)), tables, np.zeros(1, np.int32), np.zeros(1, np.int32)))[0]
    assert (done[:300] == 1).all()
    assert np.isneginf(done[300:384]).all()
    assert not done[384:].any()


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-45, 1e-30])
def test_a_tiny_repetition_penalty_leaves_logits_finite(penalty: float) -> None:
    """Float32 rounds the smallest to 0, and to divide by the others would overflow."""
    packed = pack_edits(SamplingParams(repetition_penalty=penalty), frozenset(), prompt_len=0)
    tables = write_row(neutral_tables(ROWS, VOCAB), row_setup(0, packed, np.ones(VOCAB, np.int32)))
    done = np.asarray(apply(jnp.full((1, VOCAB), 50.0), tables, np.zeros(1, np.int32), np.zeros(1, np.int32)))
    assert np.isfinite(done).all()
