"""Block sizes come from the tables, unless someone who tunes says otherwise."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import tuning

OP, BACKEND = "paged_extend_attention", "triton"
SHAPE = tuning.shape_class((1000, 32, 128), (65, 8, 16, 128), jnp.bfloat16, num_seqs=3)


@jax.jit
def traced_tile(x: jax.Array) -> jax.Array:
    """Stands for a kernel: its size is read while it is traced."""
    return x * tuning.blocks(OP, BACKEND, SHAPE)["num_warps"]


def test_counts_of_a_shape_class_are_powers_of_two() -> None:
    assert (SHAPE.num_tokens, SHAPE.num_seqs, SHAPE.num_groups) == (1024, 4, 4)
    assert (SHAPE.page_size, SHAPE.kv_bits, SHAPE.head_dim) == (16, 16, 128)


def test_an_overridden_size_enters_new_traces_and_leaves_them_again() -> None:
    usual = int(traced_tile(jnp.int32(1)))
    with tuning.override(OP, BACKEND, {"num_warps": 99}):
        assert int(traced_tile(jnp.int32(1))) == 99
    assert int(traced_tile(jnp.int32(1))) == usual != 99


def test_an_override_keeps_the_sizes_that_it_does_not_name_and_other_backends() -> None:
    usual = tuning.blocks(OP, BACKEND, SHAPE)
    with tuning.override(OP, BACKEND, {"num_warps": 99}):
        assert tuning.blocks(OP, BACKEND, SHAPE) == {**usual, "num_warps": 99}
    with tuning.override("store_kv", BACKEND, {"num_warps": 99}):
        assert tuning.blocks(OP, BACKEND, SHAPE) == usual


def test_an_override_tells_which_shape_classes_were_asked_for() -> None:
    with tuning.override(OP, BACKEND, {}) as asked:
        traced_tile(jnp.int32(1))
    assert asked == [SHAPE]


def test_a_kernel_without_an_entry_is_an_error_that_says_where_to_add_one() -> None:
    with pytest.raises(LookupError, match=r"no block sizes for store_kv on backend 'cuda'.*default.json"):
        tuning.blocks("store_kv", "cuda", SHAPE)
