"""The kernels that choose and group experts do what XLA's forms do: the same choices, ties, order and shares."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    Choices,
    Groups,
    Router,
    UnitWeights,
    add_and_norm,
    add_choices,
    choose_experts,
    gated_product,
    group_by_expert,
    grouped_product,
    products_with_shared,
)
from pallas_kernels.experts import ACTIVATIONS, row_tiles, starts_of, unit_rows
from tests.grids import count, daily
from tests.pallas_kernels.cases import assert_close
from tests.pallas_kernels.test_dispatch import on_an_h100

# The rules of the families that are served, and numbers of experts that are powers of two and aren't.
ROUTERS = {
    "qwen3": (Router(8, renormalize=True), 128),
    "qwen2": (Router(4), 60),
    "mixtral": (Router(2, renormalize=True), 8),
    "gpt-oss": (Router(4, "softmax_of_chosen"), 32),
    "glm4": (Router(3, "sigmoid", True, 2.5, choice_bias=True), 24),
    "kolibri1": (Router(6, "sigmoid_of_chosen", True, choice_bias=True), 24),
    "all": (Router(5), 5),
    "deepseek-v3": (Router(4, "sigmoid", True, 2.5, 8, 3, choice_bias=True), 48),
    "deepseek-v4": (Router(6, "root_of_softplus", True, 1.5, choice_bias=True), 40),
    "deepseek-v2": (Router(3, num_groups=6, top_groups=2, group_best=1), 30),
}


def random_logits(num_tokens: int, num_experts: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(num_tokens, num_experts)) * 3, jnp.float32)


@pytest.mark.parametrize("name", ROUTERS)
def test_the_kernel_chooses_as_xla_does(name: str) -> None:
    router, num_experts = ROUTERS[name]
    bias = random_logits(1, num_experts, 1)[0] if router.choice_bias else None
    for num_tokens in daily((13, 1), every=2):
        logits = random_logits(num_tokens, num_experts, num_tokens)
        experts, shares = choose_experts(router, logits, bias, backend="triton", interpret=True)
        right, right_shares = choose_experts(router, logits, bias, backend="xla")
        np.testing.assert_array_equal(experts, right)
        np.testing.assert_allclose(shares, right_shares, rtol=1e-6)
        assert experts.dtype == jnp.int32 and shares.dtype == jnp.float32


@pytest.mark.parametrize("backend", ["triton", "xla"])
@pytest.mark.parametrize("name", ["qwen2", "glm4"])
def test_shared_experts_follow_the_chosen_ones(name: str, backend: str) -> None:
    """Three more than are chosen fill no power of two; their shares are 1, or the sigmoid of a token's logit."""
    router, num_experts = ROUTERS[name]
    bias = random_logits(1, num_experts, 1)[0] if router.choice_bias else None
    logits, gates = random_logits(6, num_experts), random_logits(6, 1, 2)[:, 0]
    right, right_shares = choose_experts(router, logits, bias, backend="xla")
    for gate, share in ((None, np.ones(6)), (gates, 1 / (1 + np.exp(-np.asarray(gates, np.float64))))):
        with_shared = dataclasses.replace(router, num_shared=3)
        experts, shares = choose_experts(
            with_shared, logits, bias, gate, backend=backend, interpret=backend == "triton"
        )  # fmt: skip
        np.testing.assert_array_equal(experts[:, :-3], right)
        np.testing.assert_array_equal(experts[:, -3:], np.tile(num_experts + np.arange(3), (6, 1)))
        np.testing.assert_allclose(shares[:, :-3], right_shares, rtol=1e-6)
        np.testing.assert_allclose(shares[:, -3:], np.tile(share[:, None], (1, 3)), rtol=1e-6)
        assert experts.dtype == jnp.int32 and shares.dtype == jnp.float32


