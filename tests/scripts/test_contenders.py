"""Every contender of the benchmark computes the same function, and wrong results are marked."""

import contextlib
import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from bench.kernels import contenders
from bench.kernels.cases import STORE, decode, extend, store
from bench.kernels.inputs import make_inputs
from bench.kernels.measure import MAX_ERROR, check_error, contenders_for, measure_case
from bench.kernels.reference import attention_error, store_error
from bench.kernels.runners import JaxRunner, Prepared
from bench.roofline import Roofline
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as jax_op

from tests.grids import daily

pytestmark = pytest.mark.device

SMALL = {"num_kv_heads": 2, "num_groups": 2, "head_dim": 16, "page_size": 4, "dtype": "float32"}
WIDE = {**SMALL, "head_dim": 128, "page_size": 8}  # a TPU's lanes
ROOFLINE = Roofline(1e9, 1e9)
DECODE = decode("decode", [33, 20, 7], **SMALL)
EXTEND = extend("chunks", [20, 0, 0], [3, 0, 5], padding_tokens=4, **SMALL)
CASES = [
    decode("decode", [32, 32], **SMALL),
    extend("ragged", [20, 0, 7], [3, 9, 1], **SMALL),
    extend("prompts", [0, 0], [12, 12], **SMALL),
    extend("chunk", [9], [6], **SMALL),
    extend("all options", [20, 0], [3, 9], sliding_window=5, logit_soft_cap=2.0, float8_cache=True, **SMALL),
    store(40, **SMALL),
    store(40, **SMALL, float8_cache=True),
]


@pytest.mark.parametrize("case", daily(CASES, every=2), ids=lambda case: case.name)
def test_all_contenders_are_right(case) -> None:
    inputs = make_inputs(case)
    right = []
    for name, make in contenders_for(case, "cpu", ["xla", "baselines"]).items():
        try:
            runner = make(inputs)
        except contenders.Unsupported:
            continue
        assert check_error(inputs, runner) < 1e-6, name
        runner.run(2)  # the timed calls give the same results as the checked ones, states included
        assert check_error(inputs, runner) < 1e-6, name
        right.append(name)
    assert "xla" in right


@pytest.mark.parametrize(
    "case",
    [
        decode("decode", [32, 32], bits_cache=True, **SMALL),
        extend("ragged", [20, 0, 7], [3, 9, 1], bits_cache=True, **SMALL),
        store(40, bits_cache=True, **SMALL),
    ],
    ids=lambda case: case.op,
)
def test_a_cache_of_bits_is_read_as_the_numbers_it_means(case) -> None:
    inputs = make_inputs(case)
    right = []
    for name, make in contenders_for(case, "cpu", ["xla", "baselines"]).items():
        with contextlib.suppress(contenders.Unsupported):
            assert check_error(inputs, make(inputs)) < 5e-3, name  # queries and outputs are rounded to 8 bits
            right.append(name)
    assert "xla" in right
    assert case.op == STORE or len(right) > 1


def test_jax_paged_attention_is_called_correctly() -> None:
    case = decode("decode", [33, 64, 7], **{**SMALL, "page_size": 8})
    inputs = make_inputs(case)
    prepared = contenders.jax_paged_attention(inputs, k_splits=2, tile_tokens=16, interpret=True)
    assert check_error(inputs, JaxRunner(prepared)) < 1e-5


WIDE_CASES = [
    extend("chunks", [20, 0, 7], [3, 40, 1], sliding_window=16, logit_soft_cap=2.0, **WIDE),
    decode("decode", [33, 64, 7], **WIDE),
]


@pytest.mark.parametrize("case", daily(WIDE_CASES, every=2), ids=lambda case: case.name)
def test_jax_ragged_paged_attention_is_called_correctly(case, monkeypatch) -> None:
    """By the reference that comes with it: no interpreter runs the kernel."""
    monkeypatch.setattr(jax_op, "ragged_paged_attention", jax_op.ref_ragged_paged_attention)
    inputs = make_inputs(case)
    prepared = contenders.ragged_paged_attention(inputs)
    _, out = prepared.call(None, *prepared.own[0], *prepared.shared)
    assert attention_error(inputs, inputs.layers[0], out) < 1e-5


