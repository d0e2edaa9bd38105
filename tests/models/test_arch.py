"""What `ModelArch` reads from a folder, old and new spellings, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxsgl.errors import CheckpointError
from jaxsgl.models import ModelArch, RopeParams, abstract_model, arch_from_folder
from jaxsgl.models.layer_spec import MoeMlp

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}


DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 16, "moe_intermediate_size": 32,
}  # fmt: skip


def read(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelArch:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return arch_from_folder(folder)


def test_missing_values_take_the_defaults_of_the_family(tmp_path: Path) -> None:
    llama = read(tmp_path)
    assert (llama.num_kv_heads, llama.head_dim, llama.dtype, llama.rms_norm_eps) == (4, 16, "bfloat16", 1e-6)
    assert not llama.attention_bias and not llama.qk_norm and not llama.tie_embeddings
    qwen2 = read(tmp_path, architectures=["Qwen2ForCausalLM"])
    assert qwen2.attention_bias and not qwen2.attention_out_bias
    qwen3 = read(tmp_path, architectures=["Qwen3ForCausalLM"])
    assert qwen3.qk_norm and not qwen3.attention_bias and qwen3.head_dim == 128


def test_a_yarn_of_ones_own_amplitude(tmp_path: Path) -> None:
    """As DeepSeek publishes its Qwen3-8B: the factor takes back what YaRN adds, which transformers ignores."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    (plain,) = read(tmp_path, rope_scaling=yarn).ropes
    (own,) = read(tmp_path, rope_scaling={**yarn, "attn_factor": 0.8782488562869419}).ropes
    assert plain.amplitude > 1.13 and abs(own.amplitude - 1) < 1e-12