@pytest.mark.parametrize("backend", ["triton", "xla"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_logits_may_come_in_parts_and_have_a_bias(has_bias: bool, backend: str) -> None:
    parts = jnp.stack([random_logits(5, 12, seed) for seed in range(4)])
    bias = random_logits(1, 12, 9)[0].astype(jnp.bfloat16) if has_bias else None
    experts, shares = choose_experts(
        Router(3), parts, logit_bias=bias, backend=backend, interpret=backend == "triton"
    )  # fmt: skip
    whole = parts[0] + parts[1] + parts[2] + parts[3]
    whole = whole if bias is None else whole + bias.astype(jnp.float32)
    right, right_shares = choose_experts(Router(3), whole, backend="xla")
    np.testing.assert_array_equal(experts, right)
    np.testing.assert_allclose(shares, right_shares, rtol=1e-5)


@pytest.mark.parametrize(
    ("logits", "bias", "message"),
    [
        (jnp.zeros((2, 3)), None, "with E >= 4"),
        (jnp.zeros((2, 8), jnp.bfloat16), None, "bfloat16; they must be"),
        (jnp.zeros((2, 8)), jnp.zeros(7), r"choice_bias is \(7,\); it must be \[8\]"),
    ],
)
def test_logits_that_do_not_fit_are_errors(logits: jax.Array, bias: jax.Array | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_experts(Router(4), logits, bias)
    with pytest.raises(ValueError, match=r"logit_bias is \(7,\); it must be \[8\]"):
        choose_experts(Router(4), jnp.zeros((2, 8)), logit_bias=jnp.zeros(7))
    with pytest.raises(ValueError, match=r"shared_logits is \(3,\); it must be \[2\]"):
        choose_experts(Router(2, num_shared=1), jnp.zeros((2, 8)), None, jnp.zeros(3))
    with pytest.raises(ValueError, match="is_token"):
        group_by_expert(jnp.zeros((3, 2), jnp.int32), 4, jnp.ones(2, bool))


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen"])
def test_of_equal_scores_the_first_experts_are_chosen(score: Any) -> None:
    logits = jnp.asarray([[0, 1, 1, 0, 1, 1, 0], [2, 2, 2, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, -jnp.inf]], jnp.float32)
    experts, _ = choose_experts(Router(5, score), logits, backend="triton", interpret=True)
    assert experts.tolist() == [[1, 2, 4, 5, 0], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    all_out = jnp.full((1, 4), -jnp.inf)
    bias = choose_experts(Router(3, "sigmoid"), jnp.zeros((1, 4)), all_out[0], backend="triton", interpret=True)
    assert bias[0].tolist() == [[0, 1, 2]]


def test_of_equal_groups_the_first_are_chosen_from() -> None:
    router = Router(2, "sigmoid", num_groups=4, top_groups=2)
    logits = jnp.asarray([[0, 0, 1, 1, 1, 1, 1, 1], [3, -9, 0, 0, 1, 0, 0, 0]], jnp.float32)
    experts, _ = choose_experts(router, logits, backend="triton", interpret=True)
    assert experts.tolist() == choose_experts(router, logits, backend="xla")[0].tolist() == [[2, 3], [4, 2]]


def test_more_groups_than_a_kernel_looks_at_in_turn_are_left_to_xla() -> None:
    router = Router(2, "sigmoid", num_groups=64, top_groups=2)
    with pytest.raises(ValueError, match="experts stand in 64 groups; it takes at most 32"):
        choose_experts(router, random_logits(3, 128), backend="triton", interpret=True)


# Choices of tokens among so many experts: of some places more than tiles, of others fewer.
CHOICES = {
    "one token": (np.array([[4, 0, 2]]), 5),
    "few of many": (np.random.default_rng(0).permuted(np.tile(np.arange(64), (3, 1)), axis=1)[:, :4], 64),
    "spread": (np.random.default_rng(0).permuted(np.tile(np.arange(6), (150, 1)), axis=1)[:, :3], 6),
    "one expert": (np.full((300, 1), 3), 5),
    "nowhere": (np.full((3, 2), -1), 5),
    "of other devices": (np.random.default_rng(1).integers(-4, 8, (40, 2)), 4),
}


def assert_equal_groups(found: Groups, right: Groups) -> None:
    for name in ("tokens", "experts", "sizes", "place_of"):
        np.testing.assert_array_equal(getattr(found, name), getattr(right, name), err_msg=name)
    np.testing.assert_array_equal(starts_of(found), starts_of(right))


# By day every second choice has padding, by night each has.
GROUPED = [(name, (i + night) % 2 == 1) for night in range(2) for i, name in enumerate(CHOICES)]


@pytest.mark.parametrize(("name", "with_padding"), GROUPED[: count(len(CHOICES), 2 * len(CHOICES))])
def test_the_kernel_groups_as_a_stable_sort_does(name: str, with_padding: bool) -> None:
    experts, num_experts = CHOICES[name]
    is_token = jnp.arange(len(experts)) % 3 != 1 if with_padding else None
    args = jnp.asarray(experts, jnp.int32), num_experts, is_token
    found = group_by_expert(*args, backend="triton", interpret=True)
    right = group_by_expert(*args, backend="xla")
    assert_equal_groups(found, right)
    assert found.tiles is not None
    tiles, _ = row_tiles(right, found.tile_rows)
    assert found.tiles.begins.shape == tiles.begins.shape
    mine, others = (
        sorted((int(e), int(b), int(end)) for e, b, end in zip(*each, strict=True) if b < end)
        for each in (found.tiles, tiles)
    )
    assert mine == others


def test_choices_are_counted_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    grouping: Any = importlib.import_module("pallas_kernels.triton.group_by_expert")
    monkeypatch.setattr(grouping, "_CHUNK", 64)
    experts = jnp.asarray(np.random.default_rng(2).integers(0, 7, (75, 3)), jnp.int32)
    run = functools.partial(grouping.group_by_expert.__wrapped__, experts, 7, None, True)
    assert_equal_groups(run(), group_by_expert(experts, 7, backend="xla"))


@pytest.mark.parametrize("name", daily(list(CHOICES), every=3))
def test_a_product_takes_the_tiles_that_the_kernel_made(name: str) -> None:
    experts, num_experts = CHOICES[name]
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(len(experts), 32)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(num_experts, 16, 32)), jnp.float32)

    def sums(backend: str) -> jax.Array:
        choice: dict[str, Any] = {"backend": backend, "interpret": backend == "triton"}
        groups = group_by_expert(jnp.asarray(experts, jnp.int32), num_experts, **choice)
        y = grouped_product(x, groups, weights, of_tokens=True, **choice)
        return add_choices(y, groups, jnp.ones(experts.shape))

    assert_close(sums("triton"), sums("xla"), jnp.float32)


@pytest.mark.parametrize(
    ("name", "dtype", "activation"),
    [
        ("spread", jnp.float32, "silu"),
        ("nowhere", jnp.float32, "silu"),
        ("one token", jnp.bfloat16, "gelu_tanh"),
        ("spread", jnp.float32, "relu2"),
    ],
)
def test_a_gated_product_is_the_unit_of_both_halves_or_of_all(name: str, dtype: Any, activation: str) -> None:
    experts, num_experts = CHOICES[name]
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.normal(size=(len(experts), 32)), dtype)
    sides = unit_rows(activation)
    weights = jnp.asarray(rng.normal(size=(num_experts, 48 * sides, 32)), dtype)
    groups = group_by_expert(jnp.asarray(experts, jnp.int32), num_experts, backend="xla")
    gate, *up = jnp.split(grouped_product(x, groups, weights, of_tokens=True, backend="reference"), sides, axis=1)
    right = ACTIVATIONS[activation](gate) * up[0] if up else jnp.maximum(gate, 0) ** 2
    for backend in ("triton", "xla"):
        interpret = backend == "triton"
        found = gated_product(x, groups, weights, activation, of_tokens=True, backend=backend, interpret=interpret)
        assert found.shape == (groups.num_places, 48) and found.dtype == dtype
        assert_close(found, right, dtype)


def random_units(num_experts: int, num_shared: int, dtype: Any, sides: int = 2) -> tuple[UnitWeights, UnitWeights]:
    """Of 32 inputs and outputs and 48 hidden units an expert."""
    rng = np.random.default_rng(6)
    dims = (num_experts, 48 * sides, 32), (num_experts, 32, 48), (sides, 48 * num_shared, 32), (32, 48 * num_shared)
    gate_up, down, *shared = (jnp.asarray(rng.normal(size=size) / 5, dtype) for size in dims)
    return UnitWeights(gate_up, down), UnitWeights(*shared)


@pytest.mark.parametrize(
    ("name", "num_shared", "dtype", "activation"),
    [
        ("spread", 2, jnp.float32, "silu"),
        ("one token", 1, jnp.bfloat16, "silu"),
        ("nowhere", 3, jnp.float32, "silu"),
        ("spread", 2, jnp.float32, "relu2"),
    ],
)
def test_shared_experts_among_others_are_an_mlp_next_to_them(
    name: str, num_shared: int, dtype: Any, activation: str
) -> None:
    """Their weights lie in an array of their own, of which each takes its rows and columns; padding takes none."""
    routed, num_experts = CHOICES[name]
    num_tokens = len(routed)
    numbers = np.concatenate([routed, np.tile(num_experts + np.arange(num_shared), (num_tokens, 1))], axis=1)
    is_token = np.arange(num_tokens) % 5 != 1
    groups = group_by_expert(jnp.asarray(numbers, jnp.int32), num_experts + num_shared, jnp.asarray(is_token))
    units, shared = random_units(num_experts, num_shared, dtype, unit_rows(activation))
    x = jnp.asarray(np.random.default_rng(7).normal(size=(num_tokens, 32)), dtype)
    sides = jnp.einsum("td,sfd->stf", x, shared.gate_up, preferred_element_type=jnp.float32).astype(dtype)
    hidden = jax.nn.silu(sides[0]) * sides[1] if activation == "silu" else jnp.maximum(sides[0], 0) ** 2
    mlp = jnp.einsum("tf,of->to", hidden, shared.down, preferred_element_type=jnp.float32)
    alone = group_by_expert(jnp.asarray(routed, jnp.int32), num_experts, jnp.asarray(is_token))
    gated = gated_product(x, alone, units.gate_up, activation, of_tokens=True, backend="xla")
    right = add_choices(
        grouped_product(gated, alone, units.down, backend="xla").astype(jnp.float32), alone, jnp.ones(routed.shape)
    )  # fmt: skip
    right += jnp.where(jnp.asarray(is_token)[:, None], mlp, 0)
    for backend in ("triton", "xla"):
        y = products_with_shared(x, groups, units, shared, activation, backend=backend, interpret=backend == "triton")
        assert y.shape == (groups.num_places, 32) and y.dtype == dtype
        assert_close(add_choices(y.astype(jnp.float32), groups, jnp.ones(numbers.shape)), right, dtype)


def test_weights_of_shared_experts_that_do_not_fit_are_errors() -> None:
    units, shared = random_units(2, 2, jnp.float32)
    x = jnp.zeros((3, 32))
    for num_experts, activation in ((3, "silu"), (5, "silu"), (4, "relu")):
        groups = group_by_expert(jnp.zeros((3, 1), jnp.int32), num_experts)
        with pytest.raises(ValueError, match=f"for groups of {num_experts} experts they must be"):
            products_with_shared(x, groups, units, shared, activation)
    groups = group_by_expert(jnp.zeros((3, 1), jnp.int32), 4)
    wide = UnitWeights(*(each.astype(jnp.bfloat16) for each in shared))
    with pytest.raises(ValueError, match="bfloat16, bfloat16; it takes one format of more than a byte"):
        products_with_shared(x, groups, units, wide, "silu", backend="triton", interpret=True)


def test_weights_of_a_byte_and_unknown_units_have_no_gated_product() -> None:
    groups = group_by_expert(jnp.zeros((2, 1), jnp.int32), 2)
    x, weights = jnp.zeros((2, 32)), jnp.zeros((2, 64, 32))
    with pytest.raises(ValueError, match="activation is 'relu'"):
        gated_product(x, groups, weights, "relu")
    with pytest.raises(ValueError, match="in a format of more than a byte"):
        gated_product(x, groups, weights.astype(jnp.int8), "silu")


@pytest.mark.parametrize("backend", ["triton", "xla"])
def test_results_of_experts_are_added_up_with_the_norm(backend: str) -> None:
    experts, num_experts = CHOICES["spread"]
    rng = np.random.default_rng(5)
    groups = group_by_expert(jnp.asarray(experts, jnp.int32), num_experts, jnp.arange(len(experts)) % 4 > 0)
    shape = (groups.num_places, 40)
    rows = jnp.where((groups.experts < num_experts)[:, None], jnp.asarray(rng.normal(size=shape), jnp.float32), 0.0)
    shares = jnp.asarray(rng.random(experts.shape), jnp.float32)
    x, scales = (jnp.asarray(rng.normal(size=(n, 40)), jnp.float32) for n in (len(experts), 2))
    update = Choices(rows, groups.place_of, shares)
    found = add_and_norm(x, update, scales, 1, 1e-6, backend=backend, interpret=backend == "triton")
    right = add_and_norm(x, add_choices(rows, groups, shares), scales, 1, 1e-6, backend="xla")
    for each, expected in zip(found, right, strict=True):
        assert_close(each, expected, jnp.float32)
    with pytest.raises(ValueError, match="update has rows"):
        add_and_norm(x[1:], update, scales, 1, 1e-6)


@pytest.mark.parametrize("name", ["qwen2", "glm4"])
def test_rules_with_biases_and_shared_experts_lower_for_a_gpu(name: str) -> None:
    router, num_experts = ROUTERS[name]
    router = dataclasses.replace(router, num_shared=1)
    shapes = [jax.ShapeDtypeStruct(dims, jnp.float32) for dims in ((4, num_experts), (num_experts,), (4,))]
    with on_an_h100():
        text = jax.jit(functools.partial(choose_experts, router)).trace(*shapes).lower(lowering_platforms=("cuda",))
    assert "choose_experts" in text.as_text() and "chlo.top_k" not in text.as_text()


@pytest.mark.parametrize("tokens", [1, 256, 4096])
def test_on_a_gpu_nothing_of_xlas_sorts_or_adds_up_beside_the_kernels(tokens: int) -> None:
    """Two kernels, two products that take the same tiles, and the norm that adds up what they yield.

    Hopper's products of many rows have tiles of their own, which one reduction finds, and rows that one kernel gathers.
    """

    def layer(logits: jax.Array, x: jax.Array, gate_up: jax.Array, down: jax.Array, is_token: jax.Array) -> Any:
        experts, shares = choose_experts(Router(8, renormalize=True), logits)
        groups = group_by_expert(experts, 128, is_token)
        y = grouped_product(gated_product(x, groups, gate_up, "silu", of_tokens=True), groups, down)
        return add_and_norm(x, Choices(y, groups.place_of, shares), x[:1], 0, 1e-6)

    half, dims = jnp.bfloat16, ((tokens, 256), (128, 512, 256), (128, 256, 256))
    shapes = [((tokens, 128), jnp.float32), *((each, half) for each in dims), ((tokens,), jnp.bool_)]
    with on_an_h100():
        traced = jax.jit(layer).trace(*(jax.ShapeDtypeStruct(*each) for each in shapes))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    of_mosaic = text.count("@mosaic_gpu")
    gathers = 1 if of_mosaic else 0
    assert text.count("@__gpu$xla.gpu.triton(") + text.count("@triton_kernel_call(") + of_mosaic == 5 + gathers
    assert of_mosaic == (2 if tokens == 4096 else 0) and text.count("stablehlo.reduce(") == of_mosaic
    for op in ("sort", "scatter", "top_k"):
        assert f"stablehlo.{op}" not in text and f"chlo.{op}" not in text