def test_the_error_is_relative_to_the_right_output() -> None:
    inputs = make_inputs(EXTEND)
    (layer,) = inputs.layers
    right = JaxRunner(contenders.prepare_backend("xla", inputs)).check()
    assert attention_error(inputs, layer, right) < 1e-6
    assert attention_error(inputs, layer, 1.1 * right) == pytest.approx(0.1, rel=1e-4)
    assert np.isnan(attention_error(inputs, layer, right.at[2, 1, 3].set(jnp.nan)))
    assert attention_error(inputs, layer, right.at[-1, 0, 0].set(1e-3)) == np.inf  # padding must be zero


def test_a_store_that_touches_another_place_is_infinitely_wrong() -> None:
    inputs = make_inputs(store(38, **SMALL))
    (layer,) = inputs.layers
    k_pages, v_pages = JaxRunner(contenders.prepare_backend("xla", inputs)).check()
    last_page = int(inputs.page_table[0, -1])
    assert store_error(inputs, layer, (k_pages, v_pages)) == 0
    assert store_error(inputs, layer, (k_pages.at[last_page, 0, 1, 0].add(1), v_pages)) > 1e-3
    assert store_error(inputs, layer, (k_pages.at[last_page, 0, 2, 0].add(1), v_pages)) == np.inf
    assert store_error(inputs, layer, (k_pages.at[0, 0, 2, 0].add(1), v_pages)) == 0  # the dummy page


def test_outputs_live_in_buffers_that_were_full_of_nan() -> None:
    runner = JaxRunner(Prepared(lambda _, q: (None, 2 * q), [None], [(jnp.ones(4),)]))
    assert runner.program.memory_analysis().alias_size_in_bytes == 16
    assert (runner.check() == 2).all()


@pytest.mark.parametrize("name", ["raises", "wrong"])
def test_a_contender_that_fails_is_a_row_and_not_the_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(inputs):
        raise RuntimeError("out of memory\nand more")

    def wrong(inputs):
        prepared = contenders.prepare_backend("xla", inputs)
        return dataclasses.replace(prepared, call=lambda *args: (None, 2 * prepared.call(*args)[1]))

    fakes = {"fake": {"raises": raises, "wrong": wrong}[name]}
    monkeypatch.setattr("bench.kernels.measure.baselines_for", lambda op, platform: fakes)
    monkeypatch.setattr("bench.kernels.measure.torch_baselines", lambda op, platform: {})
    rows = {row.contender: row for row in measure_case(DECODE, "cpu", ["xla", "baselines"], ROOFLINE, 1, {})}
    error = rows["xla"].error
    assert rows["xla"].is_right and error is not None and error < MAX_ERROR
    assert not rows["fake"].is_right
    if name == "raises":
        assert rows["fake"].seconds is None and rows["fake"].note == "RuntimeError: out of memory"
    else:
        assert rows["fake"].error == pytest.approx(1.0)


def test_a_refusal_says_why() -> None:
    case = decode("odd", [9], **{**SMALL, "head_dim": 72})
    prepare = functools.partial(contenders.prepare_backend, "triton", make_inputs(case), interpret=True)
    with pytest.raises(contenders.Unsupported, match="72"):
        prepare()


def test_contenders_without_pages_are_measured_once_for_all_page_sizes() -> None:
    case = decode("decode", [8, 8], **SMALL)
    rows = {row.contender: row for row in measure_case(case, "cpu", ["baselines"], ROOFLINE, 1, {})}
    other = dataclasses.replace(case, page_size=8)
    again = {row.contender: row for row in measure_case(other, "cpu", ["baselines"], ROOFLINE, 1, rows)}
    assert again.keys() == rows.keys()
    for name, row in again.items():
        assert row.case == "decode, page 8"
        assert (row.seconds == rows[name].seconds) == name.endswith("(unpaged)")
