"""What devices that share a model have of it: which numbers of devices can, and copies of kv heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxsgl.errors import ConfigError
from jaxsgl.models import ModelArch, arch_from_folder
from jaxsgl.weights import load_params, save_converted
from jaxsgl.weights.sharding import model_on_devices
from tests.checkpoints import make_checkpoint
from tests.plain_model import mesh_of


def arrays(folder: Path, arch: ModelArch) -> dict[Any, np.ndarray]:
    params = load_params(folder, arch, jnp.dtype("float32"), mesh_of())
    return {path: np.asarray(param[...]) for path, param in nnx.to_flat_state(params)}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> ModelArch:
    """8 query heads, 2 kv heads, 5 experts of 48 units, 200 tokens."""
    return arch_from_folder(make_checkpoint("mixtral", tmp_path_factory.mktemp("mixtral")))


def test_what_devices_cannot_share_is_refused_with_the_numbers_that_can(mixtral: ModelArch) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^3 devices can't share MixtralForCausalLM evenly: it has 8 query heads and 2 kv heads: "
        r"give --tp 1, 2, 4 or 8$",
    ):
        model_on_devices(mixtral, 3, by_experts=False)
    with pytest.raises(ConfigError, match=r"it has 5 experts: give --tp 1, or leave --ep out$"):
        model_on_devices(mixtral, 4, by_experts=True)
    experts = mixtral.mixture
    assert experts is not None
    few_units = replace(mixtral, layers=(replace(mixtral.layers[0], mlp=replace(experts, ffn_size=6, num_experts=8)),))
    with pytest.raises(ConfigError, match="6 units in an expert: give --tp 1 or 2, or --ep, which splits the experts"):
        model_on_devices(few_units, 4, by_experts=False)
    assert model_on_devices(few_units, 4, by_experts=True).num_kv_heads == 4
    with pytest.raises(ConfigError, match="--ep splits a mixture of experts, but Qwen3ForCausalLM has none"):
        model_on_devices(replace(mixtral, name="Qwen3ForCausalLM", layers=()), 1, by_experts=True)


@pytest.mark.parametrize("kind", ["olmo2", "llama_linear_rope_bias"])  # norms of all heads; biases
def test_copies_of_kv_heads_and_padded_vocabularies_come_from_both_kinds_of_folders(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path / "stored", num_attention_heads=8, vocab_size=201)
    arch = arch_from_folder(folder)
    shared = model_on_devices(arch, 4, by_experts=False)
    assert (arch.num_kv_heads, shared.num_kv_heads, shared.stored_kv_heads) == (2, 4, 2)
    one, four = arrays(folder, arch), arrays(folder, shared)
    qkv, copied = (each["layers", 0, "attention", "qkv"] for each in (one, four))  # [2, 4 + 2, H, D], [4, 2 + 2, H, D]
    np.testing.assert_array_equal(copied[:, :-2].reshape(8, *qkv.shape[2:]), qkv[:, :-2].reshape(8, *qkv.shape[2:]))
    np.testing.assert_array_equal(copied[:, -2:], np.repeat(qkv[:, -2:], 2, axis=0))
    np.testing.assert_array_equal(four["embedding",], np.pad(one["embedding",], ((0, 3), (0, 0))))
    converted = tmp_path / "converted"
    save_converted(folder, converted, load_params(folder, arch, jnp.dtype("float32"), mesh_of()))
    restored = arrays(converted, shared)
    assert restored.keys() == four.keys()
    for path, array in four.items():
        np.testing.assert_array_equal(restored[path], array, err_msg=str(path))
