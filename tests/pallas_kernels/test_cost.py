"""The XLA backend's time follows the real lengths, not the padded shapes."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_decode_attention, paged_extend_attention


def fastest(op, pages_per_seq: int, num_tokens: int) -> float:
    """Seconds for 4 sequences of 64 tokens through a table of the given width."""
    cache = jnp.ones((33, 2, 16, 64), jnp.float32)
    table = np.zeros((4, pages_per_seq), np.int32)
    table[:, :4] = 1 + np.arange(16).reshape(4, 4)
    q = jnp.ones((num_tokens, 4, 64))
    args = [q, cache, cache, jnp.asarray(table), jnp.full((4,), 64, jnp.int32)]
    if op is paged_extend_attention:
        args.append(jnp.arange(5, dtype=jnp.int32) * 8)
    step = jax.jit(op)
    seconds = []
    for _ in range(15):
        begin = time.perf_counter()
        jax.block_until_ready(step(*args))
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


@pytest.mark.parametrize(("op", "num_tokens"), [(paged_decode_attention, 4), (paged_extend_attention, 32)])
def test_a_wide_page_table_costs_no_time(op, num_tokens: int) -> None:
    # Work in proportion to the width would be 512 times as much.
    assert fastest(op, 2048, num_tokens) < 8 * fastest(op, 4, num_tokens)
