"""Every backend makes the same queries, keys and values of a fused product, and stores them in place."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import PagedKv, rotate_and_store, store_kv
from pallas_kernels.specs import SMALL_SPECS, ArgSpec
from pallas_kernels.triton.float8 import from_words, pack
from tests.grids import NIGHTLY, covering, daily
from tests.pallas_kernels.cases import assert_close, random_qkv, random_store
from tests.pallas_kernels.test_dispatch import on_an_h100

BY_NAME = {spec.name: spec for spec in SMALL_SPECS}
OTHERS = ("plain", "page_size_1", "groups_16", "head_dim_64", "float16")
NAMES = ("groups_3_odd_page_size", "bfloat16", "heads_of_80", "heads_of_96", *(OTHERS if NIGHTLY else ()))
CASES = covering(("triton", "xla"), NAMES, (True, False), (False, True))


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
    assert q.dtype == spec.dtype and q.shape == (spec.num_tokens, spec.num_kv_heads * spec.num_groups, spec.width)
    assert_close(q, expected_q, spec.dtype)
    untouched = np.ones(kv.k.shape[0] * spec.page_size, bool)
    untouched[np.asarray(slots)] = False
    page, place = np.nonzero(untouched.reshape(-1, spec.page_size)[1:])
    for pages, right, old in ((stored.k, expected.k, kv.k), (stored.v, expected.v, kv.v)):
        assert_close(pages[1:], right[1:], spec.dtype)
        assert (np.asarray(pages)[page + 1, :, place] == np.asarray(old)[page + 1, :, place]).all()


@pytest.mark.parametrize("backend", ["triton", "xla", "reference"])
@pytest.mark.parametrize("name", daily(["heads_of_80", "heads_of_96"], every=2))
def test_a_cache_wider_than_the_heads_gets_them_with_zeros_after_them(name: str, backend: str) -> None:
    spec = BY_NAME[name]
    qkv, kv, slots = batch(spec, 5)
    narrow = dataclasses.replace(kv, k=kv.k[..., : spec.head_dim], v=kv.v[..., : spec.head_dim])
    q, stored = rotate_and_store(qkv, kv, slots, backend=backend, interpret=backend == "triton")
    expected_q, expected = rotate_and_store(qkv, narrow, slots, backend="xla")
    assert_close(q[..., : spec.head_dim], expected_q, spec.dtype)
    assert (q[..., spec.head_dim :] == 0).all()
    where = slots[:-3] // spec.page_size, slice(None), slots[:-3] % spec.page_size
    for pages, right in ((stored.k, expected.k), (stored.v, expected.v)):
        assert_close(pages[where][..., : spec.head_dim], right[where], spec.dtype)
        assert (pages[where][..., spec.head_dim :] == 0).all()


@pytest.mark.parametrize("rotates_first", [False, True])
def test_the_reference_agrees_with_complex_numbers(rotates_first: bool) -> None:
    """A token at a time in float64: a head's halves are the real and the imaginary parts of numbers that turn."""
    spec = BY_NAME["groups_3_odd_page_size"]
    qkv, kv, slots = batch(spec, 2)
    qkv = dataclasses.replace(qkv, rotates_first=rotates_first)
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
                row = row / np.sqrt(np.mean(row**2) + qkv.eps) * (1 if rotates_first else scale)
                turned = (row[:half] + 1j * row[half:]) * (cos + 1j * sin)[token, 0]
                right = np.concatenate([turned.real, turned.imag]) * (scale if rotates_first else 1)
                assert_close(actual, right, jnp.float32)
            assert_close(stored.v[slot // spec.page_size, head, slot % spec.page_size], value, jnp.float32)


@pytest.mark.parametrize(("backend", "interpret"), [("triton", True), ("xla", False)])
def test_values_are_normalized_without_scales_where_they_are_at_all(backend: str, interpret: bool) -> None:
    spec = BY_NAME["groups_3_odd_page_size"]
    plain, kv, slots = batch(spec, 2)
    qkv = dataclasses.replace(plain, normalizes_values=True)
    where = slots[:-3] // spec.page_size, slice(None), slots[:-3] % spec.page_size
    q, stored = rotate_and_store(qkv, kv, slots, backend=backend, interpret=interpret)
    values = np.asarray(stored.v[where], np.float64)
    np.testing.assert_allclose(np.square(values).mean(axis=-1), 1.0, atol=1e-3)
    expected_q, expected = rotate_and_store(qkv, kv, slots, backend="reference")
    assert_close(stored.v[where], expected.v[where], spec.dtype)
    assert_close(q[:-3], expected_q[:-3], spec.dtype)
    untouched = rotate_and_store(plain, kv, slots, backend=backend, interpret=interpret)[1]
    assert_close(stored.k[where], untouched.k[where], spec.dtype)


def test_the_kernel_normalizes_after_the_rotation_too() -> None:
    spec = BY_NAME["groups_3_odd_page_size"]
    qkv, kv, slots = batch(spec, 2)
    qkv = dataclasses.replace(qkv, rotates_first=True)
    q, stored = rotate_and_store(qkv, kv, slots, backend="triton", interpret=True)
    expected_q, expected = rotate_and_store(qkv, kv, slots, backend="reference")
    assert_close(q[:-3], expected_q[:-3], spec.dtype)
    where = slots[:-3] // spec.page_size, slice(None), slots[:-3] % spec.page_size
    assert_close(stored.k[where], expected.k[where], spec.dtype)


@pytest.mark.parametrize(("backend", "interpret"), [("triton", True), ("xla", False)])
def test_a_product_in_parts_with_gates_yields_what_its_rounded_sum_does_without_them(
    backend: str, interpret: bool
) -> None:
    spec = BY_NAME["groups_3_odd_page_size"]
    plain, kv, slots = batch(spec, 2)
    rng = np.random.default_rng(7)
    heads = spec.num_groups + 2
    parts = rng.standard_normal((4, spec.num_tokens, spec.num_kv_heads, heads + spec.num_groups, spec.head_dim))
    qkv = dataclasses.replace(
        plain, product=jnp.asarray(parts, jnp.float32), num_gates=spec.num_groups, dtype_of_sum=jnp.dtype("bfloat16")
    )
    summed = jnp.asarray(parts, jnp.float32).sum(axis=0).astype(jnp.bfloat16)
    np.testing.assert_array_equal(qkv.gates, summed[:, :, heads:])
    q, stored = rotate_and_store(qkv, kv, slots, backend=backend, interpret=interpret)
    whole = dataclasses.replace(plain, product=summed[:, :, :heads])
    expected_q, expected = rotate_and_store(whole, kv, slots, backend=backend, interpret=interpret)
    assert q.dtype == jnp.bfloat16
    np.testing.assert_array_equal(q, expected_q)
    np.testing.assert_array_equal(stored.k, expected.k)
    np.testing.assert_array_equal(stored.v, expected.v)


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *daily([("triton", "float8_bfloat16"), ("triton", "float8")], every=2),
        ("triton", "heads_of_80_float8"),
        ("xla", "float8"),
    ],
)
def test_a_float8_cache_gets_what_store_kv_makes_of_the_same_rows(backend: str, name: str) -> None:
    """Values to the bit. Keys but where an earlier rounding decided: nearly all, the rest a code off."""
    spec = BY_NAME[name]
    rng = np.random.default_rng(3)
    kv, *_ = random_store(spec, rng, **spec.scales)
    slots = jnp.arange(spec.page_size, spec.page_size + spec.num_tokens, dtype=jnp.int32)
    qkv = random_qkv(spec, rng, bias=False)
    q, stored = rotate_and_store(qkv, kv, slots, backend=backend, interpret=backend == "triton")
    expected_q, k, v = qkv.split()
    expected = store_kv(kv, k, v, slots)
    assert_close(q[..., : spec.head_dim], expected_q, spec.dtype)
    assert (numbers(stored.v) == numbers(expected.v)).all()
    keys, right = numbers(stored.k), numbers(expected.k)
    assert (keys == right).mean() > 0.98
    # What nearly cancels in a rotation has errors of the format's rounding of 1, over the scale.
    np.testing.assert_allclose(keys, right, rtol=0.13, atol=2**-8 / float(spec.scales["k_scale"]))


def numbers(pages: jax.Array) -> np.ndarray:
    return np.asarray(pages.astype(jnp.float32))[1:]


def test_words_of_float8_are_rounded_as_elsewhere() -> None:
    codes = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    finite = np.sort(codes[np.isfinite(codes)])
    ties = (finite[1:] + finite[:-1]) / 2
    chosen = np.concatenate([codes, ties, np.nextafter(ties, 1e9), [448, 464, -1e9, np.inf, -np.inf, 2.0**-10, 1e-30]])
    values = jnp.asarray(chosen[: len(chosen) // 4 * 4], jnp.float32).reshape(-1, 4)
    right = jnp.clip(values, -448, 448).astype(jnp.float8_e4m3fn)
    np.testing.assert_array_equal(numbers(from_words(pack(tuple(values.T))[:, None])), numbers(right))


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
