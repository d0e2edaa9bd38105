"""What adapters add to the decoder's products is what peft adds, whatever else is in the batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import jaxsgl
from jaxsgl.config.features import LoraConfig
from jaxsgl.engine.adapters import plan_adapters
from jaxsgl.errors import CheckpointError, ConfigError
from jaxsgl.models import StepContext, abstract_model, arch_from_folder
from jaxsgl.models.lora import ActiveAdapters, adaptable_modules, pool_arrays
from jaxsgl.weights import load_params
from jaxsgl.weights.adapters import AdapterFolder
from tests.checkpoint_kinds.sizes import VOCAB_SIZE
from tests.checkpoints import make_checkpoint
from tests.grids import daily
from tests.plain_model import causal_attend, mesh_of
from tests.weights.peft_adapters import ATTENTION, MLP, adapted_logits, make_adapter

BUNDLED = Path(jaxsgl.__file__).parent / "bundled_model"
PROMPT = np.random.default_rng(3).integers(0, VOCAB_SIZE, 80).tolist()
KINDS: dict[
    str, list[tuple[list[str], dict[str, Any]]]
] = {  # several adapters for each kind of model: modules and settings of peft
    "qwen3": [
        (ATTENTION + MLP, {"r": 4}),
        (["q_proj", "v_proj"], {"r": 8, "use_rslora": True}),
        (["k_proj", "up_proj", "down_proj"], {"r": 2, "alpha_pattern": {"layers.1.mlp.up_proj": 32}}),
        (["k_proj", "up_proj"], {"r": 2, "alpha_pattern": {"^model.layers.0.mlp.up_proj": 32, "proj": 3, "k_proj": 5}}),
        (["o_proj", "gate_proj"], {"r": 3, "rank_pattern": {"o_proj": 6}, "layers_to_transform": [1]}),
    ],
    "phi3": [(["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], {"r": 4})],
    "glm": [([*ATTENTION, "gate_up_proj"], {"r": 4})],
    "qwen2_moe": [(ATTENTION, {"r": 4})],
    "olmo2": [(ATTENTION + MLP, {"r": 4})],
    "arcee": [([*ATTENTION, "up_proj", "down_proj"], {"r": 4})],
    "apertus": [([*ATTENTION, "up_proj", "down_proj"], {"r": 4})],
    "ministral3": [(ATTENTION, {"r": 4})],
    "llama4": [(ATTENTION, {"r": 4}), (ATTENTION + MLP, {"r": 3, "layers_to_transform": [0]})],
    "cohere2": [(ATTENTION + MLP, {"r": 4})],
    "opt": [(["q_proj", "v_proj", "out_proj", "fc1", "fc2"], {"r": 4, "alpha_pattern": {"fc1": 3}})],
}


def batch_logits(model: Path, adapters: Sequence[Path], dtype: str = "float32") -> list[np.ndarray]:
    """Logits of the prompt without an adapter, then with each; of one batch whose adapters lie in shuffled columns."""
    arch = arch_from_folder(model)
    graphdef, _ = abstract_model(arch, jnp.dtype(dtype))
    params = load_params(model, arch, jnp.dtype(dtype), mesh_of())
    modules, folders = adaptable_modules(arch), [AdapterFolder(folder, arch) for folder in adapters]
    num_columns = sum(folder.rank for folder in folders) + 3
    free = np.random.default_rng(0).permutation(num_columns)
    owners = np.zeros(num_columns, np.int32)
    pool = [
        {name: np.full(array.shape, 7.0, dtype) for name, array in pool_arrays(arch, i, modules, num_columns).items()}
        for i in range(arch.num_layers)
    ]
    for number, folder in enumerate(folders, 1):
        mine, free = free[: folder.rank], free[folder.rank :]
        owners[mine] = number
        for i, layer in enumerate(folder.columns(modules, dtype)):
            for name, array in layer.items():
                axis = pool_arrays(arch, i, modules, 1)[name].column_axis
                pool[i][name][(slice(None),) * axis + (mine,)] = array

    @jax.jit
    def run(params: nnx.State, pool: list[dict[str, jax.Array]], number: jax.Array) -> jax.Array:
        active = ActiveAdapters(pool, jnp.full(len(PROMPT), number), jnp.asarray(owners))
        merged, positions = nnx.merge(graphdef, params), jnp.arange(len(PROMPT), dtype=jnp.int32)
        ids = jnp.asarray([token % arch.vocab_size for token in PROMPT], jnp.int32)
        return merged.logits(merged(ids, positions, StepContext(causal_attend(arch), adapters=active)))

    return [np.asarray(run(params, pool, jnp.int32(number))) for number in range(len(folders) + 1)]


@pytest.mark.parametrize("kind", daily(list(KINDS), every=len(KINDS)))
def test_logits_with_an_adapter_are_those_of_peft(kind: str, tmp_path: Path) -> None:
    model = make_checkpoint(kind, tmp_path / "model")
    adapters = [
        make_adapter(model, tmp_path / str(i), modules=modules, seed=i, **settings)
        for i, (modules, settings) in enumerate(KINDS[kind])
    ]
    vocab_size = arch_from_folder(model).vocab_size
    prompt = [token % vocab_size for token in PROMPT]
    base, *adapted = batch_logits(model, adapters)
    np.testing.assert_allclose(base, adapted_logits(model, None, prompt), atol=1e-3)
    for folder, logits in zip(adapters, adapted, strict=True):
        assert np.abs(logits - base).max() > 0.05, "an adapter that changes nothing proves nothing"
        np.testing.assert_allclose(logits, adapted_logits(model, folder, prompt), atol=1e-3, err_msg=folder.name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"alpha_pattern": {"((.*)*)*x": 4}}, "which is a regular expression"),
        ({"alpha_pattern": {r"layers\\.1": 4}}, "which is a regular expression"),
        ({"alpha_pattern": {"q_proj": "4"}}, "alpha_pattern of q_proj is '4', but must be a finite number"),
        ({"alpha_pattern": ["q_proj"]}, "must hold an object"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
    ],
)
def test_alphas_by_regular_expression_and_those_that_are_no_numbers_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    model = make_checkpoint("qwen3", tmp_path / "model")
    folder = make_adapter(model, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=words):
        AdapterFolder(folder, arch_from_folder(model))


def test_what_is_no_adapter_of_the_model_says_what_it_is(tmp_path: Path) -> None:
    arch, name = arch_from_folder(BUNDLED), "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    with pytest.raises(
        CheckpointError, match=r"is not an adapter's folder: it has no adapter_config.json; name the one"
    ):
        AdapterFolder(tmp_path, arch)
    with pytest.raises(
        CheckpointError, match=r"is not an adapter's folder: it has a model's config.json; name the one"
    ):
        AdapterFolder(BUNDLED, arch)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "some/other-model"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    for layer, words in ((0, "but must be floats of shape"), (99, "belongs to no layer of Qwen3ForCausalLM")):
        pair = {name.format(layer, "A"): np.zeros((4, 4096), np.float32)}
        pair[name.format(layer, "B")] = np.zeros((4096, 4), np.float32)
        save_file(pair, tmp_path / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match=f"{words}.*: it was trained for 'some/other-model', which it needs"):
            AdapterFolder(tmp_path, arch)


@pytest.mark.parametrize("tensor", ["embed_tokens.lora_embedding_A", "layers.0.self_attn.q_proj.lora_magnitude_vector"])
def test_what_is_served_for_no_model_is_not_put_down_to_the_base_of_the_adapter(tmp_path: Path, tensor: str) -> None:
    config = {"peft_type": "LORA", "base_model_name_or_path": "some/other-model"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {f"base_model.model.model.{tensor}": np.zeros((4, 4), np.float32)}, tmp_path / "adapter_model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"which is not supported$"):
        AdapterFolder(tmp_path, arch_from_folder(BUNDLED))


@pytest.mark.parametrize("start", ["olora", "OLoRA", "pissa_niter_4"])
def test_adapters_whose_training_began_with_a_change_of_the_base_are_refused(tmp_path: Path, start: str) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "init_lora_weights": start}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"init_lora_weights is {start}, which changes the base model"):
        AdapterFolder(tmp_path, arch_from_folder(BUNDLED))


def test_gates_of_attention_are_not_taken_for_those_of_an_mlp_of_the_same_size(tmp_path: Path) -> None:
    arch = arch_from_folder(make_checkpoint("afmoe", tmp_path / "model", intermediate_size=8 * 20))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))

    def adapt(block: str) -> AdapterFolder:
        name = f"base_model.model.model.layers.0.{block}.gate_proj.lora_{{}}.weight"
        pair = {name.format("A"): np.zeros((4, 128), np.float32), name.format("B"): np.zeros((8 * 20, 4), np.float32)}
        save_file(pair, tmp_path / "adapter_model.safetensors")
        return AdapterFolder(tmp_path, arch)

    assert adapt("mlp").rank == 4
    with pytest.raises(CheckpointError, match=r"self_attn.gate_proj.lora_A.weight belongs to no layer of Afmoe"):
        adapt("self_attn")


def test_models_with_a_latent_take_no_adapters(tmp_path: Path) -> None:
    arch = arch_from_folder(make_checkpoint("deepseek_v3", tmp_path))
    assert plan_adapters(LoraConfig(), arch) is None
    with pytest.raises(ConfigError, match="attends over a latent, for which adapters are not served"):
        plan_adapters(LoraConfig(enable_lora=True), arch)
