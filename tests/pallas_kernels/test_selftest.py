"""The tests that a start runs on kernels: right kernels pass them, wrong ones don't."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as jax_op

from pallas_kernels import AttentionOptions, Router, packed, tuning
from pallas_kernels.backend import Kernel
from pallas_kernels.dispatch import BACKEND_OF_NAME
from pallas_kernels.native import library
from pallas_kernels.selftest import case as measured
from pallas_kernels.selftest import second_opinion
from pallas_kernels.selftest.__main__ import test as run_tests
from pallas_kernels.selftest.case import Case
from pallas_kernels.selftest.cases import CASES_OF, attention, products
from pallas_kernels.selftest.report import Begun, Ended, News, Request, Verdict, news_line, parse_news
from pallas_kernels.selftest.shapes import (
    ExpertShape,
    GroupedShape,
    KernelShapes,
    LatentShape,
    MatrixShape,
    StateShape,
)
from pallas_kernels.target import TargetDevice
from tests.grids import count, daily

ROUTER = Router(2, "sigmoid", num_groups=2, top_groups=1, choice_bias=True, bias=True, num_shared=2)
SHAPES = KernelShapes(
    num_kv_heads=1, num_groups=2, head_dim=32, page_size=8, hidden_size=64, dtype="float32", kv_dtype="float32",
    norm_dtype="float32", attention=(AttentionOptions(sliding_window=40),), has_sinks=True, has_bias=True,
    has_out_bias=True, has_out_norms=True, is_centred=True, residual_scale=0.7, has_stream_factors=True,
    has_norm_bias=True, has_head_norms=True,
    experts=(ExpertShape(3, 32, 16, "float32", ROUTER, 4, True),),
    matrices=(MatrixShape(48, 64, "int4", 32, True, packed.FRAGMENTS), MatrixShape(48, 128, "int8", 64),
              MatrixShape(48, 256, "float8_e4m3fn", 256)),
    states=(StateShape(2, 2, 16, 16, 4),),
)  # fmt: skip
BACKEND = "triton"  # whose kernels are replaced by functions of XLA
FIELDS = {
    "paged_decode_attention": "decode", "paged_extend_attention": "extend", "store_kv": "store",
    "delta_decode": "delta_step",
}  # fmt: skip
AUTO = dict.fromkeys(CASES_OF, "auto")


LATENTS = dataclasses.replace(
    SHAPES, num_groups=20, head_dim=48, attention=(AttentionOptions(value_dim=32),), latents=(LatentShape(48, 16),),
    has_sinks=False, experts=(), matrices=(), states=(),
)  # fmt: skip
INDEXED = dataclasses.replace(
    LATENTS, head_dim=64, latents=(LatentShape(48, 16, 48, num_chosen=20, index_heads=5, index_size=16),)
)


GROUPED = dataclasses.replace(
    SHAPES, num_groups=20, attention=(AttentionOptions(sliding_window=20),), experts=(), matrices=(), states=(),
    grouped=(GroupedShape(2, 48, num_chosen=20, index_heads=5), GroupedShape(8, 32), GroupedShape()),
)  # fmt: skip


OF_INDEX = ("attend_to_chosen", "score_tokens")
SHAPES_OF = dict.fromkeys(OF_INDEX, INDEXED) | {"attend_to_groups": GROUPED}


def first_case(op: str) -> Case:
    return next(iter(CASES_OF[op](SHAPES_OF.get(op, SHAPES))))


def with_kernel(monkeypatch: pytest.MonkeyPatch, op: str, spoil: Callable[[jax.Array], jax.Array]) -> None:
    """Has `BACKEND` compute what the reference or XLA does, with one array of the result changed."""
    field = FIELDS.get(op, op)
    names = ("reference", "xla", "triton")  # the last one for what XLA computes in parts
    right = next(each for name in names if (each := getattr(BACKEND_OF_NAME[name], field)) is not None)

    def kernel(*arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(right.run(*arguments))
        return jax.tree.unflatten(tree, [spoil(leaves[0]), *leaves[1:]])

    changes: dict[str, Any] = {field: Kernel(kernel)}  # which takes all shapes
    replaced = dataclasses.replace(BACKEND_OF_NAME[BACKEND], **changes)
    monkeypatch.setitem(BACKEND_OF_NAME, BACKEND, replaced)
    jax.clear_caches()


OPS = [op for op in CASES_OF if op != "add_and_norm"]


@pytest.mark.parametrize("op", OPS)
def test_a_right_kernel_passes(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernel(monkeypatch, op, lambda out: out)
    case = first_case(op)
    assert case.error(BACKEND, interpret=True) <= case.tolerance


# Numbers and NaN by turns; by night both for each.
WRONG = [(op, (0.5, float("nan"))[(i + night) % 2]) for night in range(2) for i, op in enumerate(OPS)]


@pytest.mark.parametrize(("op", "value"), WRONG[: count(len(OPS), 2 * len(OPS))])
def test_a_kernel_with_wrong_rows_fails(op: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of positions it is 0 that is wrong."""
    is_number = op != "score_tokens"
    with_kernel(monkeypatch, op, lambda out: out.at[1:4].set(value if is_number else 0))
    case = first_case(op)
    assert not case.error(BACKEND, interpret=True) <= case.tolerance


