"""In fixed order a row has the same bits with any number of others: products, sums and splits, in interpreters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionOptions, PagedKv, ordered_product, paged_decode_attention, sums
from pallas_kernels.order import fixed_order, is_order_fixed
from pallas_kernels.partition import (
    BEGIN,
    END,
    FIXED_SPLIT_TOKENS,
    POSITION,
    SEQUENCE,
    SPLIT,
    SplitPlan,
    split_sequences,
)
from pallas_kernels.triton.ordered_product import parts_of
from pallas_kernels.triton.row_sums import sums_of_rows
from tests.grids import daily

pytestmark = pytest.mark.device


PRODUCTS = daily([(200, 1024, jnp.bfloat16), (130, 192, jnp.float32)], every=2)


@pytest.mark.parametrize(("outputs", "inputs", "dtype"), PRODUCTS)
def test_a_products_row_is_the_same_with_any_number_of_others(outputs: int, inputs: int, dtype: jnp.dtype) -> None:
    x, weights = (
        jax.random.normal(key, (size, inputs)).astype(dtype)
        for key, size in zip(jax.random.split(jax.random.key(0)), (257, outputs), strict=True)
    )
    together = np.asarray(ordered_product(x, weights, jnp.float32, backend="triton", interpret=True))
    right = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    np.testing.assert_allclose(together, right, atol=1e-5 * np.abs(right).max())
    for count in (1, 64, 65):  # 256 and fewer rows have a program for each part of the sums
        alone = ordered_product(x[:count], weights, jnp.float32, backend="triton", interpret=True)
        np.testing.assert_array_equal(np.asarray(alone), together[:count])
    parts = ordered_product(x[:2], weights, jnp.float32, in_parts=True, backend="triton", interpret=True)
    if parts_of(outputs, inputs) > 1:
        np.testing.assert_array_equal(np.asarray(parts[0] + parts[1]), together[:2])


def test_parts_of_a_product_follow_from_its_weights() -> None:
    assert [parts_of(*shape) for shape in ((4096, 4096), (12_288, 4096), (128, 1024), (151_936, 4096))] == [4, 2, 2, 1]


@pytest.mark.parametrize("length", [60, 5000])
def test_a_rows_sum_is_the_same_with_any_number_of_others(length: int) -> None:
    x = jax.random.normal(jax.random.key(1), (40, length))
    together = np.asarray(sums_of_rows(x, "sum", True))
    np.testing.assert_allclose(together, np.asarray(x, np.float64).sum(-1), atol=1e-4)
    for count in (1, 17):
        np.testing.assert_array_equal(np.asarray(sums_of_rows(x[:count], "sum", True)), together[:count])


def test_sums_of_programs_in_fixed_order_are_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pallas_kernels.native.library.load", lambda: "there is no compiler")
    x = jax.random.normal(jax.random.key(2), (3, 100))
    with fixed_order():
        assert is_order_fixed()
        inside = str(jax.make_jaxpr(lambda x: sums.log_sum_exp(x))(x))
        np.testing.assert_allclose(sums.log_sum_exp(x), jax.nn.logsumexp(x, axis=-1), rtol=1e-6)
    assert not is_order_fixed()
    assert "sums_of_rows" in inside and "sums_of_rows" not in str(jax.make_jaxpr(sums.log_sum_exp)(x))


split = jax.jit(split_sequences, static_argnums=(0, 2))


def splits_of(lengths: list[int], options: AttentionOptions) -> dict[int, list[tuple[int, ...]]]:
    """First tile, the tile after the last, position and number of each split, by its sequence."""
    plan = SplitPlan(len(lengths) * 8, 8, 33, FIXED_SPLIT_TOKENS // 64, 64, is_fixed=options.in_fixed_order)
    if not options.in_fixed_order:
        plan = SplitPlan(len(lengths) + 33, 8, 33, 2, 64)
    items = np.asarray(split(plan, jnp.array(lengths, jnp.int32), options).items)
    found: dict[int, list[tuple[int, ...]]] = {seq: [] for seq in range(len(lengths))}
    for item in items[items[:, BEGIN] < items[:, END]]:
        found[int(item[SEQUENCE])].append(tuple(int(item[column]) for column in (BEGIN, END, POSITION, SPLIT)))
    return found


@pytest.mark.parametrize("window", [None, 1500])
def test_splits_lie_between_multiples_whatever_the_batch(window: int | None) -> None:
    options = AttentionOptions(sliding_window=window, in_fixed_order=True)
    length = 5000
    alone, together = splits_of([length], options), splits_of([7000, 0, length, 900, 1024, 1025], options)
    assert alone[0] == together[2] and together[1] == []
    ends = [end for _, end, _, _ in together[2]]
    assert all(end * 64 % FIXED_SPLIT_TOKENS == 0 for end in ends[:-1]) and ends[-1] == -(-length // 64)
    begins = [begin for begin, _, _, _ in together[2]]
    assert begins == [0 if window is None else (length - window) // 64, *ends[:-1]]
    assert [split for *_, split in together[2]] == list(range(len(ends)))
    plain = AttentionOptions(sliding_window=window)
    assert splits_of([length], plain)[0] != splits_of([length] * 40, plain)[2]


@pytest.mark.parametrize("backend", daily(["triton", "mosaic_gpu"], every=2))
def test_a_decodes_row_is_the_same_with_any_others(backend: str) -> None:
    """On an absent chip whose programs are few, so that a plain decode cuts sequences by their total."""
    page, lengths = 64, np.array([2500, 1100, 0, 3000], np.int32)
    pages = -(-3072 // page)
    keys = jax.random.split(jax.random.key(3), 3)
    k, v = (jax.random.normal(key, (4 * pages + 1, 1, page, 64)).astype(jnp.bfloat16) for key in keys[:2])
    table = (1 + np.arange(4 * pages, dtype=np.int32)).reshape(4, pages)
    q = jax.random.normal(keys[2], (4, 2, 64)).astype(jnp.bfloat16)

    def decoded(rows: list[int]) -> np.ndarray:
        kv = PagedKv(k, v, jnp.asarray(table[rows]), jnp.asarray(lengths[rows]))
        with fixed_order():
            out = paged_decode_attention(q[np.array(rows)], kv, backend=backend, interpret=True)
        return np.asarray(out.astype(jnp.float32))

    together = decoded([0, 1, 2, 3])
    for row in (0, 1, 3):
        np.testing.assert_array_equal(decoded([row])[0], together[row])