def test_old_and_new_spelling_of_rope_mean_the_same(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = read(tmp_path, rope_theta=5e5, rope_scaling={**scaling, "rope_type": "llama3"})
    new = read(tmp_path, rope_parameters={**scaling, "rope_type": "llama3", "rope_theta": 5e5})
    assert old.ropes == new.ropes == (RopeParams(5e5, "llama3", 8.0, 1.0, 4.0, 8192),)
    assert read(tmp_path, rope_scaling={"type": "linear", "factor": 4.0}).ropes == (RopeParams(1e4, "linear", 4.0),)
    assert read(tmp_path, rope_theta=1e6, rope_scaling=None).ropes == (RopeParams(1e6),)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, (2,)),
        (2, {"eos_token_id": [5, 6]}, (5, 6)),
        ([2, 3], {"eos_token_id": 7}, (7,)),
        ([2, 3], {"temperature": 0.6}, (2, 3)),
        (0, None, (0,)),
        (None, None, ()),
    ],
)
def test_eos_ids_come_from_the_generation_config_else_the_config(
    in_config: Any, in_generation: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert read(tmp_path, in_generation, eos_token_id=in_config).eos_token_ids == expected


def listed(*tokens: str) -> list[dict[str, Any]]:
    """Added tokens of a tokenizer.json, with ids from 7."""
    return [{"id": 7 + i, "content": token, "special": True} for i, token in enumerate(tokens)]


@pytest.mark.parametrize(
    ("config", "tokenizer", "expected"),
    [
        ({"eos_token": "<end>", "added_tokens_decoder": {"7": {"content": "<end>"}}}, None, (2, 7)),
        ({"eos_token": {"content": "<end>"}}, {"added_tokens": listed("<a>", "<end>"), "model": {}}, (2, 8)),
        ({"eos_token": "<end>"}, {"added_tokens": listed("<a>"), "model": {"vocab": {"<end>": 9}}}, (2, 9)),
        ({"eos_token": "<end>"}, {"added_tokens": [], "model": {"vocab": [["a", 0.0], ["<end>", -1.0]]}}, (2, 1)),
        ({"eos_token": "<end>"}, {"added_tokens": [], "model": {"vocab": {"<end>": 2}}}, (2,)),
        ({"eos_token": "<end>"}, {"added_tokens": [], "model": {"vocab": {"<end>": 256}}}, (2,)),
        ({"eos_token": "<end>"}, {"added_tokens": [], "model": {"vocab": {"a": 0}}}, (2,)),
        ({"eos_token": "<end>"}, None, (2,)),
        ({"eos_token": None}, {"added_tokens": listed("<end>")}, (2,)),
    ],
)
def test_the_token_that_the_tokenizer_ends_texts_with_ends_a_generation_too(
    config: dict[str, Any], tokenizer: dict[str, Any] | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    """If the vocabulary of 256 tokens has it."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert read(tmp_path, eos_token_id=2).eos_token_ids == expected


def test_a_vocabulary_is_not_parsed_for_an_added_token(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (tmp_path / "tokenizer.json").write_text('{"added_tokens" : [{"id": 7, "content": "<end>"}], "model": {"vocab": ')
    assert read(tmp_path, eos_token_id=2).eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["BloomForCausalLM"]}, ["BloomForCausalLM", "LlamaForCausalLM", "Qwen2", "Qwen3"]),
        ({"architectures": None}, ["LlamaForCausalLM"]),
        ({"architectures": [3]}, ["architectures is [3], but must be a list"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id is '</s>', but must be a token's id"]),
        ({"eos_token_id": 2.0}, ["eos_token_id is 2.0"]),
        ({"eos_token_id": [2, None]}, ["eos_token_id is [2, None]"]),
        ({"rope_scaling": "linear"}, ['rope_scaling is "linear", but must be an object']),
        ({"rope_parameters": [1]}, ["rope_parameters is [1], but must be an object"]),
        ({"rope_parameters": {"rope_type": "spiral", "factor": 4.0}}, ["spiral", "linear", "llama3"]),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, ["rope_parameters.mrope_section"]),
        ({"rope_scaling": {"type": "linear"}}, ["linear", "factor"]),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, ["linear", "two"]),
        ({"sliding_window": 8}, ["sliding_window is 8", "LlamaForCausalLM"]),
        ({"layer_types": ["full_attention", "linear_attention"]}, ["layer_types"]),
        ({"embedding_multiplier": 12.0}, ["embedding_multiplier is 12.0", "remove the key"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, ["quantized by bitsandbytes", "awq"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"hidden_size": None}, ["hidden_size"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers is 0"]),
        ({"num_key_value_heads": 3}, ["4 heads", "3 kv heads"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16"]),
    ],
)
def test_unsupported_models_are_refused_by_name(changes: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, **changes)
    assert all(word in str(caught.value) for word in [*words, "config.json"])


def test_keys_that_change_nothing_are_no_obstacle(tmp_path: Path) -> None:
    plain = read(tmp_path)
    off: dict[str, Any] = {
        "sliding_window": None,
        "use_qk_norm": False,
        "rope_interleaved": False,
        "partial_rotary_factor": 1.0,
    }
    harmless: dict[str, Any] = {
        "layer_types": ["full_attention"] * 2,
        "attention_dropout": 0.1,
        "temperature": 0.6,
        "pretraining_tp": 2,
    }
    assert read(tmp_path, **off, **harmless) == plain
    assert read(tmp_path, layer_types=None, partial_rotary_factor=None, is_causal=None) == plain


def test_layers_have_windows_where_the_configuration_says_so(tmp_path: Path) -> None:
    def windows(**changes: Any) -> list[int | None]:
        arch = read(tmp_path, architectures=["Qwen2ForCausalLM"], num_hidden_layers=3, sliding_window=8, **changes)
        return [arch.attention_options(layer).sliding_window for layer in range(3)]

    mixed = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows() == windows(use_sliding_window=False, layer_types=mixed) == [None] * 3
    assert windows(use_sliding_window=True) == [None] * 3  # the first 28 layers have none
    assert windows(use_sliding_window=True, max_window_layers=1) == [None, 8, 8]
    assert windows(use_sliding_window=True, layer_types=mixed) == [8, None, 8]
    assert windows(use_sliding_window=True, max_window_layers=0, layer_types=["full_attention"] * 3) == [None] * 3
    with pytest.raises(CheckpointError, match="layer_types has chunked_attention"):
        windows(layer_types=["chunked_attention"] * 3)
    with pytest.raises(CheckpointError, match="must be a list of 3"):
        windows(layer_types=["full_attention"])


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model folder at .*nowhere"):
        arch_from_folder(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        arch_from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(CheckpointError, match=r"config\.json can't be read as JSON"):
        arch_from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold an object"):
        arch_from_folder(tmp_path)


def test_an_abstract_model_of_any_size_allocates_nothing(tmp_path: Path) -> None:
    arch = read(tmp_path, hidden_size=2**16, vocab_size=2**22)  # a terabyte of embedding
    _, params = abstract_model(arch, jnp.dtype("float32"))
    assert params["embedding"].shape == (2**22, 2**16)


def test_folders_whose_names_and_keys_are_not_those_of_transformers_are_understood(tmp_path: Path) -> None:
    assert read(tmp_path, model_name="a/base", internal_version="7b-alpha-v2") == read(tmp_path)
    mixture: dict[str, Any] = {
        "num_key_value_heads": 2, "num_experts": 16, "num_shared_experts": 1, "moe_intermediate_size": 32,
        "sliding_window": 64,
    }  # fmt: skip
    same = read(tmp_path, architectures=["ExaoneMoeForCausalLM"], first_k_dense_replace=1, **mixture)
    other: dict[str, Any] = {"scoring_func": "sigmoid", "is_moe_layer": [False, True], "first_last_k_dense_replace": 1}
    assert read(tmp_path, architectures=["ExaoneMoEForCausalLM"], **mixture, **other) == same
    assert [isinstance(layer.mlp, MoeMlp) for layer in same.layers] == [False, True]
