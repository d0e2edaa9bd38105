"""Splits of a decode are merged into one softmax, in one kernel; what was never written counts nothing."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_decode_attention
from pallas_kernels.partition import LOG2_E
from pallas_kernels.specs import ArgSpec
from pallas_kernels.triton.merge import merge_splits
from tests.pallas_kernels.lower_everything import on_a_device

HEADS, GROUPS, PADDED, WIDTH = 2, 3, 8, 24  # neither is a power of two; more rows than groups, as TMA writes them


def merged(parts: Any, lse: Any, counts: Any, sinks: Any = None, dtype: Any = jnp.float32) -> np.ndarray:
    args = (jnp.asarray(parts), jnp.asarray(lse, jnp.float32), jnp.asarray(counts, jnp.int32))
    out = merge_splits(*args, None if sinks is None else jnp.asarray(sinks), GROUPS, dtype, interpret=True)
    return np.asarray(out, np.float64).reshape(len(counts), HEADS, GROUPS, WIDTH)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("most", [1, 7, 40])
def test_merged_splits_equal_one_softmax_and_absent_ones_count_nothing(most: int, has_sinks: bool) -> None:
    rng = np.random.default_rng(most)
    counts = np.array([0, most, *rng.integers(1, most + 1, 2)])  # a padding row, a full one, and two others
    rows = (most, len(counts), HEADS, PADDED)
    scores, values = rng.normal(size=(*rows, 8)) * 20, rng.normal(size=(*rows, 8, WIDTH))
    sinks = rng.normal(size=HEADS * GROUPS).astype(np.float32) * 10 if has_sinks else None
    is_there = np.arange(most)[:, None] < counts

    weights = np.exp2(scores)
    lse = np.log2(weights.sum(-1))
    partials = np.einsum("xskgl,xskglh->xskgh", weights / weights.sum(-1, keepdims=True), values)
    partials[~is_there] = lse[~is_there] = np.nan  # never written
    rounded = partials.astype(jnp.bfloat16)
    parts = np.stack([rounded, (partials - rounded.astype(np.float64)).astype(jnp.bfloat16)])
    out = merged(parts, lse, counts, sinks)

    weights *= is_there[..., None, None, None]
    total = weights.sum((0, 4))
    if sinks is not None:
        total[:, :, :GROUPS] += np.exp2(sinks * LOG2_E).reshape(HEADS, GROUPS)
    expected = np.einsum("xskgl,xskglh->skgh", weights, values)[1:] / total[1:, ..., None]
    np.testing.assert_allclose(out[1:], expected[:, :, :GROUPS], rtol=1e-3, atol=1e-4)
    assert (out[0] == 0).all()


def test_a_split_decode_is_two_kernels_on_a_gpu() -> None:
    spec = ArgSpec("", 1, 1, 64, 64, 8, 2, 128, dtype=jnp.bfloat16)
    with on_a_device("cuda", "NVIDIA H200", 132):
        for backend in ("triton", "mosaic_gpu"):
            call = jax.jit(lambda *a, backend=backend: paged_decode_attention(*a, backend=backend))
            text = call.trace(*spec.decode_args()).lower(lowering_platforms=("cuda",)).as_text()
            assert text.count("stablehlo.custom_call @") == 2 and "merge_splits" in text
