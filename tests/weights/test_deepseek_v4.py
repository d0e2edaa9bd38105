"""DeepSeek V4 as it is published: FP8 in blocks, experts in FP4, scales that are powers of two, names of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4ForCausalLM

from jaxsgl.errors import CheckpointError
from jaxsgl.models import ModelArch, arch_from_folder
from jaxsgl.weights import as_stored, load_params
from jaxsgl.weights.stored_names import as_in_recipes
from pallas_kernels.packed import FLOAT8, MXFP4, MXFP4_FRAGMENTS
from tests.checkpoints import make_checkpoint
from tests.grids import NIGHTLY
from tests.plain_model import checkpoint_logits, mesh_of, plain_logits
from tests.weights.stored_weights import (
    OF_V4,
    V4_EXPERTS,
    V4_IN_FP8,
    Tensors,
    deepseek_v4_as_published,
    quantize_folder,
)
from tests.weights.test_experts import kept_on_gpus, packings_of_experts

TOKENS = list(range(3, 60))
FLOAT32 = jnp.dtype("float32")
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepseek_v4_as_published(tmp_path_factory.mktemp("v4"))


@pytest.fixture(scope="module")
def expected_logits(published: Path) -> np.ndarray:
    """By the dequantized weights, with which a model in 16 bits is the same one."""
    return checkpoint_logits(published / "meant", TOKENS)


def off_by(logits: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))


def in_memory(published: Tensors) -> Tensors:
    """The tensors of transformers' model, whose experts are stacks."""
    tensors = {name: published[theirs] for name, theirs in as_in_recipes(published).items()}
    for layer in range(len(OF_V4["layer_types"])):
        block = f"model.layers.{layer}.mlp.experts."
        for part, end in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
            gates, ups, downs = (
                torch.stack([tensors.pop(f"{block}{i}.{kind}_proj.{part}") for i in range(OF_V4["n_routed_experts"])])
                for kind in ("gate", "up", "down")
            )
            tensors[f"{block}gate_up_proj{end}"] = torch.cat(
                [each.view(torch.uint8) for each in (gates, ups)], dim=1
            ).view(gates.dtype)
            tensors[f"{block}down_proj{end}"] = downs
    return tensors


def on_one_cpu(folder: Path) -> ModelArch:
    arch = as_stored(arch_from_folder(folder), folder)
    weights, experts = (
        None if fmt is None else fmt.on_cpu("float32", packs=True) for fmt in (arch.weight_format, arch.expert_format)
    )
    return replace(arch, weight_format=weights, expert_format=experts)


def packings(params: nnx.State, layer: int) -> dict[tuple[Any, ...], str]:
    """Of the matrices of a layer that are kept quantized, by their paths."""
    formats = {path: param.get_metadata().get("format") for path, param in nnx.to_flat_state(params)}
    return {
        path[2:]: fmt.packing
        for path, fmt in formats.items()
        if path[:2] == ("layers", layer) and fmt is not None and not str(path[-1]).endswith("_scale")
    }


def test_the_files_mean_to_transformers_what_the_tests_say(published: Path) -> None:
    """transformers dequantizes them as it loads them on a CPU."""
    stored, meant = (
        DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (published, published / "meant")
    )
    assert stored.keys() == meant.keys()
    for name, tensor in stored.items():
        torch.testing.assert_close(tensor.to(meant[name].dtype), meant[name], rtol=0, atol=0, msg=name)


def test_a_cpu_keeps_both_formats_and_answers_by_the_dequantized_weights(
    published: Path, expected_logits: np.ndarray
) -> None:
    arch = on_one_cpu(published)
    params = load_params(published, arch, FLOAT32, mesh_of())
    expected: dict[tuple[str, ...], str] = {("mlp", "gate_up"): MXFP4, ("mlp", "down"): MXFP4}
    expected |= {("attention", name): FLOAT8 for name in ("q_a", "q_b", "kv", "o_b")}
    expected |= {("mlp", "shared", name): FLOAT8 for name in ("gate_up", "down")}
    for layer in range(arch.num_layers):
        assert packings(params, layer) == expected
    assert off_by(plain_logits(arch, params, TOKENS), expected_logits) < 1e-4


