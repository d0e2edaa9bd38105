"""What the compiler makes of a step: no copy of the cache, and programs for platforms that aren't here."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsgl.batch.buckets import Capacity
from jaxsgl.batch.inputs import Bucket, packed_len, unpack
from jaxsgl.engine.layer_state import layer_states
from jaxsgl.engine.state import allocate
from jaxsgl.engine.step_programs import ProgramSpec, keys_of
from jaxsgl.engine.tables import edit_table_bytes
from jaxsgl.models import abstract_model
from jaxsgl.weights import random_params
from pallas_kernels import KernelChoice
from tests.engine.driving import Plain
from tests.grids import NIGHTLY
from tests.plain_model import mesh_of

NUM_PAGES, NUM_ROWS = 4099, 1021  # no other dimensions are as large
GREEDY = [
    Bucket("decode", 4, 4, False),
    Bucket("extend", 32, 4, False),
    Bucket("score", 32, 4, False),
    Bucket("verify", 8, 4, False),
]
BUCKETS = [
    *GREEDY,
    Bucket("decode", 4, 4, False, num_steps=3),
    Bucket("decode", 4, 4, True, num_steps=3),
]
# An extend, a decode, and several steps that sample; the others differ from one of these in their inputs.
DAILY = BUCKETS if NIGHTLY else [BUCKETS[0], BUCKETS[1], BUCKETS[5]]
SHAPE = Capacity(
    page_size=4, num_pages=NUM_PAGES, num_rows=NUM_ROWS, context_length=64, max_extend_tokens=32, vocab_size=101
)


def spec_of(plain: Plain, dtype: str, activations: str | None = None) -> ProgramSpec:
    arch, mesh, weights = plain.arch, mesh_of(), jnp.dtype(dtype)
    graphdef, _ = abstract_model(arch, weights, jnp.dtype(activations) if activations else None)
    state = allocate(layer_states(arch, SHAPE.page_size, jnp.dtype("float32")), SHAPE, mesh)
    return ProgramSpec(graphdef, random_params(arch, weights, mesh, 0), state, KernelChoice.of_attention("xla"), mesh)


@pytest.fixture(scope="module")
def spec(plain: Plain) -> ProgramSpec:
    return spec_of(plain, "float32")


def copies(compiled: jax.stages.Compiled, size: int) -> list[str]:
    """The instructions of a program that copy an array whose first dimension is `size`."""
    hlo = compiled.as_text() or ""
    assert f"[{size}," in hlo
    return re.findall(rf"= \w+\[{size},[^=]* (?:copy|transpose|convert)\(.*", hlo)


@pytest.mark.parametrize("bucket", DAILY, ids=str)
def test_a_step_updates_the_state_in_place(spec: ProgramSpec, bucket: Bucket) -> None:
    """All of it is aliased, tables that the step only hands on included, and nothing of it is copied."""
    compiled = spec.forward(bucket).trace().lower().compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(array.nbytes for array in jax.tree.leaves(spec.state))
    assert memory.temp_size_in_bytes < min(spec.state.kv.k[0].nbytes, spec.state.edit_tables.counts.nbytes)
    assert not copies(compiled, NUM_PAGES)
    assert not copies(compiled, NUM_ROWS + 1)


def test_several_steps_copy_no_weights_where_formats_differ(plain: Plain) -> None:
    """XLA would convert the whole embedding before the loop; one step converts what it reads."""
    weights, activations = "bfloat16", "float32"
    spec = spec_of(plain, weights, activations)
    one, three = (
        spec.forward(replace(BUCKETS[0], num_steps=n)).trace().lower().compile().memory_analysis() for n in (1, 3)
    )
    embedding_bytes = jnp.dtype(activations).itemsize * plain.arch.vocab_size * plain.arch.hidden_size
    assert three.temp_size_in_bytes - one.temp_size_in_bytes < embedding_bytes / 2


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_a_step_lowers_for_accelerators(spec: ProgramSpec, bucket: Bucket, platform: str) -> None:
    text = spec.forward(bucket).trace().lower(lowering_platforms=(platform,)).as_text()
    assert f"{NUM_PAGES}x2x4x16" in text
    sampling = (spec.sampling(kind, 4) for kind in ("sampled", "filtered", "featured"))
    for small in (*sampling, *spec.masking(4), *spec.host_writes()):
        assert "stablehlo" in small.trace().lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("bucket", GREEDY[:2], ids=str)
def test_features_leave_the_programs_and_inputs_of_plain_batches_alone(spec: ProgramSpec, bucket: Bucket) -> None:
    """Greedy, drawn and featured batches of one shape share one forward program; the layout has no more fields."""
    sampled = replace(bucket, sampled=True)
    forms = [bucket, sampled, replace(sampled, filtered=True), replace(sampled, featured=True)]
    assert len({keys_of(form)[0] for form in forms}) == 1
    assert [[key.kind for key in keys_of(form)[1:]] for form in forms] == [[], ["sampled"], ["filtered"], ["featured"]]
    s, t = bucket.num_seqs, bucket.num_tokens
    assert {packed_len(form) for form in forms} == {(3 if bucket.kind == "decode" else 4) * t + 9 * s + 1}
    outputs = jax.tree.leaves(spec.forward(bucket).trace().out_info)
    assert len(outputs) == len(jax.tree.leaves(spec.state)) + 3
    texts = [spec.sampling(kind, 4).trace().lower().as_text() for kind in ("sampled", "featured")]
    assert ["top_k" in text for text in texts] == [False, True]


def test_small_programs_change_last_tokens_and_tables_in_place(spec: ProgramSpec) -> None:
    last_tokens, tables = spec.state.last_tokens.nbytes, spec.state.edit_tables
    programs = (spec.sampling("filtered", 4), spec.sampling("featured", 4), *spec.host_writes())
    sampled, featured, set_row, set_pages = (program.trace().lower().compile() for program in programs)
    assert edit_table_bytes(NUM_ROWS, spec.vocab_size) == tables.edits.nbytes + tables.counts.nbytes
    assert sampled.memory_analysis().alias_size_in_bytes >= last_tokens
    assert featured.memory_analysis().alias_size_in_bytes >= last_tokens + tables.edits.nbytes + tables.counts.nbytes
    assert set_row.memory_analysis().alias_size_in_bytes >= tables.edits.nbytes + tables.counts.nbytes
    assert set_pages.memory_analysis().alias_size_in_bytes >= spec.state.page_table.nbytes
    for program in (featured, set_row, set_pages):
        assert not copies(program, NUM_ROWS + 1)


@pytest.mark.parametrize("kind", ["extend", "score"])
def test_the_device_unpacks_what_the_host_packed(kind: Literal["extend", "score"]) -> None:
    bucket = Bucket(kind, 8, 3, True)
    packed = np.random.default_rng(0).integers(-(2**31), 2**31, packed_len(bucket), dtype=np.int32)
    on_device = jax.jit(lambda x: vars(unpack(x, bucket)))(packed)
    on_host = vars(unpack(packed, bucket))
    assert (on_host["targets"] is None) == (on_device["targets"] is None) == (kind == "extend")
    for array, view in zip(jax.tree.leaves(on_device), jax.tree.leaves(on_host), strict=True):
        assert array.dtype == view.dtype
        assert np.asarray(array).tobytes() == view.tobytes()