WIDE = dataclasses.replace(SHAPES, head_dim=128, has_sinks=False)


# A kernel's own case has long sequences, each of which the reference computes by itself.
SHORT: dict[str, Callable[[KernelShapes], Case]] = {
    "decode": lambda shapes: attention._decode(shapes, "", np.array([0, 5, 17]), shapes.attention[0]),
    "extend": lambda shapes: attention._extend(shapes, [(0, 3), (0, 0), (41, 9)], shapes.attention[0]),
}


@pytest.mark.parametrize("op", SHORT)
def test_jaxs_own_kernel_says_whether_a_tpus_wrong_rows_are_ours(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the reference that comes with it: no interpreter runs the kernel."""
    monkeypatch.setattr(jax_op, "ragged_paged_attention", jax_op.ref_ragged_paged_attention)
    assert SHORT[op](WIDE).second_opinion() == ""
    monkeypatch.setattr(second_opinion, "target_device", lambda: TargetDevice("tpu", "TPU v6 lite", 1))
    assert SHORT[op](dataclasses.replace(WIDE, has_sinks=True)).others is None
    case = SHORT[op](WIDE)
    assert case.second_opinion() == "; JAX's own kernel is right"
    monkeypatch.setattr(jax_op, "ragged_paged_attention", lambda q, *_, **options: jnp.ones_like(q))
    assert case.second_opinion().startswith("; JAX's own kernel is wrong too, by ")
    monkeypatch.delattr(jax_op, "ragged_paged_attention")
    assert case.second_opinion() == "; JAX's own kernel raised AttributeError"


def test_the_kernel_that_adds_and_normalizes_passes() -> None:
    assert all(case.error("triton", interpret=True) <= case.tolerance for case in CASES_OF["add_and_norm"](SHAPES))


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as an interpreter multiplies in a moment."""
    monkeypatch.setattr(products, "MATRIX_ROWS", ((2, 20), (3, 5)))
    monkeypatch.setattr(products, "MANY_ROWS", (33, 18))
    monkeypatch.setattr(measured, "RUNS", 1)


@pytest.mark.usefixtures("few_rows")
def test_the_kernels_that_round_rows_and_multiply_float8_pass() -> None:
    shapes = dataclasses.replace(SHAPES, dtype="bfloat16", matrices=(MatrixShape(48, 256, "float8_e4m3fn", 128),) * 2)
    found = list(CASES_OF["float8_product"](shapes))
    assert len(found) == 6
    assert all(case.error("triton", interpret=True) <= case.tolerance for case in found)


@pytest.mark.parametrize(("group", "of_tokens"), [(128, True), (256, False)])
def test_the_kernel_for_experts_in_float8_passes(group: int, of_tokens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "RUNS", 1)
    expert = ExpertShape(3, 48, 256, "bfloat16", ROUTER, 4, of_tokens, group)
    found = list(
        CASES_OF["float8_product"](dataclasses.replace(SHAPES, dtype="bfloat16", matrices=(), experts=(expert,)))
    )
    assert len(found) == 2  # few rows and many
    assert all(case.error("triton", interpret=True) <= case.tolerance for case in found)


@pytest.mark.parametrize(
    "form",
    daily(
        [{"numbers": "int4", "has_zeros": True}, {"packing": packed.MXFP4_CODES}, {"numbers": "float8_e4m3fn"}], every=3
    ),
)
def test_a_tpus_kernel_for_experts_in_groups_passes(form: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "RUNS", 1)
    expert = ExpertShape(3, 48, 256, "bfloat16", ROUTER, 4, False, group=32, **form)
    case, *others = CASES_OF["grouped_product"](dataclasses.replace(SHAPES, dtype="bfloat16", experts=(expert,)))
    assert [each.name for each in others] == ["routing"]
    assert case.error("mosaic_tpu", interpret=True) <= case.tolerance


@pytest.mark.usefixtures("few_rows")
def test_a_tpus_kernel_for_matrices_in_groups_passes() -> None:
    matrices = (
        MatrixShape(48, 256, "int4", 128, has_zeros=True),
        MatrixShape(48, 256, "int8", 32, False, packed.MXFP4_CODES),
    )
    found = list(CASES_OF["quantized_product"](dataclasses.replace(SHAPES, dtype="bfloat16", matrices=matrices)))
    assert len(found) == 4
    assert all(case.error("mosaic_tpu", interpret=True) <= case.tolerance for case in found)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("numbers", daily(["int4", "int8", "float8_e4m3fn"], every=2))
def test_the_kernel_for_weights_in_groups_passes(numbers: str) -> None:
    packing = packed.FRAGMENTS if numbers == "int4" else ""
    matrices = tuple(MatrixShape(48, 256, numbers, group, numbers != "float8_e4m3fn", packing) for group in (32, 64))
    shapes = dataclasses.replace(SHAPES, dtype="bfloat16", matrices=matrices)
    found = list(CASES_OF["quantized_product"](shapes))
    assert len(found) == 4
    assert all(case.error("triton", interpret=True) <= case.tolerance for case in found)


def test_the_kernels_around_experts_pass_and_wrong_choices_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {case.name: case for case in CASES_OF["grouped_product"](SHAPES)}
    gated = [case for name, case in cases.items() if name.endswith("gated")]
    assert len(gated) == 2  # many rows and few
    tested = *gated, cases["routing"], cases["2 shared experts of 16"]
    assert all(case.error("triton", interpret=True) <= case.tolerance for case in tested)
    right = BACKEND_OF_NAME["triton"].choose_experts
    assert right is not None

    def wrong(*arguments: Any) -> Any:
        experts, shares = right.run(*arguments)
        return experts[:, ::-1], shares

    changes: dict[str, Any] = {"choose_experts": Kernel(wrong, right.refuse)}
    replaced = dataclasses.replace(BACKEND_OF_NAME["triton"], **changes)
    monkeypatch.setitem(BACKEND_OF_NAME, "triton", replaced)
    jax.clear_caches()
    assert not cases["routing"].error("triton", interpret=True) <= cases["routing"].tolerance


@pytest.mark.skipif(library.load() is not None, reason="this machine has no C++ kernels")
def test_a_process_names_each_kernel_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "preferred_backends", lambda op: ["mosaic_gpu", "native"] if "extend" in op else [])
    shapes = dataclasses.replace(
        SHAPES, kv_dtype="uint16", experts=(), matrices=(MatrixShape(8, 8, "int8", 8),), states=()
    )
    said: list[News] = []
    few = {op: lambda shapes, make=make: itertools.islice(make(shapes), 1) for op, make in CASES_OF.items()}
    run_tests(Request("cpu", shapes.as_json(), AUTO), said.append, few)
    assert [(each.op, each.verdict) for each in said if isinstance(each, Verdict)] == [
        ("rotate_and_store", "untested"), ("store_kv", "untested"), ("paged_decode_attention", "untested"),
        ("paged_extend_attention", "passed"), ("add_and_norm", "untested"),
    ]  # fmt: skip
    ours = [each for each in said if isinstance(each, Begun | Verdict) and each.backend == "native"]
    begun = [each.case for each in ours if isinstance(each, Begun)]
    assert begun == ["arrays", "ragged, window 40", "arrays"]
    assert ours[-1] == Verdict("paged_extend_attention", "native", "passed")
    assert said[-1] == Ended()


