"""Loading checkpoints: one file or several, every dtype, and the errors for broken folders."""

from __future__ import annotations

import gc
import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import load_file, save_file

from jaxsgl.errors import CheckpointError
from jaxsgl.json_file import read_object
from jaxsgl.models import arch_from_folder
from jaxsgl.weights import as_stored, load_params
from tests.checkpoint_kinds import CHECKPOINT_KINDS
from tests.checkpoints import make_checkpoint, reference_logits
from tests.plain_model import checkpoint_logits, mesh_of, plain_logits
from tests.vision_models import make_model


def load(folder: Path, dtype: str = "float32") -> nnx.State:
    return load_params(folder, arch_from_folder(folder), jnp.dtype(dtype), mesh_of())


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces tensors of a single-file checkpoint; None removes one. A name's dots are written `__`."""
    tensors = load_file(folder / "model.safetensors")
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("kind", CHECKPOINT_KINDS)
def test_a_sharded_checkpoint_loads_as_the_single_file_does(kind: str, tmp_path: Path) -> None:
    single = make_checkpoint(kind, tmp_path / "single")
    sharded = make_checkpoint(kind, tmp_path / "sharded", max_shard_size="60KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    tokens = list(range(20))
    np.testing.assert_array_equal(checkpoint_logits(sharded, tokens), checkpoint_logits(single, tokens))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_every_stored_dtype_loads_as_every_wanted_dtype(stored: torch.dtype, wanted: str, tmp_path: Path) -> None:
    folder = make_checkpoint("llama_tied", tmp_path, dtype=stored)
    embedding: Any = load(folder, wanted)["embedding"][...]
    assert embedding.dtype == jnp.dtype(wanted)
    expected = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].to(getattr(torch, wanted))
    np.testing.assert_array_equal(np.asarray(embedding.astype(jnp.float32)), expected.float().numpy())


def test_loaded_parameters_are_no_view_of_the_file_or_of_what_was_read_from_it(tmp_path: Path) -> None:
    """A file that is replaced in place would change the weights of a running server."""
    folder = make_checkpoint("llama_tied", tmp_path)
    expected = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone().numpy()
    params: Any = load(folder)
    jax.block_until_ready(params)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(bytes((folder / "model.safetensors").stat().st_size))
    gc.collect()
    np.testing.assert_array_equal(np.asarray(params["embedding"][...]), expected)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path, max_shard_size="60KB")
    broken = sorted(folder.glob("*.safetensors"))[1]
    broken.write_bytes(broken.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=f"{broken.name} is truncated"):
        load(folder)


def test_a_missing_file_of_the_index_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path, max_shard_size="60KB")
    gone = sorted(folder.glob("*.safetensors"))[-1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"weight files are missing: {gone.name}"):
        load(folder)


def test_an_unreadable_index_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path, max_shard_size="60KB")
    for text in ("{", "[]", json.dumps({"weight_map": ["a"]})):
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
            load(folder)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2", tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors files; .* anew with transformers' save_pretrained"):
        load(folder)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2", tmp_path)
    rewrite(folder, model__layers__1__self_attn__k_proj__bias=None)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.k_proj\.bias is missing"):
        load(folder)


def test_a_wrong_shape_is_reported_with_both_shapes(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2", tmp_path)
    rewrite(folder, model__layers__0__mlp__up_proj__weight=torch.zeros(95, 64))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight has shape \(95, 64\).* \(96, 64\)"):
        load(folder)


def test_an_integer_tensor_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2", tmp_path)
    rewrite(folder, model__norm__weight=torch.zeros(64, dtype=torch.int8))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is I8; supported are F32, BF16, F16"):
        load(folder)


def test_tensors_that_mean_nothing_may_be_left_over(tmp_path: Path) -> None:
    folder = make_checkpoint("llama_tied", tmp_path)
    names = ("lm_head__weight", "model__layers__0__self_attn__rotary_emb__inv_freq", "mtp__layers__0__mlp__weight")
    rewrite(folder, **{name: torch.zeros(8) for name in names})
    load(folder)


def test_layers_that_predict_further_tokens_may_be_left_over_in_ernies_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint("ernie4_5_moe", tmp_path)
    names = ("block__0__mlp__gate_proj", "emb_norm__0", "hidden_norm__0", "linear_proj__0")
    rewrite(folder, **{f"model__mtp_{name}__weight": torch.zeros(8) for name in names})
    with caplog.at_level(logging.INFO):
        load(folder)
    assert "4 tensors of a draft head (model.mtp_*) are no part of the model" in caplog.text


def test_a_layer_after_the_last_one_may_be_left_over_beside_a_tower(tmp_path: Path) -> None:
    make_model(tmp_path, "glm4v_moe")
    rewrite(tmp_path, model__language_model__layers__3__eh_proj__weight=torch.zeros(8))
    load(tmp_path)
    rewrite(tmp_path, model__language_model__layers__2__eh_proj__weight=torch.zeros(8))
    with pytest.raises(CheckpointError, match=r"not part of Glm4vMoeForConditionalGeneration .*layers\.2\.eh_proj"):
        load(tmp_path)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_a_dtype_that_the_configuration_leaves_out_is_that_of_the_matrices(stored: str, tmp_path: Path) -> None:
    """Of most of them: some routers are of another one, and so are norms and scales."""
    folder = make_checkpoint("llama_tied", tmp_path, dtype=getattr(torch, stored))
    other = torch.float16 if stored == "float32" else torch.float32
    rewrite(
        folder,
        model__layers__0__self_attn__k_proj__weight=torch.zeros(32, 64, dtype=other),
        model__norm__weight=torch.ones(10**6, dtype=other),
        model__layers__0__mlp__up_proj__weight_scale_inv=torch.ones(1000, 1000, dtype=other),
    )
    arch = arch_from_folder(folder)
    assert as_stored(arch, folder).dtype == stored
    values = {key: value for key, value in read_object(folder / "config.json").items() if "dtype" not in key}
    (folder / "config.json").write_text(json.dumps(values))
    assert arch_from_folder(folder).dtype == "bfloat16"
    assert as_stored(arch_from_folder(folder), folder).dtype == stored


@pytest.mark.parametrize("is_own", [False, True])
def test_a_head_next_to_ties_counts_if_it_differs_from_the_embedding(
    is_own: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers, which compares the two."""
    folder = make_checkpoint("llama_tied", tmp_path)
    head = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].clone()
    head[-1, -1] += is_own
    rewrite(folder, lm_head__weight=head)
    arch = as_stored(arch_from_folder(folder), folder)
    assert arch.tie_embeddings is not is_own and ("it is not tied" in caplog.text) is is_own
    assert arch == as_stored(arch, folder)
    logits = plain_logits(arch, load_params(folder, arch, jnp.dtype("float32"), mesh_of()), [5, 6, 7])
    np.testing.assert_allclose(logits, reference_logits(folder, [5, 6, 7]).numpy(), atol=1e-4)


def test_a_tensor_that_no_parameter_is_made_of_is_refused_by_name(tmp_path: Path) -> None:
    folder = make_checkpoint("llama_tied", tmp_path)
    rewrite(folder, model__layers__0__self_attn__q_norm__weight=torch.ones(16))
    with pytest.raises(CheckpointError, match=r"not part of LlamaForCausalLM .*layers\.0\.self_attn\.q_norm\.weight"):
        load(folder)
