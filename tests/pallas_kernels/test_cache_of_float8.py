"""A float8 cache: every backend stores the same bits, and attends as near to bfloat16 as the digits of float8 allow.

Numbers of float8_e4m3fn have 4 significant bits: rounding moves one by 2.6% on average (root of the mean square), by
6.25% at most. Such errors of V average out like V itself does, and those of K move scores of unit normal numbers by as
much again: attention is off by about 3.7% of its norm, and `BOUND` holds for every backend.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionOptions, PagedKv, paged_decode_attention, paged_extend_attention, store_kv
from pallas_kernels.dispatch import BACKEND_OF_NAME
from pallas_kernels.paged_kv import FLOAT8, FLOAT8_BITS
from tests.grids import NIGHTLY
from tests.pallas_kernels.cases import dense_attention

BOUND = 0.06
BF16, F32 = jnp.bfloat16, jnp.float32
NUMBERS = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float32)


def hard_numbers() -> np.ndarray:
    """All numbers of float8, the middles between them, the float32 numbers next to those, and what it can't hold."""
    known = np.unique(NUMBERS[np.isfinite(NUMBERS)])
    middles = (known[1:] + known[:-1]) / 2
    near = [np.nextafter(middles, np.float32(side)) for side in (-np.inf, np.inf)]
    beyond = np.array([448.01, 464, 465, 1e4, 3e38, np.inf, np.nan], np.float32)
    return np.concatenate([known, middles, *near, beyond, -beyond]).astype(np.float32)


def rounded(numbers: np.ndarray) -> np.ndarray:
    """Bits of float8: to the nearest, ties to even, which NumPy's type does; saturated, which it doesn't do."""
    return np.clip(numbers, -448, 448).astype(FLOAT8).view(np.uint8)


@pytest.mark.parametrize(
    ("backend", "pages", "new", "scale"),
    [
        ("reference", FLOAT8, F32, None), ("reference", FLOAT8_BITS, F32, 0.37), ("xla", FLOAT8, BF16, None),
        ("xla", FLOAT8_BITS, F32, 0.37), ("triton", FLOAT8, F32, None), ("triton", FLOAT8, BF16, 0.37),
        ("mosaic_tpu", FLOAT8, BF16, None),
    ],
)  # fmt: skip
def test_every_backend_stores_the_nearest_numbers_and_never_infinity(
    backend: str, pages: Any, new: Any, scale: float | None
) -> None:
    head_dim, page_size = 128, 64
    numbers = hard_numbers() * np.float32(scale or 1)
    num_tokens = -(-len(numbers) // head_dim)
    rows = np.resize(numbers, (num_tokens, 1, head_dim))
    k = jnp.asarray(rows, new)
    empty = jnp.zeros((3, 1, page_size, head_dim), pages)
    kv = PagedKv(empty, empty, jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32), scale, scale)
    slots = jnp.arange(page_size, page_size + num_tokens, dtype=jnp.int32)
    stored = store_kv(kv, k, -k, slots, backend=backend, interpret=BACKEND_OF_NAME[backend].has_interpreter)
    exact = np.asarray(k.astype(F32))
    exact = exact if scale is None else np.asarray(jnp.asarray(exact) / jnp.float32(scale))
    for array, expected in ((stored.k, rounded(exact)), (stored.v, rounded(-exact))):
        bits = np.asarray(array)[1, 0, :num_tokens].view(np.uint8)
        np.testing.assert_array_equal(bits & 0x7F, expected[:, 0] & 0x7F)
        is_number = (bits & 0x7F) != 0x7F  # the sign of NaN means nothing
        np.testing.assert_array_equal(bits[is_number], expected[:, 0][is_number])


# backend, dtype of queries, pages, page size, query heads per kv head, head size, ops by day (is it decode?).
# mosaic_gpu extends over float8 in test_hopper_extend.py: its warpgroups wait for each other in XLA's pool, forever if
# that has a thread or two.
ATTENTIONS = [
    ("reference", F32, FLOAT8, 16, 2, 64, (False,)),
    ("xla", F32, FLOAT8_BITS, 16, 2, 64, (True, False)),
    ("xla", BF16, FLOAT8, 16, 2, 64, (False,)),
    ("native", F32, FLOAT8_BITS, 16, 2, 64, (True, False)),
    ("triton", BF16, FLOAT8, 16, 2, 64, (True,)),
    ("mosaic_gpu", BF16, FLOAT8, 16, 2, 64, (True,)),
    ("mosaic_tpu", BF16, FLOAT8, 32, 2, 128, (True,)),
]


@pytest.mark.parametrize(
    ("case", "is_decode"),
    [
        (case, is_decode)
        for case in ATTENTIONS
        for is_decode in ((True,) if case[0] == "mosaic_gpu" else (True, False))
        if NIGHTLY or is_decode in case[-1]
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "decode" if value else "extend",
)
def test_attention_is_near_that_over_bfloat16(
    case: tuple[Any, ...], is_decode: bool, request: pytest.FixtureRequest
) -> None:
    """With scales as calibration finds them, the largest number becoming 448; by night without scales, too."""
    backend, dtype, pages, page_size, group, head_dim, _ = case
    if backend == "native":
        request.getfixturevalue("native_runs_here")
    rng = np.random.default_rng(head_dim)
    lengths, queries = np.array([70, 33], np.int32), np.array([9, 3])
    table = 1 + np.arange(2 * (96 // page_size), dtype=np.int32).reshape(2, -1)
    shape = (table.size + 1, 2, page_size, head_dim)
    k, v = (jnp.asarray(rng.normal(size=shape), BF16) for _ in range(2))
    offsets = np.concatenate([[0], np.cumsum(np.ones(2, int) if is_decode else queries)]).astype(np.int32)
    q = jnp.asarray(rng.normal(size=(offsets[-1], 2 * group, head_dim)), dtype)
    op: Any = paged_decode_attention if is_decode else paged_extend_attention
    attend = functools.partial(op, backend=backend, interpret=BACKEND_OF_NAME[backend].has_interpreter)
    expected = dense_attention(q, offsets, PagedKv(k, v, jnp.asarray(table), jnp.asarray(lengths)), AttentionOptions())
    for scale in (float(jnp.abs(k).max()) / 448, *([1.0] if NIGHTLY else [])):
        slots = jnp.arange(shape[0] * page_size, dtype=jnp.int32)
        empty = jnp.zeros(shape, pages)
        kv = PagedKv(empty, empty, jnp.asarray(table), jnp.asarray(lengths), scale, scale)
        new_k, new_v = (x.swapaxes(1, 2).reshape(-1, 2, head_dim) for x in (k, v))
        kv = store_kv(kv, new_k, new_v, slots, backend="xla")
        arguments = (q, kv) if is_decode else (q, jnp.asarray(offsets), kv)
        actual = np.asarray(jax.jit(attend)(*arguments), np.float64)
        error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
        assert 0.005 < error < BOUND, f"{backend}: {error:.4f} with scale {scale:.4f}"
