"""Every backend makes the same queries, keys and values of a fused product, and stores them in place."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import PagedKv, rotate_and_store, store_kv
from pallas_kernels.specs import SMALL_SPECS, ArgSpec
from tests.grids import daily, pairwise
from tests.pallas_kernels.cases import assert_close, random_qkv, random_store
from tests.pallas_kernels.test_dispatch import on_an_h100

BY_NAME = {spec.name: spec for spec in SMALL_SPECS}
NAMES = (
    "groups_3_odd_page_size",
    "bfloat16",
    *daily(("plain", "page_size_1", "groups_16", "head_dim_64", "float16"), every=9),
)
CASES = pairwise(("triton", "xla"), NAMES, (True, False), (False, True))


def batch(spec: ArgSpec, seed: int, **parts: bool) -> tuple[Any, PagedKv, jax.Array]:
    """qkv, a cache full of numbers, and slots: all different, but for padding tokens at the end."""
    rng = np.random.default_rng(seed)
    kv, *_ = random_store(spec, rng)
    num_real = spec.num_tokens - 3
    real = spec.page_size + rng.permutation(spec.num_pages * spec.page_size - spec.page_size)[:num_real]
    slots = np.concatenate([real, rng.integers(0, spec.page_size, 3)])
    return random_qkv(spec, rng, **parts), kv, jnp.asarray(slots, jnp.int32)


@pytest.mark.parametrize(("backend", "name", "norms", "bias"), CASES)
def test_every_backend_does_what_the_reference_does(backend: str, name: str, norms: bool, bias: bool) -> None:
    """Within the rounding of the format: XLA rounds after bias, norm and scale, the kernel and the reference once."""
    spec = BY_NAME[name]
    qkv, kv, slots = batch(spec, 1, norms=norms, bias=bias)
    run = jax.jit(functools.partial(rotate_and_store, backend=backend, interpret=backend == "triton"))
    q, stored = run(qkv, kv, slots)
    expected_q, expected = rotate_and_store(qkv, kv, slots, backend="reference")
    assert q.dtype == spec.dtype and q.shape == (spec.num_tokens, spec.num_kv_heads * spec.num_groups, spec.head_dim)
    assert_close(q, expected_q, spec.dtype)
    for pages, right, old in ((stored.k, expected.k, kv.k), (stored.v, expected.v, kv.v)):
        assert_close(pages[1:], right[1:], spec.dtype)
        untouched = np.asarray(right == old)
        assert (np.asarray(pages)[1:][untouched[1:]] == np.asarray(old)[1:][untouched[1:]]).all()


def test_the_reference_agrees_with_complex_numbers() -> None:
    """A token at a time in float64: a head's halves are the real and the imaginary parts of numbers that turn."""
    spec = BY_NAME["groups_3_odd_page_size"]
    qkv, kv, slots = batch(spec, 2)
    q, stored = rotate_and_store(qkv, kv, slots, backend="reference")
    product, cos, sin = (np.asarray(a, np.float64) for a in (qkv.product, qkv.cos, qkv.sin))
    bias, q_norm, k_norm = (np.asarray(a, np.float64)[qkv.layer] for a in (qkv.bias, qkv.q_norm, qkv.k_norm))
    half = spec.head_dim // 2
    for token, slot in enumerate(np.asarray(slots)[:-3]):
        for head in range(spec.num_kv_heads):
            *queries, key, value = product[token, head] + bias[head]
            for row, scale, actual in (
                *((x, q_norm, q[token, head * spec.num_groups + i]) for i, x in enumerate(queries)),
                (key, k_norm, stored.k[slot // spec.page_size, head, slot % spec.page_size]),
            ):
                row = row / np.sqrt(np.mean(row**2) + qkv.eps) * scale
                turned = (row[:half] + 1j * row[half:]) * (cos + 1j * sin)[token, 0]
                assert_close(actual, np.concatenate([turned.real, turned.imag]), jnp.float32)
            assert_close(stored.v[slot // spec.page_size, head, slot % spec.page_size], value, jnp.float32)


@pytest.mark.parametrize("name", ["float8", "float8_bfloat16"])
def test_a_float8_cache_gets_what_store_kv_makes_of_the_same_rows(name: str) -> None:
    spec = BY_NAME[name]
    rng = np.random.default_rng(3)
    kv, *_ = random_store(spec, rng, **spec.scales)
    qkv, slots = random_qkv(spec, rng), jnp.arange(spec.page_size, spec.page_size + spec.num_tokens, dtype=jnp.int32)
    q, stored = jax.jit(rotate_and_store)(qkv, kv, slots)

    def split_then_store(qkv: Any, kv: PagedKv, slots: jax.Array) -> tuple[jax.Array, PagedKv]:
        q, k, v = qkv.split()
        return q, store_kv(kv, k, v, slots)

    expected_q, expected = jax.jit(split_then_store)(qkv, kv, slots)
    assert (q == expected_q).all()
    for pages, right in ((stored.k, expected.k), (stored.v, expected.v)):
        assert (pages.astype(jnp.float32) == right.astype(jnp.float32))[1:].all()


@pytest.mark.parametrize("norms", [True, False])
def test_a_gpu_runs_one_kernel_that_reads_the_product_itself(norms: bool) -> None:
    """No slice of the product is made before it, and the cache is aliased."""
    kv, qkv, slots = BY_NAME["head_dim_64"].rotate_and_store_args(norms=norms)
    with on_an_h100():
        text = str(jax.make_jaxpr(rotate_and_store)(qkv, kv, slots))
    assert text.count("pallas_call") == 1 and "name=rotate_and_store" in text
    for op in ("slice", "concatenate", "scatter", "copy", "convert_element_type"):
        assert f"= {op}[" not in text.split("pallas_call")[0].split("rotate_and_store")[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda qkv, kv, slots: (qkv, kv, slots[1:]), r"slots \(\d+,\) \[T\]"),
        (lambda qkv, kv, slots: (qkv, kv, slots.astype(jnp.float32)), "slots has dtype float32; it must be int32"),
    ],
)
def test_wrong_arguments_are_named(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotate_and_store(*change(*batch(BY_NAME["plain"], 4)))
