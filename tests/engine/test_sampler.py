"""The sampler against sorts in float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsgl.batch.sampling import COLUMNS, SamplingArrays
from jaxsgl.engine.sampling import sampler
from jaxsgl.engine.sampling.filters import Tokens, keep_limit
from pallas_kernels.target import TargetDevice
from tests.grids import daily
from tests.pallas_kernels.test_dispatch import on_a_device

PLATFORMS = ("cpu", "gpu")  # each has a search of its own; both run anywhere
PARAMETERS = ("temperature", "top_k", "top_p", "min_p")
DTYPES = {spec.name: column.dtype for spec, column in zip(fields(SamplingArrays), COLUMNS, strict=True)}


@partial(jax.jit, static_argnames="filtered")
def sample(
    logits: jax.Array, sampling: SamplingArrays[jax.Array], positions: jax.Array, filtered: bool = True
) -> jax.Array:
    return sampler.sample(logits, sampling, positions, sampler.greedy(logits), filtered=filtered)


@partial(jax.jit, static_argnames="platform")
def limits(logits: jax.Array, sampling: SamplingArrays[jax.Array], platform: str) -> jax.Array:
    chunks, top = sampler.in_chunks(logits, -jnp.inf), jnp.max(logits, axis=-1)
    return keep_limit(Tokens(chunks, top, 1 / sampling.temperature), sampling, platform)


def kept(logits: np.ndarray, platform: str, **params: object) -> np.ndarray:
    """Mask `[S, V]`; each parameter is one value for all rows or one per row."""
    seeds = np.zeros(len(logits), np.int32)
    limit = limits(logits, SamplingArrays(seeds=seeds, **per_row(len(logits), params)), platform)
    return logits.max(axis=1, keepdims=True) - logits <= np.asarray(limit)[:, None]


def draw(
    logits: np.ndarray, seeds: np.ndarray, positions: np.ndarray, filtered: bool = True, **params: Any
) -> np.ndarray:
    seeds, positions = (np.broadcast_to(x, len(logits)) for x in (seeds, positions))
    bits = seeds.astype(np.uint32).view(np.int32)
    arrays = SamplingArrays(seeds=bits, **per_row(len(logits), params))
    return np.asarray(sample(logits, arrays, positions.astype(np.int32), filtered=filtered))


def per_row(num_rows: int, params: Mapping[str, object]) -> dict[str, np.ndarray]:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params}
    return {name: np.broadcast_to(np.asarray(values[name], DTYPES[name]), num_rows) for name in PARAMETERS}


def oracle(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Probabilities `[V]` of one row, in float64, by sorting: top-k, then top-p of what is left, then min-p."""
    scaled = logits.astype(np.float64) / np.float64(temperature)
    probs = np.exp(scaled - scaled.max())
    order = np.argsort(-probs, kind="stable")
    keep = np.zeros(len(probs), bool)
    keep[order[: top_k or None]] = True
    probs = np.where(keep, probs, 0) / probs[keep].sum()
    if top_p < 1:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= top_p]] = 0
    probs[probs < min_p * probs.max()] = 0
    return probs / probs.sum()


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (num_rows, vocab_size)).astype(np.float32)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])  # each finds them in its own way
@pytest.mark.parametrize("vocab_size", [1, 7, 101, 256, 1000, 32003])
def test_greedy_takes_the_lowest_id_of_the_most_likely_ones(
    vocab_size: int, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "target_device", lambda: TargetDevice(platform, "", 1))
    logits = random_logits(20, vocab_size)
    logits[::2] = np.round(logits[::2])  # many ties
    assert sampler.greedy(jnp.asarray(logits)).tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize(
    ("platform", "n", "vocab_size"),
    [
        (platform, *shape)
        for platform in PLATFORMS
        for shape in daily(((400, 1024), (400, 101), (24, 48000), (12, 32003)), every=2)
    ],
)
def test_kept_tokens_are_those_of_a_sort(platform: str, n: int, vocab_size: int) -> None:
    """Whether there are few chunks, or as many as let a search narrow down to some of them."""
    rng = np.random.default_rng(1)
    logits = random_logits(n, vocab_size)
    params = {
        "temperature": rng.choice([0.3, 1.0, 1.7], n),
        "top_k": rng.choice([0, 1, 2, 5, 50, vocab_size // 3, vocab_size, 10**6], n),
        "top_p": rng.choice([0.001, 0.1, 0.5, 0.9, 0.99, 1.0], n),
        "min_p": rng.choice([0.0, 0.001, 0.1, 0.7, 1.0], n),
    }
    rows = per_row(n, params)  # rounded to float32, as the sampler sees them
    expected = [oracle(logits[i], *(rows[name][i] for name in PARAMETERS)) > 0 for i in range(n)]
    np.testing.assert_array_equal(kept(logits, platform, **params), expected)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_tokens_as_likely_as_the_last_one_kept_are_kept_too(platform: str) -> None:
    logits = np.log([[0.1, 0.3, 0.1, 0.3, 0.1, 0.1]]).astype(np.float32)
    assert kept(logits, platform, top_k=1).tolist() == [[False, True, False, True, False, False]]
    assert kept(logits, platform, top_k=3).all()
    assert kept(logits, platform, top_p=0.4).tolist() == [[False, True, False, True, False, False]]
    assert kept(logits, platform, min_p=1.0).tolist() == [[False, True, False, True, False, False]]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_tokens_that_are_equally_likely_are_kept_together_wherever_they_stand(platform: str) -> None:
    """In more chunks than a search reads once it has narrowed, and at any top-k or top-p that ends among them."""
    logits = np.full((4, 25600), -3.0, np.float32)
    logits[:, 7], logits[:, 128::256] = 1.0, 0.0
    better = logits[0] >= 0
    masks = kept(logits, platform, top_k=[2, 50, 101, 102], top_p=[1.0, 0.5, 1.0, 1.0])
    assert (masks[:3] == better).all() and masks[3].all()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_without_filters_the_whole_tail_is_kept(platform: str) -> None:
    logits = np.array([[0.0, -30.0, -80.0, -200.0, -np.inf, -np.inf]], np.float32)
    assert kept(logits, platform).all()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_a_row_keeps_does_not_depend_on_the_other_rows(platform: str) -> None:
    """To the bit: alone, beside rows that are decided at once, and beside rows whose searches go on for long."""
    n, vocab_size = 6, 32000
    logits = random_logits(n, vocab_size)
    params = {"top_k": np.array([0, 20, 0, 5000, 1, 700]), "top_p": np.array([0.9, 0.95, 1.0, 0.999, 0.5, 0.99])}
    rows = per_row(n, params)

    def limits_of(chosen: list[int]) -> list[float]:
        arrays = SamplingArrays(seeds=np.zeros(len(chosen), np.int32), **{k: v[chosen] for k, v in rows.items()})
        return np.asarray(limits(logits[chosen], arrays, platform)).tolist()

    together = limits_of([0, 1, 2, 3, 4, 5])
    assert [limits_of([row])[0] for row in range(n)] == together
    assert limits_of([5, 0, 1, 1, 1, 1])[:2] == [together[5], together[0]]


@pytest.mark.parametrize("vocab_size", daily([32000, 101], every=2))
def test_a_row_without_filters_draws_the_same_token_beside_rows_with_and_without_them(vocab_size: int) -> None:
    """So a batch may run the program without filters as soon as no row has one."""
    n = 60
    logits, seeds = random_logits(n, vocab_size), np.arange(n)
    settings: dict[str, Any] = {"temperature": np.tile([0.3, 1.0, 1.7], n // 3)}
    plain = draw(logits, seeds, 7 * seeds, filtered=False, **settings)
    beside = draw(logits, seeds, 7 * seeds, **settings, top_k=np.where(seeds % 2, 0, 3))
    assert draw(logits, seeds, 7 * seeds, **settings).tolist() == plain.tolist()
    assert beside[1::2].tolist() == plain[1::2].tolist() and (beside != plain).any()


def test_a_gpu_reads_the_logits_in_a_fixed_number_of_passes() -> None:
    """Each pass of a search finds four bits. A loop that ends when it is done would wait for the host on a GPU."""
    num_rows, vocab_size = 4, 32000
    sampling = SamplingArrays(**{name: jax.ShapeDtypeStruct((num_rows,), dtype) for name, dtype in DTYPES.items()})
    logits, ids = jax.ShapeDtypeStruct((num_rows, vocab_size), jnp.float32), sampling.top_k

    def passes(filtered: bool) -> int:
        with on_a_device("cuda", "NVIDIA H200"):
            program = partial(sampler.sample, filtered=filtered)
            equations = list(equations_of(jax.jit(program).trace(logits, sampling, ids, ids).jaxpr.jaxpr))
        assert not {"while", "scan", "cond"} & {equation.primitive.name for equation in equations}
        reductions = [equation for equation in equations if equation.primitive.name in ("reduce", "reduce_sum")]
        return sum(equation.invars[0].aval.size == num_rows * vocab_size for equation in reductions)

    assert passes(filtered=False) == 1
    assert passes(filtered=True) == 1 + 2 * (8 + 1)


def equations_of(jaxpr: Any) -> Iterator[Any]:
    """All of `jaxpr`, those of inner ones too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", None)
            if inner is not None and equation.primitive.name != "reduce":
                yield from equations_of(inner)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7, "top_k": 20},
        {"top_p": 0.8},
        {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_drawn_frequencies_follow_the_probabilities(params: dict[str, Any]) -> None:
    num_draws = 20_000
    logits = np.random.default_rng(3).normal(0, 1.5, 101).astype(np.float32)
    positions, seeds = np.arange(num_draws) % 1000, np.arange(num_draws) // 1000
    tokens = draw(np.broadcast_to(logits, (num_draws, 101)), seeds, positions, **params)
    values = per_row(1, params)
    expected = num_draws * oracle(logits, *(values[name][0] for name in PARAMETERS))
    observed = np.bincount(tokens, minlength=101)
    assert observed[expected == 0].sum() == 0
    chi_square = ((observed - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    freedom = (expected > 0).sum() - 1
    assert abs(chi_square - freedom) < 4 * np.sqrt(2 * freedom)


def test_draws_of_neighbouring_seeds_and_positions_are_independent() -> None:
    logits = np.zeros((10_000, 64), np.float32)
    tokens = draw(logits, np.arange(10_000) // 100, np.arange(10_000) % 100).reshape(100, 100)
    for shifted in (tokens[1:, :] == tokens[:-1, :], tokens[:, 1:] == tokens[:, :-1]):
        assert abs(shifted.mean() - 1 / 64) < 4 * np.sqrt(1 / 64 / 9900)


def test_a_draw_depends_on_seed_and_position_and_not_on_its_row() -> None:
    logits = random_logits(8, 101)
    seeds, positions = np.array([0, 1, 2**31, 2**32 - 1, 5, 5, 6, 7]), np.array([0, 1, 2, 3, 900, 901, 900, 4])
    tokens = draw(logits, seeds, positions, top_p=0.95)
    order = np.random.default_rng(0).permutation(8)
    assert draw(logits[order], seeds[order], positions[order], top_p=0.95).tolist() == tokens[order].tolist()
    for i in range(8):
        assert draw(logits[i : i + 1], seeds[i], positions[i], top_p=0.95).tolist() == [tokens[i]]


def test_zero_temperature_and_one_candidate_take_the_most_likely_beside_others_that_draw() -> None:
    logits = np.broadcast_to(random_logits(1, 101), (300, 101))
    temperature, top_k = np.tile([0.0, 1.0, 1.0], 100), np.tile([0, 1, 0], 100)
    tokens = draw(logits, np.arange(300), np.arange(300), temperature=temperature, top_k=top_k)
    assert (tokens.reshape(100, 3)[:, :2] == logits[0].argmax()).all()
    assert len(set(tokens[2::3].tolist())) > 5


@pytest.mark.parametrize(
    "params", [{"temperature": 1e-4}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e4, "top_k": 2, "top_p": 0.4}]
)
def test_extreme_filters_leave_the_most_likely(params: dict[str, Any]) -> None:
    logits = np.array([[1.0, 4.0, 2.0, -np.inf, 3.0]] * 50, np.float32)
    assert (draw(logits, np.arange(50), np.arange(50), **params) == 1).all()


def test_impossible_tokens_are_never_drawn() -> None:
    logits = np.full((500, 101), -np.inf, np.float32)
    logits[:, [3, 50]] = 0.0, 0.1
    tokens = draw(logits, np.arange(500), np.arange(500), temperature=1e4)
    assert set(tokens.tolist()) == {3, 50}


@pytest.mark.parametrize("where", [0.0, 0.5, 1 - 2**-24])
def test_a_draw_at_either_end_is_a_token_with_weight(where: float) -> None:
    logits = np.full((1, 1000), -np.inf, np.float32)
    logits[0, [17, 400, 801]] = np.log([0.1, 0.3, 0.7])
    tokens = Tokens(sampler.in_chunks(jnp.asarray(logits), -jnp.inf), jnp.asarray(logits.max(axis=1)), jnp.ones(1))
    token = jax.jit(sampler.draw)(tokens, None, np.array([where], np.float32), otherwise=np.array([3]))
    assert token.tolist() == [17 if where == 0.0 else 801]
