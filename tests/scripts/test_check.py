"""A kernel that is wrong, leaves holes or gives another result the next time does not pass on a device."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from bench.kernels.cases import DECODE, EXTEND, STORE
from bench.kernels.check import FAILED, PASSED, REFUSED, check_spec, judge_runs, ragged_case
from bench.kernels.check_latents import check_latents
from bench.kernels.check_layer import check_layer
from bench.kernels.contenders import prepare_backend
from bench.kernels.inputs import make_inputs
from bench.kernels.runners import JaxRunner

from pallas_kernels import absorb_and_store, add_and_norm, decode_latents
from pallas_kernels.specs import GRID_SPECS, SMALL_SPECS, ArgSpec

pytestmark = pytest.mark.device

SPEC = ArgSpec("small", 4, 24, 5, 16, 2, 2, 16)


class Results:
    """A runner whose runs give these results one after the other, the last one forever."""

    calls = 1

    def __init__(self, *results) -> None:
        self._results = list(results)

    def check(self):
        return self._results.pop(0) if len(self._results) > 1 else self._results[0]

    def run(self, passes: int) -> None:
        raise AssertionError("only checked here")


@pytest.fixture(scope="module")
def extend():
    """Inputs of an extend and its right output."""
    inputs = make_inputs(ragged_case(EXTEND, SPEC, seed=1), adverse=True)
    return inputs, JaxRunner(prepare_backend("xla", inputs)).check()


def test_equal_right_results_pass(extend) -> None:
    inputs, right = extend
    check = judge_runs(inputs, "fake", Results(right), Results(right), runs=5)
    assert (check.verdict, check.moved, check.disagreement, check.note) == (PASSED, 0, 0, "")


def test_a_result_that_moves_fails(extend) -> None:
    inputs, right = extend
    moved = right.at[0, 0, 0].add(0.5)
    check = judge_runs(inputs, "fake", Results(right, right, right, moved, right), None, runs=5)
    assert check.verdict == FAILED and check.note.startswith("moved between runs")


def test_an_element_that_is_not_written_fails(extend) -> None:
    inputs, right = extend
    check = judge_runs(inputs, "fake", Results(right.at[3].set(jnp.nan)), None, runs=2)
    assert check.verdict == FAILED and "error nan" in check.note


def test_one_wrong_element_among_all_fails_even_if_its_token_was_not_sampled(extend) -> None:
    inputs, right = extend
    check = judge_runs(inputs, "fake", Results(right), Results(right.at[5, 1, 3].add(0.1)), runs=2)
    assert check.verdict == FAILED and check.note.startswith("disagreement with xla")


def test_xla_passes_all_ops() -> None:
    (spec,) = [spec for spec in SMALL_SPECS if spec.name == "scale_window_cap_and_sinks"]
    checks = check_spec(spec, "xla", runs=2)
    assert [(check.op, check.verdict) for check in checks] == [(op, PASSED) for op in (STORE, DECODE, EXTEND)]


def test_a_latent_passes_by_attention_and_by_what_stands_around_it() -> None:
    spec = ArgSpec("latent", 3, 20, 5, 16, 1, 20, 48, value_dim=32)
    for backend in ("xla", "triton"):
        choice: dict[str, Any] = {"runs": 1, "interpret": backend == "triton"}
        checks = [*check_spec(spec, backend, **choice), *check_latents(spec, backend, **choice)]
        ops = (DECODE, EXTEND, "decode_latents", "absorb_and_store")
        assert [(check.op, check.verdict) for check in checks] == [(op, PASSED) for op in ops], checks


def test_wrong_queries_and_outputs_of_a_latent_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_a_head(q, kv, heads, **choice):
        return decode_latents(q, kv, heads, **choice).at[:, 1].set(0)

    def leaves_queries(qkv, pages, slots, **choice):
        q, stored = absorb_and_store(qkv, pages, slots, **choice)
        return q.at[2, :, -1].set(0), stored

    monkeypatch.setattr("bench.kernels.check_latents.decode_latents", forgets_a_head)
    monkeypatch.setattr("bench.kernels.check_latents.absorb_and_store", leaves_queries)
    checks = check_latents(ArgSpec("latent", 3, 20, 5, 16, 1, 20, 48, value_dim=32), "xla", runs=1)
    assert [check.verdict for check in checks] == [FAILED, FAILED], checks


def test_the_ops_between_products_and_attention_pass_on_xla() -> None:
    checks = check_layer(SPEC, "xla", runs=2)
    assert [(check.op, check.verdict) for check in checks] == [("rotate_and_store", PASSED), ("add_and_norm", PASSED)]
    assert all(check.error is not None and 0 < check.error < 1e-5 for check in checks)


def test_a_wrong_sum_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_a_part(x, update, scales, row, eps, **choice):
        return add_and_norm(x, update.at[0].set(0), scales, row, eps, **choice)

    monkeypatch.setattr("bench.kernels.check_layer.add_and_norm", forgets_a_part)
    _, check = check_layer(SPEC, "xla", runs=1)
    assert check.verdict == FAILED and check.note.startswith("output 0: error")


def test_a_refused_spec_says_why() -> None:
    spec = ArgSpec("head_dim_72", 2, 8, 2, 16, 1, 2, 72)
    checks = check_spec(spec, "triton", runs=1, interpret=True)
    assert {check.verdict for check in checks} == {REFUSED}
    assert all("72" in check.note for check in checks)


@pytest.mark.parametrize("spec", [*SMALL_SPECS, *GRID_SPECS], ids=lambda spec: spec.name)
@pytest.mark.parametrize("op", [STORE, DECODE, EXTEND])
def test_ragged_batches_fit_the_specs_shapes(op: str, spec: ArgSpec) -> None:
    for seed in range(5):
        case = ragged_case(op, spec, seed)
        assert case.num_tokens == (spec.num_seqs if op == DECODE else spec.num_tokens)
        assert case.spec.pages_per_seq == spec.pages_per_seq
        assert all(cached >= 0 for cached in case.cached)
        assert (np.array(case.new) > 0).tolist() == (case.lengths > 0).tolist()
        assert 0 in case.lengths or spec.num_seqs == 1
