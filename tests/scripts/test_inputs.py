"""Inputs match their case, and are adverse where checks ask for it."""

import jax.numpy as jnp
import numpy as np
import pytest
from bench.kernels.cases import decode, extend, store, work_of
from bench.kernels.inputs import layers_for, make_inputs

pytestmark = pytest.mark.device

SMALL = {"num_kv_heads": 2, "num_groups": 2, "head_dim": 8, "page_size": 4, "dtype": "float32"}


def test_no_two_tokens_share_a_slot_and_none_lies_in_the_dummy_page() -> None:
    inputs = make_inputs(extend("x", [7, 0, 3], [4, 9, 0], padding_tokens=3, **SMALL))
    real = inputs.slots[:13]
    assert len(set(real)) == 13
    assert (real >= 4).all() and (inputs.slots[13:] < 4).all()
    used = [set(row[: -(-length // 4)]) for row, length in zip(inputs.page_table, inputs.lengths, strict=True)]
    assert len(set().union(*used)) == sum(map(len, used))


def test_layers_differ_and_exceed_a_gpus_cache() -> None:
    case = decode("x", [4096] * 8)
    assert layers_for(case, "gpu") * work_of(case).num_bytes > 5e8
    assert layers_for(case, "cpu") == 1
    first, second = make_inputs(decode("x", [16], **SMALL), num_layers=2).layers
    assert not np.array_equal(first.k_pages, second.k_pages)


def test_adverse_inputs_hold_nan_wherever_no_token_is_and_share_pages() -> None:
    inputs = make_inputs(decode("x", [10, 9, 0], **SMALL), adverse=True)
    (layer,) = inputs.layers
    assert (inputs.page_table[0, :2] == inputs.page_table[1, :2]).all()
    assert inputs.page_table[0, 2] != inputs.page_table[1, 2]
    held = np.isfinite(np.asarray(layer.k_pages)).all(axis=(1, 3))
    assert held.sum() == 8 + 2 + 1  # two shared pages, and what each has of its third
    assert not held[0].any()


def test_a_float8_cache_stands_for_numbers_of_usual_size() -> None:
    (layer,) = make_inputs(store(64, **{**SMALL, "head_dim": 64}, float8_cache=True)).layers
    assert layer.k_pages.dtype == jnp.float8_e4m3fn
    assert 0.8 < float(jnp.std(layer.k_pages.astype(jnp.float32)) * 0.02) < 1.2