def test_gpus_keep_experts_as_4_bits_and_fp8_in_blocks(published: Path, expected_logits: np.ndarray) -> None:
    arch = kept_on_gpus(published)
    params = load_params(published, arch, FLOAT32, mesh_of())
    assert packings_of_experts(params) == {MXFP4_FRAGMENTS}
    assert arch.weight_format is not None and packings(params, 1)["attention", "q_b"] == ""
    if NIGHTLY:
        assert off_by(plain_logits(arch, params, TOKENS), expected_logits) < 1e-3


@pytest.mark.skipif(not NIGHTLY, reason="by day the folder with experts in FP4 has these names and scales")
@pytest.mark.parametrize("form", ["base models", "names in memory", "experts widened", "a part in 16 bits"])
def test_other_forms_of_published_folders_are_their_dequantized_weights(
    form: str, expected_logits: np.ndarray, tmp_path: Path
) -> None:
    """Base models have experts in blocks of FP8, too, with scales in float32; those in memory are stacks."""
    folder = deepseek_v4_as_published(tmp_path, expert_dtype="fp8" if form == "base models" else "fp4")
    tensors = load_file(folder / FILE)
    if form == "base models":
        tensors = {name: x.float() if name.endswith(".scale") else x for name, x in tensors.items()}
    elif form == "names in memory":
        tensors = in_memory(tensors)
    elif form == "a part in 16 bits":
        meant = load_file(folder / "meant" / FILE)
        tensors |= {f"layers.{i}.attn.wkv.weight": meant[f"model.layers.{i}.attn.wkv.weight"] for i in range(3)}
        tensors = {name: x for name, x in tensors.items() if not name.endswith(".wkv.scale")}
        values = json.loads((folder / "config.json").read_text())
        values["quantization_config"]["modules_to_not_convert"] = ["attn.wkv"]
        (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / FILE)
    arch = on_one_cpu(folder)
    if form == "experts widened":
        assert arch.expert_format is not None
        arch = replace(arch, expert_format=arch.expert_format.without_packing)
    assert all(("kv" in layer.unquantized) == (form == "a part in 16 bits") for layer in arch.layers)
    params = load_params(folder, arch, FLOAT32, mesh_of())
    assert packings_of_experts(params) == {{"base models": FLOAT8, "experts widened": ""}.get(form, MXFP4)}
    expected = checkpoint_logits(folder / "meant", TOKENS) if form == "base models" else expected_logits
    assert off_by(plain_logits(arch, params, TOKENS), expected) < 1e-4


@pytest.mark.skipif(not NIGHTLY, reason="by night; by day other families have these formats")
@pytest.mark.parametrize("name", ["awq", "gptq desc_act", "compressed-tensors int4", "modelopt nvfp4", "modelopt fp8"])
def test_other_softwares_formats_are_their_dequantized_weights(name: str, tmp_path: Path) -> None:
    plain = make_checkpoint("deepseek_v4", tmp_path / "plain", seed=3, **OF_V4)
    folder = quantize_folder(plain, tmp_path / "stored", name, also=f"{V4_EXPERTS}|{V4_IN_FP8}")
    logits, expected = (
        plain_logits(arch, load_params(each, arch, FLOAT32, mesh_of()), TOKENS)
        for each in (folder, folder / "meant")
        for arch in [arch_from_folder(each)]
    )
    assert off_by(logits, expected) < 1e-3


def test_experts_of_another_dtype_than_the_configuration_says_are_refused(published: Path, tmp_path: Path) -> None:
    values = json.loads((published / "config.json").read_text())
    (tmp_path / FILE).symlink_to(published / FILE)
    for told, problem in (
        ("fp6", "expert_dtype is fp6; supported are fp8, fp4"),
        ("fp8", r"experts.*numbers are int8"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**values, "expert_dtype": told}))
        with pytest.raises(CheckpointError, match=problem):
            load_params(tmp_path, arch_from_folder(tmp_path), FLOAT32, mesh_of())
    within = values["quantization_config"] | {"expert_dtype": values.pop("expert_dtype")}
    (tmp_path / "config.json").write_text(json.dumps({**values, "quantization_config": within}))
    assert arch_from_folder(tmp_path) == arch_from_folder(published)  # where transformers writes it
