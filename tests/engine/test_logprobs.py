from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsgl.engine.sampling import sampler, vocabulary
from jaxsgl.requests.request import MAX_TOP_LOGPROBS
from tests.grids import daily
from tests.numpy_sampling import logprobs as log_softmax


def random_logits(num_rows: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(vocab_size).normal(0, 3, (num_rows, vocab_size)).astype(np.float32)


@pytest.mark.parametrize("vocab_size", [1, 7, 20, 101, 1024, 32003])
def test_the_best_tokens_are_those_of_a_stable_sort(vocab_size: int) -> None:
    logits = random_logits(30, vocab_size)
    logits[::2] = np.round(logits[::2]) + 0.0  # many ties; top_k puts -0 behind 0
    k = min(MAX_TOP_LOGPROBS, vocab_size)
    values, ids = jax.jit(lambda x: sampler.top_k(x, k))(logits)
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, expected, axis=1))


def test_scores_are_log_probabilities() -> None:
    logits = 20 * random_logits(50, 1000)
    tokens = np.arange(50, dtype=np.int32) * 20
    named = np.random.default_rng(0).integers(0, 1000, (50, 3), np.int32)
    scores = jax.jit(sampler.score)(logits, tokens, named)
    expected = log_softmax(logits)
    of_named = np.take_along_axis(expected, named, axis=1)
    np.testing.assert_allclose(scores.named_logprobs, of_named, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(scores.logprobs, expected[np.arange(50), tokens], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(scores.top_logprobs, -np.sort(-expected)[:, :MAX_TOP_LOGPROBS], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("num_tokens", daily([129, 1, 400, 127, 128], every=2))
def test_slices_change_nothing(num_tokens: int) -> None:
    rng = np.random.default_rng(0)
    hidden, weights = rng.normal(size=(num_tokens, 8)).astype(np.float32), rng.normal(size=(8, 101)).astype(np.float32)
    targets = rng.integers(0, 101, num_tokens, dtype=np.int32)
    sliced = jax.jit(lambda h, t: vocabulary.score_in_slices(lambda part: part @ weights, h, t))(hidden, targets)
    whole = jax.jit(sampler.score)(jnp.asarray(hidden @ weights), jnp.asarray(targets))
    assert sliced.logprobs.shape == (num_tokens,)
    assert sliced.named_logprobs is whole.named_logprobs is None
    for one, other in zip(sliced[:3], whole[:3], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
