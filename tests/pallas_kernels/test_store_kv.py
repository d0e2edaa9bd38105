"""Every backend stores what the reference stores, and storing copies nothing."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import PagedKv, paged_decode_attention, paged_extend_attention, store_kv
from pallas_kernels.specs import SMALL_SPECS, ArgSpec
from tests.compiling import as_users_compile
from tests.pallas_kernels.cases import random_store

pytestmark = [pytest.mark.device, as_users_compile]

BY_NAME = {spec.name: spec for spec in SMALL_SPECS}


@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.parametrize("name", ["plain", "page_size_1", "groups_3_odd_page_size", "bfloat16", "float16", "float8"])
def test_stored_tokens_land_in_their_slots_and_nowhere_else(name: str, backend: str) -> None:
    spec = BY_NAME[name]
    num_slots = spec.num_pages * spec.page_size
    store = jax.jit(functools.partial(store_kv, backend=backend, interpret=backend == "triton"))

    @settings(max_examples=5, derandomize=True, database=None)
    @given(st.integers(0, spec.num_tokens), st.integers(0, 2**32 - 1))
    def prop(num_real: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        kv, k, v = random_store(spec, rng)
        real = spec.page_size + rng.permutation(num_slots - spec.page_size)[:num_real]
        padding = rng.integers(0, spec.page_size, spec.num_tokens - num_real)  # the dummy page, slots repeated
        slots = jnp.asarray(np.concatenate([real, padding]), jnp.int32)
        result = store(kv, k, v, slots)
        for old, new, stored in ((kv.k, k, result.k), (kv.v, v, result.v)):
            expected = np.array(old)
            for slot, token in zip(real, np.asarray(new), strict=False):
                expected[slot // spec.page_size, :, slot % spec.page_size] = token
            assert (np.asarray(stored)[1:] == expected[1:]).all()

    prop()


def test_reference_agrees_with_a_loop_over_tokens() -> None:
    ints = jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)
    kv = PagedKv(jnp.zeros((3, 2, 4, 8)), jnp.ones((3, 2, 4, 8)), *ints)
    k, v = jnp.full((2, 2, 8), 5.0), jnp.full((2, 2, 8), 6.0)
    stored = store_kv(kv, k, v, jnp.array([4, 11], jnp.int32), backend="reference")
    assert (stored.k == kv.k.at[1, :, 0].set(5).at[2, :, 3].set(5)).all()
    assert (stored.v == kv.v.at[1, :, 0].set(6).at[2, :, 3].set(6)).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("kind", ["decode", "extend"])
def test_a_donated_cache_is_never_copied(kind: str, dtype: jnp.dtype) -> None:
    """Two layers of store and attention: each cache array is aliased, and no temporary comes near its size."""
    spec = ArgSpec("step", 5, 11, 512, 16, 2, 2, 16, dtype=dtype)

    def step(caches, q, k, v, slots, tables, *offsets):
        new_caches = []
        for cache in caches:
            kv = store_kv(PagedKv(*cache, *tables), k, v, slots)
            attention: Any = paged_decode_attention if kind == "decode" else paged_extend_attention
            q = q + attention(q, *offsets, kv)
            new_caches.append((kv.k, kv.v))
        return new_caches, q

    kv, k, v, slots = spec.store_args()
    q, *offsets, _ = spec.decode_args() if kind == "decode" else spec.extend_args()
    caches, tables = [(kv.k, kv.v)] * 2, (kv.page_table, kv.lengths)
    compiled = jax.jit(step, donate_argnums=0).lower(caches, q, k, v, slots, tables, *offsets).compile()

    cache_bytes = kv.k.size * jnp.dtype(dtype).itemsize
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 4 * cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 4
    shape = ",".join(map(str, kv.k.shape))
    made_by = set(re.findall(rf"= \w+\[{shape}\]\S* ([\w-]+)\(", compiled.as_text() or ""))
    assert "scatter" in made_by
    assert not made_by & {"copy", "convert", "transpose", "copy-start"}