def test_a_backend_that_failed_before_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "preferred_backends", lambda op: ["triton"])
    known = tuple(Verdict(op, "triton", "hung") for op in CASES_OF)
    said: list[News] = []
    run_tests(Request("cpu", SHAPES.as_json(), AUTO, known), said.append, CASES_OF)
    assert {(each.backend, each.verdict) for each in said if isinstance(each, Verdict)} == {("xla", "untested")}


def test_another_device_than_the_expected_is_no_kernels_fault() -> None:
    said: list[News] = []
    run_tests(Request("gpu", SHAPES.as_json(), AUTO), said.append, CASES_OF)
    (ended,) = said
    assert isinstance(ended, Ended) and "in place of a gpu" in ended.problem


def test_requests_and_news_survive_the_pipe() -> None:
    request = Request("gpu", SHAPES.as_json(), AUTO, (Verdict("store_kv", "triton", "hung", "no answer"),))
    again = Request.parse(request.line())
    assert again == request and KernelShapes.from_json(again.shapes) == SHAPES
    for news in (Begun("store_kv", "triton", "ragged"), request.known[0], Ended("no device")):
        assert parse_news(news_line(news)) == news
    with pytest.raises(ValueError, match="no news"):
        parse_news('{"kind": "Nothing"}')


def test_of_a_latent_its_own_kernels_are_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "preferred_backends", lambda op: [])
    monkeypatch.setattr(measured, "RUNS", 1)
    latents = (AttentionOptions(value_dim=24),)
    shapes = dataclasses.replace(
        SHAPES,
        attention=latents,
        has_sinks=False,
        num_groups=20,
        experts=(),
        matrices=(),
        latents=(LatentShape(12, 10),),
    )
    said: list[News] = []
    run_tests(Request("cpu", shapes.as_json(), AUTO), said.append, CASES_OF)
    tested = {each.op for each in said if isinstance(each, Verdict)}
    attention = {"paged_decode_attention", "paged_extend_attention"}
    assert attention | {"rotate_and_store"} <= tested and not {"store_kv", "store_and_decode"} & tested
    for op in attention:
        with_kernel(monkeypatch, op, lambda out: out)
        case = next(iter(CASES_OF[op](shapes)))
        assert case.error(BACKEND, interpret=True) <= case.tolerance
        assert case.right()[0].shape[-1] == 24


