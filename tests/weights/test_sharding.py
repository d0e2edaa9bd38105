"""Parameters over several devices, and random ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding
from safetensors.numpy import load_file

from jaxsgl.errors import ConfigError
from jaxsgl.models import abstract_model, arch_from_folder
from jaxsgl.models.tensor_parallel import DATA_AXIS, TENSOR_AXIS
from jaxsgl.weights import load_params, random_params
from jaxsgl.weights.assembly import size
from jaxsgl.weights.sharding import check_divisible, param_sharding
from tests.checkpoint_kinds import CHECKPOINT_KINDS
from tests.checkpoints import make_checkpoint
from tests.grids import daily
from tests.plain_model import checkpoint_logits, mesh_of, plain_logits

TOKENS = list(range(3, 60))

# Runs with 4 devices: saves the logits of the folder and of random parameters; parameters are really cut.
ON_FOUR_DEVICES = """
import logging, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jaxsgl.models import arch_from_folder
from jaxsgl.weights import load_params, random_params
from tests.plain_model import mesh_of, plain_logits

assert len(jax.devices()) == 4
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
folder = Path(sys.argv[1])
arch = arch_from_folder(folder)
loaded = load_params(folder, arch, jnp.dtype("float32"), mesh_of(4))
qkv = loaded["layers"][0]["attention"]["qkv"][...]
assert qkv.addressable_shards[0].data.shape[0] * 4 == qkv.shape[0], qkv.sharding
np.save(folder / "loaded.npy", plain_logits(arch, loaded, list(range(3, 60))))
random = random_params(arch, jnp.dtype("float32"), mesh_of(4), seed=5)
np.save(folder / "random.npy", plain_logits(arch, random, list(range(3, 60))))
"""


# Together these kinds have every parameter that there is, but norms of other names; "olmo2" sums over all heads.
@pytest.mark.parametrize("kind", daily(["llama_linear_rope_bias", "qwen3", "olmo2"], every=3))
def test_four_devices_give_the_logits_of_one(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path, num_attention_heads=8, num_key_value_heads=4)
    done = subprocess.run(
        [sys.executable, "-c", ON_FOUR_DEVICES, str(folder)],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    num_bytes = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert f"weights: {size(num_bytes)} read" in done.stdout, "each number is read for one device only"
    arch = arch_from_folder(folder)
    random = random_params(arch, jnp.dtype("float32"), mesh_of(), seed=5)
    np.testing.assert_allclose(np.load(folder / "loaded.npy"), checkpoint_logits(folder, TOKENS), atol=1e-5)
    np.testing.assert_allclose(np.load(folder / "random.npy"), plain_logits(arch, random, TOKENS), atol=1e-5)


def same_structure(one: Any, other: Any) -> bool:
    first: Any = jax.tree.structure(one)
    return bool(first == jax.tree.structure(other))


def test_every_parameter_has_a_named_sharding(tmp_path: Path) -> None:
    folder = make_checkpoint("llama_linear_rope_bias", tmp_path)
    arch = arch_from_folder(folder)
    loaded = load_params(folder, arch, jnp.dtype("float32"), mesh_of())
    _, abstract = abstract_model(arch, jnp.dtype("float32"))
    assert same_structure(abstract, loaded)
    params = dict(nnx.to_flat_state(abstract))
    for path, param in nnx.to_flat_state(loaded):
        value = param[...]
        assert isinstance(value.sharding, NamedSharding)
        assert value.sharding.is_equivalent_to(param_sharding(params[path], mesh_of()), value.ndim)


def test_a_mesh_that_does_not_divide_the_model_is_refused(tmp_path: Path) -> None:
    arch = arch_from_folder(make_checkpoint("qwen3", tmp_path))
    with pytest.raises(ConfigError, match=r"4 devices can't share .*: it has 6 query heads and 2 kv heads"):
        check_divisible(arch, AbstractMesh((1, 4), (DATA_AXIS, TENSOR_AXIS)))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", daily(CHECKPOINT_KINDS, every=2))
def test_random_parameters_are_those_of_the_model_and_keep_logits_sane(kind: str, tmp_path: Path) -> None:
    arch = arch_from_folder(make_checkpoint(kind, tmp_path))
    params = random_params(arch, jnp.dtype("float32"), mesh_of(), seed=0)
    _, abstract = abstract_model(arch, jnp.dtype("float32"))
    assert same_structure(params, abstract)
    assert [x.shape for x in jax.tree.leaves(params)] == [x.shape for x in jax.tree.leaves(abstract)]
    logits = plain_logits(arch, params, TOKENS)
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 10


def test_random_parameters_depend_on_the_seed_only(tmp_path: Path) -> None:
    arch = arch_from_folder(make_checkpoint("qwen3", tmp_path))
    first, again, other = (
        jax.tree.leaves(random_params(arch, jnp.dtype("bfloat16"), mesh_of(), seed)) for seed in (1, 1, 2)
    )
    assert all((x == y).all() for x, y in zip(first, again, strict=True))
    assert any((x != y).any() for x, y in zip(first, other, strict=True))
    assert {x.dtype for x in first} == {jnp.dtype("bfloat16")}
