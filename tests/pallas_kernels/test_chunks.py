"""Attention within chunks: each backend gives what a dense float64 softmax over a token's chunk gives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    AttentionOptions,
    KernelChoice,
    paged_decode_attention,
    paged_extend_attention,
    store_and_decode,
)
from pallas_kernels.paged_kv import BITS, to_bits, to_numbers
from pallas_kernels.specs import ArgSpec
from tests.grids import NIGHTLY, daily
from tests.pallas_kernels.cases import Case, assert_close, build_case, dense_attention, random_qkv

CHUNK = 32
SPEC = ArgSpec("chunks", 6, 100, 9, 8, 2, 2, 128, jnp.float32)
# Around chunks' ends; queries of one, two and three chunks, with padding sequences between them.
LENGTHS, NUM_QUERIES = [72, 33, 0, 32, 65, 7], [48, 2, 0, 1, 34, 7]
WITH_WINDOW = AttentionOptions(sliding_window=9, chunk=CHUNK)
INTERPRETED = ["triton", *["mosaic_tpu"] * NIGHTLY]
BACKENDS = ["reference", "xla", "native", *INTERPRETED]


def case_of(backend: str) -> tuple[Case, jnp.dtype]:
    """The case, and the format whose tolerance holds: C++ multiplies bfloat16."""
    spec = SPEC if backend != "native" else dataclasses.replace(SPEC, dtype=jnp.bfloat16)
    return build_case(spec, LENGTHS, NUM_QUERIES, 2, seed=5), jnp.dtype(spec.dtype)


def on(backend: str, op, options: AttentionOptions):
    return jax.jit(functools.partial(op, options=options, backend=backend, interpret=backend in INTERPRETED))


@pytest.mark.parametrize("options", daily([AttentionOptions(chunk=CHUNK), WITH_WINDOW], every=2))
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_sees_what_its_chunk_has_before_it(
    backend: str, options: AttentionOptions, request: pytest.FixtureRequest
) -> None:
    if backend == "native":
        request.getfixturevalue("native_runs_here")
    case, dtype = case_of(backend)
    q, offsets, kv = case.extend_args()
    last = q[np.minimum(np.asarray(offsets)[1:] - 1, len(q) - 1)]
    ends = jnp.cumsum(jnp.asarray([0, *np.minimum(LENGTHS, 1)]), dtype=jnp.int32)
    real = np.asarray(LENGTHS) > 0
    expected = dense_attention(q, offsets, kv, options)
    of_last = np.zeros((len(LENGTHS), *q.shape[1:]))
    of_last[real] = dense_attention(last[real], ends, kv, options)
    if backend == "native":
        q, last = q.astype(jnp.float32), last.astype(jnp.float32)
        kv = dataclasses.replace(kv, k=to_bits(kv.k), v=to_bits(kv.v))
        assert kv.k.dtype == BITS and to_numbers(kv.k).dtype == dtype
    assert_close(on(backend, paged_extend_attention, options)(q, offsets, kv), expected, dtype)
    assert_close(on(backend, paged_decode_attention, options)(last, kv), of_last, dtype)


@pytest.mark.parametrize("backend", ["xla", *INTERPRETED[1:]])
def test_a_token_that_a_decode_stores_is_stored_whatever_the_chunk(backend: str) -> None:
    case, dtype = case_of(backend)
    *_, kv = case.extend_args()
    qkv = random_qkv(dataclasses.replace(SPEC, num_tokens=SPEC.num_seqs), np.random.default_rng(3))
    last = np.maximum(np.asarray(LENGTHS) - 1, 0)
    pages = case.page_table[np.arange(len(last)), last // SPEC.page_size]
    slots = jnp.asarray(np.where(np.asarray(LENGTHS) > 0, pages * SPEC.page_size + last % SPEC.page_size, 0), jnp.int32)
    kv = dataclasses.replace(kv, k=jnp.nan_to_num(kv.k), v=jnp.nan_to_num(kv.v))
    parts = KernelChoice.of_attention(backend)
    found = [
        store_and_decode(
            qkv, kv, slots, AttentionOptions(chunk=chunk), backend=backend, parts=parts, interpret=backend != "xla"
        )
        for chunk in (CHUNK, None)
    ]
    for name in ("k", "v", "page_table", "lengths"):
        np.testing.assert_array_equal(*(getattr(stored, name)[1:] for _, stored in found))
    stored = found[0][1]
    q, _, _ = qkv.split()
    real = np.asarray(LENGTHS) > 0
    ends = jnp.cumsum(jnp.asarray([0, *real]), dtype=jnp.int32)
    of_real = dense_attention(q[real], ends, stored, AttentionOptions(chunk=CHUNK))
    assert_close(found[0][0][real], of_real, dtype)


def test_chunks_must_begin_where_pages_do_and_are_not_for_queries_that_see_ahead() -> None:
    case, _ = case_of("xla")
    q, offsets, kv = case.extend_args()
    odd, wrong = AttentionOptions(chunk=20), "chunk is 20; it must be a multiple of the page size, which is 8"
    with pytest.raises(ValueError, match=wrong):
        paged_decode_attention(q[: len(LENGTHS)], kv, odd)
    with pytest.raises(ValueError, match=wrong):
        paged_extend_attention(q, offsets, kv, odd)
    with pytest.raises(ValueError, match=r"options\.chunk is 32; it must be None where queries see ahead"):
        paged_extend_attention(q, offsets, kv, AttentionOptions(chunk=32), seen=jnp.zeros(len(q), jnp.int32))
    for chunk, value_dim, sees_ahead in ((0, None, False), (8, None, True), (8, 16, False)):
        with pytest.raises(ValueError, match=f"chunk is {chunk}"):
            AttentionOptions(value_dim=value_dim, sees_ahead=sees_ahead, chunk=chunk)
    plain = jax.jit(paged_extend_attention, static_argnums=3)
    whole = plain.lower(q, offsets, kv, AttentionOptions(chunk=kv.max_len)).as_text()
    assert whole == plain.lower(q, offsets, kv, AttentionOptions()).as_text()  # no sequence is longer