def test_of_windows_and_groups_their_own_kernels_are_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "preferred_backends", lambda op: [])
    said: list[News] = []
    run_tests(Request("cpu", GROUPED.as_json(), AUTO), said.append, CASES_OF)
    assert {each.op for each in said if isinstance(each, Verdict)} == {
        "attend_to_groups", "score_tokens", "add_and_norm",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("shapes", "op", "field", "told"),
    [
        (LATENTS, "rotate_and_store", "absorb_and_store", "tokens of latents"),
        (INDEXED, "rotate_and_store", "absorb_and_store", "tokens of latents"),
        (LATENTS, "paged_decode_attention", "decode_latents", "outputs"),
        (INDEXED, "paged_decode_attention", "decode_latents", "outputs"),
        *((INDEXED, op, op, "rows") for op in OF_INDEX),
        (GROUPED, "score_tokens", "score_tokens", "rows"),
        *((GROUPED, "attend_to_groups", "attend_to_groups", told) for told in ("rows, groups of 2", "one row, window")),
    ],
)
def test_kernels_around_a_latents_attention_pass_and_wrong_ones_fail(
    shapes: KernelShapes, op: str, field: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured, "RUNS", 1)
    jax.clear_caches()  # of kernels that other tests replaced
    case = next(each for each in CASES_OF[op](shapes) if told in each.name)
    assert case.error(BACKEND, interpret=True) <= case.tolerance
    kernel = getattr(BACKEND_OF_NAME[BACKEND], field)

    def wrong(*arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(kernel.run(*arguments))
        first = leaves[0].at[0].set(jnp.asarray(0.5, leaves[0].dtype))  # of positions 0
        return jax.tree.unflatten(tree, [first, *leaves[1:]])

    changes: dict[str, Any] = {field: Kernel(wrong)}
    monkeypatch.setitem(BACKEND_OF_NAME, BACKEND, dataclasses.replace(BACKEND_OF_NAME[BACKEND], **changes))
    jax.clear_caches()
    assert not case.error(BACKEND, interpret=True) <= case.tolerance


def test_queries_that_see_ahead_are_tested_where_a_model_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that ignores what is seen is found."""
    (options,) = SHAPES.attention
    sees_ahead = dataclasses.replace(SHAPES, attention=(dataclasses.replace(options, sees_ahead=True),))
    plain, ahead = CASES_OF["paged_extend_attention"](sees_ahead)
    assert len(list(CASES_OF["paged_extend_attention"](SHAPES))) == 1
    assert plain.name != ahead.name and ahead.error("xla") <= ahead.tolerance
    backend = BACKEND_OF_NAME["xla"]

    def causal(*arguments: Any, seen: Any = None, **named: Any) -> Any:
        return backend.extend.run(*arguments[:6], **named)

    right = ahead.right()
    ignores: Any = Kernel(causal)
    monkeypatch.setitem(BACKEND_OF_NAME, "xla", dataclasses.replace(backend, extend_ahead=ignores))
    jax.clear_caches()
    spoiled = dataclasses.replace(ahead, right=lambda: right)
    assert spoiled.error("xla") > 10 * spoiled.tolerance
