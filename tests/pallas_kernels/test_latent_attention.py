"""Attention over a latent: one entry a token, whose first numbers are its value, and many query heads."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionOptions, paged_decode_attention, paged_extend_attention, tuning
from pallas_kernels.specs import (
    LATENT_SPECS,
    ArgSpec,
    decode_choice,
    decode_chosen,
    extend_choice,
    extend_chosen,
    store_latents,
)
from tests.grids import daily
from tests.pallas_kernels.cases import assert_close, build_case, dense_attention
from tests.pallas_kernels.lower_everything import on_a_device

KERNELS: dict[Any, str] = {
    store_latents: "absorb_and_store",
    decode_chosen: "attend_to_chosen",
    extend_chosen: "attend_to_chosen",
    decode_choice: "score_tokens",
    extend_choice: "score_tokens",
}
SPLITS = {"head_rows": 64, "programs_per_core": 1000, "min_split_tokens": 16, "tile_tokens": 16}


def latent(num_groups: int, head_dim: int = 576, value_dim: int = 512, dtype=jnp.float32, **options: Any) -> ArgSpec:
    return ArgSpec("latent", 3, 12, 4, 16, 1, num_groups, head_dim, dtype, value_dim=value_dim, **options)


# The published sizes, and those of an entry in one part and of heads that fill no block.
SPECS = [
    latent(16),
    latent(16, dtype=jnp.bfloat16),
    latent(128, dtype=jnp.bfloat16),
    latent(128),
    latent(20, 48, 32, sliding_window=40),
    latent(3, 32, 24, logit_soft_cap=3.0),
    latent(8, index_size=128, dtype=jnp.bfloat16),
    latent(20, 48, 32, index_size=16),
]
each_spec = pytest.mark.parametrize(
    "spec",
    daily(SPECS, every=2),
    ids=lambda spec: f"{spec.num_groups}x{spec.head_dim}+{spec.index_size}_{jnp.dtype(spec.dtype).name}",
)


def attend(op, spec: ArgSpec, *args, backend: str = "triton"):
    return op(*args, **spec.attention, backend=backend, interpret=backend == "triton")


@each_spec
def test_a_decode_equals_a_dense_softmax_whole_and_in_splits(spec: ArgSpec) -> None:
    case = build_case(spec, [64, 0, 19], [1, 0, 1], 0, seed=4)  # a cut last page, and a padding row
    q, kv = case.decode_args()
    wanted = dense_attention(q[np.array([0, 2])], np.array([0, 1, 1, 2]), kv, **spec.attention)
    whole = attend(paged_decode_attention, spec, q, kv)
    with tuning.override("paged_decode_attention", "triton", SPLITS):
        split = functools.partial(attend, paged_decode_attention, spec)
        assert "merge_splits" in str(jax.make_jaxpr(split)(q, kv))
        parts = split(q, kv)
    for found in (whole, parts):
        assert found.shape == (3, spec.num_groups, spec.value_dim) and found.dtype == spec.dtype
        assert (np.asarray(found)[1] == 0).all()
        assert_close(found[np.array([0, 2])], wanted, spec.dtype)


@each_spec
def test_an_extend_equals_a_dense_softmax(spec: ArgSpec) -> None:
    case = build_case(spec, [50, 0, 5], [7, 0, 3], 0, seed=5)
    args = case.extend_args()
    found = attend(paged_extend_attention, spec, *args)
    assert found.shape == (12, spec.num_groups, spec.value_dim)
    assert_close(found, dense_attention(*args, **spec.attention), spec.dtype)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_other_backends_return_values_too(backend: str) -> None:
    spec = latent(3, 32, 24, index_size=8 if backend == "xla" else 0)
    args = build_case(spec, [50, 0, 5], [7, 0, 3], 0, seed=5).extend_args()
    assert_close(
        attend(paged_extend_attention, spec, *args, backend=backend),
        dense_attention(*args, **spec.attention),
        spec.dtype,
    )


@pytest.mark.parametrize("head_dim", [48, 96])
def test_heads_of_two_parts_have_values_of_their_own(head_dim: int) -> None:
    spec = ArgSpec("two_parts", 3, 12, 4, 16, 2, 2, head_dim)
    args = build_case(spec, [50, 0, 5], [7, 0, 3], 0, seed=6).extend_args()
    assert_close(attend(paged_extend_attention, spec, *args), dense_attention(*args, **spec.attention), spec.dtype)


@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
def test_auto_attends_over_latents_by_a_kernel(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    for spec in (LATENT_SPECS[0], LATENT_SPECS[-1]):
        for op, args, options in spec.calls():
            with on_a_device("cuda", kind, 132):
                traced = jax.jit(lambda *a, op=op, options=options: op(*a, **options)).trace(*args)
                text = traced.lower(lowering_platforms=("cuda",)).as_text()
            kernel = KERNELS.get(op, op.__name__)
            assert kernel in text and "stablehlo.while" not in text
    assert "XLA computes" not in caplog.text


def test_values_are_part_of_a_key() -> None:
    with pytest.raises(ValueError, match="value_dim is 0"):
        AttentionOptions(value_dim=0)
    spec = latent(3, 32, 40)
    with pytest.raises(ValueError, match="value_dim is 40; it must be at most the H"):
        jax.eval_shape(lambda q, kv: paged_decode_attention(q, kv, spec.options), *spec.decode_args())
