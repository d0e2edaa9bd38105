"""What the compiler makes of a step: no copy of the cache, and programs for platforms that aren't here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsgl.batch.inputs import Bucket, host_views, layout, packed_len
from jaxsgl.engine import edits
from jaxsgl.engine.programs import ProgramSpec, keys_of
from jaxsgl.engine.sizing import KvShape
from jaxsgl.engine.state import KvBuffers, allocate
from jaxsgl.engine.step import unpack
from jaxsgl.models import abstract_model
from jaxsgl.weights import random_params
from tests.engine.driving import Plain
from tests.plain_model import mesh_of

NUM_PAGES = 4099  # no other dimension is so large
BUCKETS = [
    Bucket("decode", 4, 4, 16, False),
    Bucket("extend", 32, 4, 16, False),
    Bucket("score", 32, 4, 16, False),
    Bucket("decode", 4, 4, 16, True, num_steps=3),
]


@pytest.fixture(scope="module")
def kv(plain: Plain) -> KvBuffers:
    shape = KvShape(plain.arch.num_layers, plain.arch.num_kv_heads, plain.arch.head_dim, 4, jnp.dtype("float32"))
    return allocate(shape, NUM_PAGES, mesh_of())


@pytest.fixture(scope="module")
def spec(plain: Plain, kv: KvBuffers) -> Iterator[ProgramSpec]:
    dtype = jnp.dtype("float32")
    graphdef, _ = abstract_model(plain.arch, dtype)
    params = random_params(plain.arch, dtype, mesh_of(), 0)
    yield ProgramSpec(graphdef, params, kv, 8, plain.arch.vocab_size, "xla", mesh_of())


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_a_step_updates_the_cache_in_place(spec: ProgramSpec, kv: KvBuffers, bucket: Bucket) -> None:
    compiled = spec.trace_forward(bucket).lower().compile()
    cache_bytes = sum(pages.nbytes for pages in jax.tree.leaves(kv))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < kv.k[0].nbytes
    hlo = compiled.as_text()
    assert f"[{NUM_PAGES}," in hlo
    assert not re.findall(rf"= \w+\[{NUM_PAGES},[^=]* (?:copy|transpose|convert)\(.*", hlo)


def test_several_steps_copy_no_weights_where_formats_differ(plain: Plain, kv: KvBuffers) -> None:
    """XLA would convert the whole embedding before the loop; one step converts what it reads."""
    weights, activations = jnp.dtype("bfloat16"), jnp.dtype("float32")
    graphdef, _ = abstract_model(plain.arch, weights, activations)
    params = random_params(plain.arch, weights, mesh_of(), 0)
    spec = ProgramSpec(graphdef, params, kv, 8, plain.arch.vocab_size, "xla", mesh_of())
    one, three = (
        spec.trace_forward(replace(BUCKETS[0], num_steps=n)).lower().compile().memory_analysis() for n in (1, 3)
    )
    embedding_bytes = activations.itemsize * plain.arch.vocab_size * plain.arch.hidden_size
    assert three.temp_size_in_bytes - one.temp_size_in_bytes < embedding_bytes / 2


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_a_step_lowers_for_accelerators(spec: ProgramSpec, bucket: Bucket, platform: str) -> None:
    text = spec.trace_forward(bucket).lower(lowering_platforms=(platform,)).as_text()
    assert f"{NUM_PAGES}x2x4x16" in text
    for small in (spec.trace_sampling(4), spec.trace_featured(4), spec.trace_set_row()):
        assert "stablehlo" in small.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("bucket", BUCKETS[:2], ids=str)
def test_features_leave_the_programs_and_inputs_of_plain_batches_alone(spec: ProgramSpec, bucket: Bucket) -> None:
    """Greedy, drawn and featured batches of one shape share one forward program; the layout has no more fields."""
    forms = [bucket, replace(bucket, sampled=True), replace(bucket, sampled=True, featured=True)]
    assert len({keys_of(form)[0] for form in forms}) == 1
    assert [[key.kind for key in keys_of(form)[1:]] for form in forms] == [[], ["sampling"], ["featured"]]
    s, t, p = bucket.num_seqs, bucket.num_tokens, bucket.num_pages
    assert {packed_len(form) for form in forms} == {3 * t + s * p + 8 * s + 1}
    outputs = jax.tree.leaves(spec.trace_forward(bucket).out_info)
    assert len(outputs) == len(jax.tree.leaves(spec.kv)) + 4
    texts = [trace(4).lower().as_text() for trace in (spec.trace_sampling, spec.trace_featured)]
    assert ["top_k" in text for text in texts] == [False, True]


def test_the_tables_of_edits_are_changed_in_place(spec: ProgramSpec) -> None:
    table_bytes = edits.table_bytes(spec.num_rows, spec.vocab_size)
    counts = 4 * (spec.num_rows + 1) * spec.vocab_size
    assert spec.trace_set_row().lower().compile().memory_analysis().alias_size_in_bytes >= table_bytes
    featured = spec.trace_featured(4).lower().compile().memory_analysis()
    assert featured.alias_size_in_bytes >= counts


@pytest.mark.parametrize("kind", ["extend", "score"])
def test_the_device_unpacks_what_the_host_packed(kind: Literal["extend", "score"]) -> None:
    bucket = Bucket(kind, 8, 3, 5, True)
    packed = np.random.default_rng(0).integers(-(2**31), 2**31, packed_len(bucket), dtype=np.int32)
    on_device = jax.jit(lambda x: vars(unpack(x, bucket)))(packed)
    on_host = vars(host_views(packed, bucket))
    assert (on_host["targets"] is None) == (on_device["targets"] is None) == (kind == "extend")
    for name, view in ((name, on_host[name]) for name in layout(bucket)):
        assert on_device[name].dtype == view.dtype
        assert np.asarray(on_device[name]).tobytes() == view.tobytes(), name
