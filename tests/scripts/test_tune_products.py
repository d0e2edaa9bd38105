"""Block sizes of products: which are tried, and that a candidate is measured only if its result is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tune_products import MOST_SHARED_KIB, PRODUCTS, Product, arrays, candidates, measured, spread

SMALL = Product("quantized_product", 4, 64, 256, "int4", 128, backend="xla")


def test_every_kernel_has_candidates_that_fit_a_multiprocessor_and_xlas_products_have_none() -> None:
    for product in PRODUCTS:
        found = candidates(product)
        assert bool(found) == (product.backend == "triton")
        of_a_stage = {"int4": 0.5, "mxfp4": 0.5, "float8_e4m3fn": 1, "bfloat16": 2}[product.dtype]
        for sizes in found:  # the tiles of weights alone
            depth = sizes.get("tile_inputs", sizes.get("tile_bytes", 256) // 2 if product.dtype == "bfloat16" else 128)
            assert sizes["num_stages"] * sizes["tile_outputs"] * depth * of_a_stage < MOST_SHARED_KIB * 1024
    assert len({product.name for product in PRODUCTS}) == len(PRODUCTS)


def test_each_product_begins_with_its_tables_sizes_and_every_candidate_comes_once() -> None:
    order = list(spread(PRODUCTS))
    assert [sizes for _, sizes in order[: len(PRODUCTS)]] == [{}] * len(PRODUCTS)
    for index, product in enumerate(PRODUCTS):
        mine = [tuple(sizes.items()) for place, sizes in order if place == index and sizes]
        assert sorted(mine) == sorted(tuple(sizes.items()) for sizes in candidates(product))


@pytest.mark.parametrize("product", [SMALL, Product("product", 4, 64, 256, "bfloat16", backend="xla")])
def test_a_right_result_is_timed_and_a_wrong_one_is_not(product: Product, tmp_path: Path) -> None:
    call, own = arrays(product)
    right = np.asarray(call(*own[0]), np.float32)
    with (tmp_path / "lock").open("w") as lock:
        assert measured(product, {}, call, own, right, lock)["us"] > 0
        wrong = measured(product, {}, call, own, right + 1000, lock)
    assert "us" not in wrong and wrong["note"].startswith("differs by")
