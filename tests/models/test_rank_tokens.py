"""Tokens of ranks in the places of MLPs: all of them in order, padding left out, and sums back where they came from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Two ranks of two devices, of which rank 0 has 2 tokens and rank 1 has 3, each padded to 4.
ON_FOUR_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from jaxsgl.models.tensor_parallel import DATA_AXIS, OF_ALL, TokensOfRanks, part_index
from jaxsgl.weights.sharding import make_mesh

flags = jnp.array([1, 1, 0, 0, 1, 1, 1, 0], bool)
rows = jnp.arange(16.0).reshape(8, 2) + 1

def exchange(flags, rows, places):
    ranks = TokensOfRanks(flags, places)
    gathered = ranks.gathered(rows)
    device = part_index("experts") + 1
    own = ranks.of_this_rank(jnp.where(ranks.is_token[:, None], gathered, -1))
    return gathered[None], ranks.is_token[None], ranks.summed(gathered * device), own

mesh = make_mesh(jax.devices(), num_ranks=2)
for places in (5, 6, 0):
    def step(flags, rows, places=places):
        return exchange(flags, rows, places)
    shapes = P(OF_ALL), P(OF_ALL), P(DATA_AXIS), P(DATA_AXIS)
    run = jax.shard_map(step, mesh=mesh, in_specs=P(DATA_AXIS), out_specs=shapes, check_vma=False)
    gathered, is_token, summed, own = map(np.asarray, jax.jit(run)(flags, rows))
    real, real_rows = np.asarray(flags), np.asarray(rows)[np.asarray(flags)]
    for of_device, is_real in zip(gathered, is_token, strict=True):
        assert len(of_device) == (places or 8)
        np.testing.assert_array_equal(of_device[is_real], real_rows)
        assert is_real[:5].all() and not is_real[5:].any() if places else (is_real == real).all()
    np.testing.assert_array_equal(summed[real], 10 * real_rows)  # devices 1 to 4
    np.testing.assert_array_equal(own[real], real_rows)
    if places:
        assert not summed[~real].any() and not own[~real].any()
print("equal")
"""


def test_ranks_exchange_their_tokens_and_no_padding() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_FOUR_DEVICES], capture_output=True, text=True,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.split() == ["equal"], done.stderr
