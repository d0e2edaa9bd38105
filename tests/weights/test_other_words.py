"""Families that are others in all but words: keys of config.json and names of tensors, as their folders have them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from jaxsgl.json_file import read_object
from jaxsgl.models import ModelArch, arch_from_folder
from jaxsgl.models.layer_spec import MoeMlp
from jaxsgl.models.lora import adaptable_modules
from jaxsgl.weights import load_next_layer, load_params
from jaxsgl.weights.adapters import CONFIG_FILE, WEIGHTS_FILE, AdapterFolder
from tests.checkpoints import make_checkpoint
from tests.engine.next_layers import write_next_layer
from tests.grids import daily
from tests.plain_model import mesh_of, plain_logits
from tests.weights.stored_weights import quantize_folder

Tensors = dict[str, torch.Tensor]
FLOAT32 = jnp.dtype("float32")


def _with_fused_heads(tensors: Tensors) -> Tensors:
    """Queries, keys and values of a layer in one tensor."""
    fused = {name: tensors[name] for name in tensors if not re.search(r"\.[qkv]_proj\.", name)}
    for name in tensors:
        if name.endswith(".q_proj.weight"):
            parts = [tensors[name.replace("q_proj", f"{of}_proj")] for of in "qkv"]
            fused[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
    return fused


def _as_they_are(tensors: Tensors) -> Tensors:
    return tensors


@dataclass(frozen=True)
class Words:
    """How a family says what another one says.

    Attributes:
      kind: the other one's checkpoint.
      architecture: the family's name.
      keys: its keys of config.json, by the other's; None: it has no such key.
      tensors: patterns of the other's names, and what the family has instead.
      own: what its config.json says besides.
      kind_values: what of the kind differs, since the family has no word for it.
      prepared: what is done to tensors first.
    """

    kind: str
    architecture: str
    keys: Mapping[str, str | None]
    tensors: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    kind_values: Mapping[str, Any] = field(default_factory=dict)
    prepared: Callable[[Tensors], Tensors] = _as_they_are


_OF_BAILING = Words(
    "glm4_moe",
    "BailingMoeV2ForCausalLM",
    {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts", "attention_bias": "use_qkv_bias"},
    {
        r"^model\.embed_tokens\.": "model.word_embeddings.",
        r"self_attn\.qkv_proj\.": "attention.query_key_value.",
        r"self_attn\.o_proj\.": "attention.dense.",
        r"self_attn\.q_norm\.": "attention.query_layernorm.",
        r"self_attn\.k_norm\.": "attention.key_layernorm.",
        r"gate\.e_score_correction_bias": "gate.expert_bias",
        r"shared_head\.norm\.": "final_layernorm.",
    },
    {
        "embedding_dropout": 0.0, "moe_router_enable_expert_bias": True, "output_dropout": 0.0, "router_dtype": "fp32",
        "score_function": "sigmoid", "use_bias": False, "use_rmsnorm": True,
    },
    {"attention_bias": False, "num_nextn_predict_layers": 0},
    _with_fused_heads,
)  # fmt: skip
WORDS = {
    "exaone": Words(
        "llama_tied",
        "ExaoneForCausalLM",
        {
            "num_hidden_layers": "num_layers",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
            "attention_bias": None,
            "mlp_bias": None,
        },
        {
            r"^model\.embed_tokens\.": "transformer.wte.",
            r"^model\.layers\.": "transformer.h.",
            r"^model\.norm\.": "transformer.ln_f.",
            r"self_attn\.o_proj\.": "attn.attention.out_proj.",
            r"self_attn\.": "attn.attention.",
            r"input_layernorm\.": "ln_1.",
            r"post_attention_layernorm\.": "ln_2.",
            r"mlp\.gate_proj\.": "mlp.c_fc_0.",
            r"mlp\.up_proj\.": "mlp.c_fc_1.",
            r"mlp\.down_proj\.": "mlp.c_proj.",
        },
        {"embed_dropout": 0.0},
    ),
    "bailing": _OF_BAILING,
    "sarvam": replace(
        _OF_BAILING,
        architecture="SarvamMoEForCausalLM",
        kind_values={**_OF_BAILING.kind_values, "partial_rotary_factor": 1.0, "n_group": 1, "topk_group": 1},
    ),
    "sarvam_mla": Words(
        "deepseek_v3",
        "SarvamMLAForCausalLM",
        {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
        own={"moe_router_enable_expert_bias": True, "score_function": "sigmoid", "router_dtype": "fp32"},
        kind_values={"attention_bias": False, "num_nextn_predict_layers": 0},
    ),
}


def in_other_words(told: Path, words: Words, folder: Path) -> Path:
    """Writes the checkpoint of `told` as the family has it, and returns its folder."""
    config = {words.keys.get(key, key): value for key, value in read_object(told / "config.json").items()}
    config.pop(None, None)
    told_rope = config.get("rope_parameters") or {}
    if told_rope.get("rope_type") == "yarn":
        config["rope_parameters"] = {**told_rope, "rope_type": "deepseek_yarn"}
    folder.mkdir()
    own = {"architectures": [words.architecture], "model_type": "of_remote_code", **words.own}
    (folder / "config.json").write_text(json.dumps({**config, **own}))
    tensors = words.prepared(load_file(told / "model.safetensors"))
    for pattern, theirs in words.tensors.items():
        tensors = {re.sub(pattern, theirs, name): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def assert_equal(found: Any, expected: Any) -> None:
    """Parameters are the same numbers in the same places."""
    ours, theirs = (jax.tree.leaves_with_path(each) for each in (found, expected))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, one), (_, other) in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=str(path))


@pytest.mark.parametrize("name", WORDS)
def test_a_family_in_other_words_is_the_same_model(name: str, tmp_path: Path) -> None:
    words = WORDS[name]
    told = make_checkpoint(words.kind, tmp_path / "told", **words.kind_values)
    other = in_other_words(told, words, tmp_path / "other")
    archs = [arch_from_folder(folder) for folder in (told, other)]
    assert replace(archs[1], name=archs[0].name) == archs[0]
    expected = load_params(told, archs[0], FLOAT32, mesh_of())
    given = {name: tensor.numpy() for name, tensor in load_file(other / "model.safetensors").items()}
    for source in (other, given):  # in a folder, or as a trainer hands it over
        assert_equal(load_params(source, archs[1], FLOAT32, mesh_of()), expected)


def test_the_layer_after_the_last_one_is_that_of_ling(tmp_path: Path) -> None:
    words = WORDS["bailing"]
    told = write_next_layer(words.kind, tmp_path / "told", attention_bias=False).folder
    other = in_other_words(told, words, tmp_path / "other")
    archs = [arch_from_folder(folder) for folder in (told, other)]
    load_params(other, archs[1], FLOAT32, mesh_of())  # without it, which is left unread
    expected, found = (
        load_next_layer(folder, arch.next_arch, FLOAT32, mesh_of())
        for folder, arch in zip((told, other), archs, strict=True)
        if arch.next_arch is not None
    )
    assert_equal(found, expected)


# Family, format, exceptions in its words, and an expression for the tensors that they mean.
QUANTIZED = [
    ("exaone", "fp8 in blocks", ["transformer.h.1.mlp.c_proj"], r"h\.1\.mlp\.c_proj"),
    ("bailing", "compressed-tensors int8", ["re:.*mlp.gate$", "model.layers.0.attention"], r"layers\.0\.attention"),
    ("exaone", "compressed-tensors int8", ["re:.*attention.[qkv]_proj", "re:.*c_fc_"], r"attention\.[qkv]_|c_fc_"),
    ("exaone", "awq", ["attn.attention.out_proj"], "out_proj"),
    ("bailing", "fp8 in blocks", ["attention.dense", "mlp.gate"], r"attention\.dense"),
    ("bailing", "gptq", ["attention.query_key_value"], "query_key_value"),
    ("sarvam_mla", "fp8 in blocks", ["mlp.gate"], "^$"),
]


@pytest.mark.parametrize(("name", "form", "exceptions", "excepted"), daily(QUANTIZED, every=4))
def test_a_quantized_folder_excepts_modules_by_its_own_words(
    name: str, form: str, exceptions: list[str], excepted: str, tmp_path: Path
) -> None:
    words = WORDS[name]
    told = make_checkpoint(words.kind, tmp_path / "told", **words.kind_values)
    folder = quantize_folder(
        in_other_words(told, words, tmp_path / "other"),
        tmp_path / "stored",
        form,
        exceptions=exceptions,
        excepted=excepted,
        also=r"query_key_value\.weight|attention\.dense\.weight|c_fc_\d\.weight|c_proj\.weight",
    )
    logits, expected = (
        plain_logits(arch, load_params(each, arch, FLOAT32, mesh_of()), list(range(3, 40)))
        for each in (folder, folder / "meant")
        for arch in [arch_from_folder(each)]
    )
    assert np.linalg.norm(logits - expected) < 1e-3 * np.linalg.norm(expected)


def write_adapter(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 3}))
    save_file({f"base_model.model.{name}.weight": tensor for name, tensor in tensors.items()}, folder / WEIGHTS_FILE)
    return folder


@pytest.mark.parametrize("name", ["exaone", "bailing"])
def test_adapters_name_modules_by_the_words_of_the_family(name: str, tmp_path: Path) -> None:
    words = WORDS[name]
    told = make_checkpoint(words.kind, tmp_path / "told", **words.kind_values)
    archs = [arch_from_folder(folder) for folder in (told, in_other_words(told, words, tmp_path / "other"))]
    stored = load_file(told / "model.safetensors")
    parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    parts += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    theirs: Tensors = {}
    for part in parts:
        module = f"model.layers.0.{part}"
        out, inputs = stored[f"{module}.weight"].shape
        fused = name == "bailing" and part in parts[:3]  # q, k and v have one A
        theirs[f"{module}.lora_A"] = torch.randn(
            2, inputs, generator=torch.Generator().manual_seed(0 if fused else out)
        )
        theirs[f"{module}.lora_B"] = torch.randn(out, 2)
    ours = dict(theirs)
    if name == "bailing":
        module = "model.layers.0.self_attn."
        a, *b = ours[f"{module}q_proj.lora_A"], *(ours[f"{module}{each}_proj.lora_B"] for each in "qkv")
        ours = {key: tensor for key, tensor in ours.items() if not re.search(r"\.[qkv]_proj\.", key)}
        ours |= {f"{module}qkv_proj.lora_A": a, f"{module}qkv_proj.lora_B": torch.cat(b)}
    for pattern, word in words.tensors.items():
        ours = {re.sub(pattern, word, key): tensor for key, tensor in ours.items()}
    assert not any("self_attn" in key for key in ours)
    columns = [
        AdapterFolder(write_adapter(tmp_path / f"of {arch.name}", tensors), arch).columns(
            adaptable_modules(arch), np.float32
        )
        for arch, tensors in zip(archs, (theirs, ours), strict=True)
    ]
    for expected, found in zip(*columns, strict=True):
        assert expected.keys() == found.keys()
        for key, numbers in expected.items():
            np.testing.assert_array_equal(found[key], numbers, err_msg=key)
    assert any(numbers.any() for numbers in columns[1][0].values())


EXAONE_3_5: dict[str, Any] = {
    "activation_function": "silu", "architectures": ["ExaoneForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
    "embed_dropout": 0.0, "eos_token_id": 361, "head_dim": 128, "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "layer_norm_epsilon": 1e-05, "max_position_embeddings": 32768, "model_type": "exaone",
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_layers": 32, "pad_token_id": 0,
    "rope_scaling": {
        "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 1000000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 102400,
}  # fmt: skip
LING_MINI_2: dict[str, Any] = {
    "architectures": ["BailingMoeV2ForCausalLM"], "attention_dropout": 0.0, "num_hidden_layers": 20,
    "hidden_size": 2048, "intermediate_size": 5120, "eos_token_id": 156892, "pad_token_id": 156892,
    "first_k_dense_replace": 1, "hidden_act": "silu", "max_position_embeddings": 32768, "model_type": "bailing_moe",
    "moe_intermediate_size": 512, "norm_topk_prob": True, "num_experts_per_tok": 8, "num_attention_heads": 16,
    "num_experts": 256, "num_key_value_heads": 4, "rope_theta": 600000, "rope_scaling": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_bias": False, "use_rmsnorm": True,
    "rms_norm_eps": 1e-06, "head_dim": 128, "num_shared_experts": 1, "use_cache": True, "use_qkv_bias": False,
    "embedding_dropout": 0.0, "output_dropout": 0.0, "vocab_size": 157184, "partial_rotary_factor": 0.5,
    "router_dtype": "fp32", "moe_router_enable_expert_bias": True, "routed_scaling_factor": 2.5, "n_group": 8,
    "topk_group": 4, "use_qk_norm": True, "score_function": "sigmoid", "moe_shared_expert_intermediate_size": 512,
}  # fmt: skip


def read(tmp_path: Path, config: Mapping[str, Any]) -> ModelArch:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return arch_from_folder(tmp_path)


def test_the_configuration_of_exaone_3_5_is_read(tmp_path: Path) -> None:
    arch = read(tmp_path, EXAONE_3_5)
    assert arch.num_layers == 32 and arch.max_context == 32_768 and arch.rms_norm_eps == 1e-5
    assert {rope.kind for rope in arch.ropes} == {"llama3"}


def test_the_configuration_of_ling_mini_2_is_read(tmp_path: Path) -> None:
    arch = read(tmp_path, LING_MINI_2)
    first, *rest = arch.layers
    assert not isinstance(first.mlp, MoeMlp)
    (mlp,) = {layer.mlp for layer in rest}
    assert isinstance(mlp, MoeMlp) and mlp.num_experts == 256 and mlp.router.num_groups == 8
    assert {rope.rotary_dim for rope in arch.ropes} == {64}


@pytest.mark.parametrize(
    ("config", "module", "matrix"),
    [
        (EXAONE_3_5, "transformer.h.0.attn.attention.out_proj", "o"),
        (EXAONE_3_5, "transformer.h.0.mlp.c_proj", "down"),
        (LING_MINI_2, "model.layers.0.attention.query_key_value", "qkv"),
        (LING_MINI_2, "model.layers.0.attention.dense", "o"),
    ],
)
def test_a_module_with_a_format_of_its_own_is_named_as_in_the_folder(
    config: Mapping[str, Any], module: str, matrix: str, tmp_path: Path
) -> None:
    of_module = {f"+:{re.escape(module)}$": {"bits": 8}}
    whole = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": of_module}
    arch = read(tmp_path, {**config, "quantization_config": whole})
    assert [(name, fmt.numbers) for name, fmt in arch.layers[0].stored_in] == [(matrix, "int8")]
    assert not any(layer.stored_in for layer in arch.layers[1:])
