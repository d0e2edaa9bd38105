"""What is read of a vision tower's config.json and its image processor, and what is refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from jaxsgl.errors import CheckpointError
from jaxsgl.models import ModelArch, arch_from_folder
from jaxsgl.models.rope import axis_of_pairs
from jaxsgl.models.towers.arch import LayerShape, MergerShape, Norms, PatchShape, Pixels, Positioning, TowerTokens
from tests.checkpoints import configuration
from tests.vision_models import IDS, KINDS, TEXT, TOWERS, VISION

CLIP_PIXELS = Pixels(tuple(OPENAI_CLIP_MEAN), tuple(OPENAI_CLIP_STD))
# As on the hub, where transformers 4 wrote it.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {
        **{key: value for key, value in TEXT.items() if key != "rope_parameters"},
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
        "rope_theta": 5_000_000,
        "eos_token_id": 2,
    },
    "vision_config": {**VISION, "hidden_act": "gelu_pytorch_tanh", "model_type": "qwen3_vl"},
    **IDS,
}


def read(folder: Path, *changes: tuple[str, str, Any]) -> ModelArch:
    config = copy.deepcopy(CONFIG)
    for section, key, value in changes:
        config[section][key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return arch_from_folder(folder)


def test_a_hub_config_gives_tower_and_rope(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]})
    )
    arch = read(tmp_path)
    assert arch.tower is not None
    assert arch.ropes[0].sections == (4, 2, 2) and arch.ropes[0].theta == 5_000_000
    assert (arch.tower.positioning.side, arch.tower.layers.taps, arch.tower.row_len) == (5, (0, 2), 3 * 64)
    assert (arch.tower.patches.pixels.mean, arch.tower.patches.pixels.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("vision_config", "hidden_act", "relu"), "hidden_act is relu"),
        (("vision_config", "out_hidden_size", 65), "out_hidden_size is 65"),
        (("vision_config", "num_position_embeddings", 24), "24, not a square"),
        (("vision_config", "deepstack_visual_indexes", [2, 4]), "numbers of layers below 4"),
        (("vision_config", "in_channels", 1), "in_channels is 1"),
        (("vision_config", "num_heads", 5), "5 heads"),
        (("vision_config", "window_size", 8), "window_size"),
        (("text_config", "rope_scaling", {"mrope_section": [4, 2, 1]}), "mrope_section is"),
        (
            ("text_config", "rope_scaling", {"mrope_section": [4, 2, 2], "mrope_interleaved": False}),
            "mrope_interleaved",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: tuple[str, str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(tmp_path, change)


# As published: the decoder's keys stand beside the tower's object.
QWEN2_5_VL: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}
QWEN2_VL: dict[str, Any] = {
    **QWEN2_5_VL,
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "in_chans": 3,
        "hidden_size": 1536,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
}


def read_values(folder: Path, values: dict[str, Any]) -> ModelArch:
    (folder / "config.json").write_text(json.dumps(values))
    return arch_from_folder(folder)


def test_a_published_config_of_qwen2_5_vl_gives_windows_and_pairs_in_order(tmp_path: Path) -> None:
    arch = read_values(tmp_path, QWEN2_5_VL)
    tower, rope = arch.tower, arch.ropes[0]
    assert tower is not None
    assert (tower.hidden_size, tower.out_size, tower.row_len) == (1280, 2048, 2048)
    assert tower.layers == LayerShape(32, 16, 80, 3420, activation="silu", gated=True, window=4, full=(7, 15, 23, 31))
    assert tower.positioning == Positioning() and tower.norms == Norms("root")
    assert not tower.patches.bias and tower.patches.pixels == CLIP_PIXELS
    assert (rope.sections, rope.takes_turns, rope.theta) == ((16, 24, 24), False, 1e6)
    assert axis_of_pairs(rope, 128).tolist() == [0] * 16 + [1] * 24 + [2] * 24
    assert arch.attention_bias and not arch.attention_out_bias and arch.tie_embeddings
    assert all(spec.window is None for spec in arch.layers)


def test_a_published_config_of_qwen2_vl_gives_a_tower_without_windows(tmp_path: Path) -> None:
    tower = read_values(tmp_path, QWEN2_VL).tower
    assert tower is not None
    assert (tower.hidden_size, tower.out_size, tower.norms) == (1280, 1536, Norms())
    assert tower.layers == LayerShape(32, 16, 80, 5120, activation="quick_gelu")


@pytest.mark.parametrize("published", [QWEN2_VL, QWEN2_5_VL], ids=["qwen2_vl", "qwen2_5_vl"])
def test_a_decoder_is_described_beside_the_tower_or_in_an_object_or_in_both(
    published: dict[str, Any], tmp_path: Path
) -> None:
    """Tools of some months wrote it twice."""
    flat = read_values(tmp_path, published)
    outside = {"architectures", "model_type", "vision_config", *(key for key in published if key.endswith("token_id"))}
    text = {key: value for key, value in published.items() if key not in outside}
    beside = {key: published[key] for key in outside} | {"tie_word_embeddings": True}
    assert read_values(tmp_path, {**beside, "text_config": text}) == flat
    assert read_values(tmp_path, {**published, "text_config": text}) == flat


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("vision_config", "window_size", 27, "window_size is 27, but a token has sides of 28 pixels"),
        ("vision_config", "fullatt_block_indexes", [7, 32], r"fullatt_block_indexes is \[7, 32\], but must be"),
        ("vision_config", "hidden_act", "gelu", "hidden_act is gelu, but must be silu"),
        ("vision_config", "num_position_embeddings", 2304, "num_position_embeddings"),
        ("vision_config", "in_chans", 1, "images have 3"),
        ("rope_scaling", "mrope_interleaved", True, "mrope_interleaved is True"),
        ("rope_scaling", "mrope_section", [16, 24, 23], "mrope_section is"),
    ],
)
def test_what_an_older_tower_may_not_have_is_refused_by_name(
    section: str, key: str, value: Any, words: str, tmp_path: Path
) -> None:
    values = copy.deepcopy(QWEN2_5_VL)
    values[section][key] = value
    with pytest.raises(CheckpointError, match=words):
        read_values(tmp_path, values)


# GLM-4.5V, as published, where transformers 4 wrote it.
GLM4_5V: dict[str, Any] = {
    "architectures": ["Glm4vMoeForConditionalGeneration"],
    "image_end_token_id": 151340,
    "image_start_token_id": 151339,
    "image_token_id": 151363,
    "model_type": "glm4v_moe",
    "text_config": {
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": [151329, 151336, 151338],
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "image_end_token_id": 151340,
        "image_start_token_id": 151339,
        "image_token_id": 151363,
        "initializer_range": 0.02,
        "intermediate_size": 10944,
        "max_position_embeddings": 65536,
        "model_type": "glm4v_moe_text",
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "pad_token_id": 151329,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"},
        "rope_theta": 10000.0,
        "routed_scaling_factor": 1.0,
        "router_aux_loss_coef": 0.0001,
        "topk_group": 1,
        "use_cache": True,
        "use_qk_norm": False,
        "vocab_size": 151552,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "video_end_token_id": 151342,
    "video_start_token_id": 151341,
    "video_token_id": 151364,
    "vision_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "depth": 24,
        "hidden_act": "silu",
        "hidden_size": 1536,
        "image_size": 336,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 10944,
        "model_type": "glm4v_moe_vision",
        "num_heads": 12,
        "out_hidden_size": 4096,
        "patch_size": 14,
        "rms_norm_eps": 1e-05,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


def test_a_published_config_of_glm_45v_gives_a_tower_and_three_positions(tmp_path: Path) -> None:
    """With the shapes of its published tensors: F of the tower's layers is D, and its merger's is another one."""
    arch = read_values(tmp_path, GLM4_5V)
    tower, rope = arch.tower, arch.ropes[0]
    assert tower is not None
    assert (tower.hidden_size, tower.out_size, tower.row_len) == (1536, 4096, 4096)
    assert (tower.layers.ffn_size, tower.layers.bias, tower.merger.ffn_size) == (4096, False, 10944)
    assert (tower.positioning, tower.table_len) == (Positioning("cubic", side=24), 576)
    assert (tower.tokens, tower.norms.eps) == (TowerTokens(151_363, 151_364, pad_id=151_329), 1e-5)
    assert tower.patches.bias and tower.patches.pixels == CLIP_PIXELS
    assert (rope.sections, rope.takes_turns, rope.rotary_dim, rope.interleaved) == ((8, 12, 12), False, 64, False)
    assert arch.attention_bias and not arch.attention_out_bias and arch.qk_norm is None and arch.next_layer is None
    text = {key: value for key, value in GLM4_5V["text_config"].items() if not key.startswith(("rope", "partial"))}
    text["rope_parameters"] = {
        "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "default",
    }  # fmt: skip
    assert read_values(tmp_path, {**GLM4_5V, "text_config": text}) == arch, "as transformers 5 writes it"


@pytest.mark.parametrize(
    ("kind", "name", "size"),
    [
        ("glm4v", "Glm4vForConditionalGeneration", 4096),
        ("glm4v_moe", "Glm4vMoeForConditionalGeneration", 4096),
        ("glm_ocr", "GlmOcrForConditionalGeneration", 1536),
    ],
)
def test_what_a_config_of_glm_4v_leaves_out_is_as_in_transformers(
    kind: str, name: str, size: int, tmp_path: Path
) -> None:
    text: dict[str, Any] = {"hidden_size": size, "num_attention_heads": 32, "num_hidden_layers": 2, "vocab_size": 99}
    text |= {"n_routed_experts": 8, "moe_intermediate_size": 32} if kind == "glm4v_moe" else {}
    text |= {"intermediate_size": 64, "partial_rotary_factor": 0.5, "head_dim": 128}
    told = {"architectures": [name], "model_type": kind, "text_config": text, "vision_config": {"patch_size": 14}}
    found = read_values(tmp_path, told)
    whole = {**AutoConfig.from_pretrained(tmp_path).to_dict(), "architectures": [name]}
    assert len(whole["text_config"]) > len(text) and read_values(tmp_path, whole) == found


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("vision_config", "attention_bias", True, "vision_config.attention_bias is true"),
        ("vision_config", "hidden_act", "gelu", "hidden_act is gelu, but must be silu"),
        ("vision_config", "out_hidden_size", 2048, "out_hidden_size is 2048, but the decoder's hidden size is 4096"),
        ("text_config", "use_qk_norm", True, "use_qk_norm is true"),
        ("text_config", "partial_rotary_factor", 1.0, "mrope_section is .* 64 together"),
    ],
)
def test_what_glm_4v_may_not_have_is_refused_by_name(
    section: str, key: str, value: Any, words: str, tmp_path: Path
) -> None:
    values = copy.deepcopy(GLM4_5V)
    values[section][key] = value
    with pytest.raises(CheckpointError, match=words):
        read_values(tmp_path, values)


# Mistral Small 3.2, as published.
MISTRAL3: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "use_cache": True,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "vision_config": {
        "attention_dropout": 0.0,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "image_size": 1540,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "model_type": "pixtral",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "rope_theta": 10000.0,
    },
    "vision_feature_layer": -1,
}


def test_a_published_config_of_mistral_3_gives_a_tower_and_lines(tmp_path: Path) -> None:
    arch = read_values(tmp_path, MISTRAL3)
    tower = arch.tower
    assert tower is not None and not arch.has_axes
    assert (tower.hidden_size, tower.out_size, tower.patch_len) == (1024, 5120, 3 * 14 * 14)
    assert tower.layers == LayerShape(24, 16, 64, 4096, activation="silu", gated=True, bias=False)
    assert tower.tokens == TowerTokens(image_id=10, has_lines=True) and not tower.patches.bias
    assert tower.norms == Norms("root", eps=1e-5, first=True)
    assert tower.merger == MergerShape("projected", 2, norm="root", eps=1e-5, bias=False)
    with_bias = read_values(tmp_path, {**MISTRAL3, "multimodal_projector_bias": True})
    assert with_bias.tower == replace(tower, merger=replace(tower.merger, bias=True))
    assert read_values(tmp_path, {**MISTRAL3, "vision_config": None}).tower is None


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("projector_hidden_act", "silu", "projector_hidden_act is silu, but must be gelu"),
        ("vision_feature_layer", -2, "vision_feature_layer is -2, but must be -1"),
        ("vision_feature_layer", [-1, -2], "vision_feature_layer is"),
    ],
)
def test_another_projector_is_refused_by_name(key: str, value: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_values(tmp_path, {**MISTRAL3, key: value})


# A folder of InternVL3 with the tower of 6 billion, as its authors' tool makes it.
INTERNVL: dict[str, Any] = {
    "architectures": ["InternVLForConditionalGeneration"],
    "downsample_ratio": 0.5,
    "image_seq_length": 256,
    "image_token_id": 151667,
    "model_type": "internvl",
    "projector_hidden_act": "gelu",
    "text_config": {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 27648,
        "max_position_embeddings": 32768,
        "max_window_layers": 70,
        "model_type": "qwen2",
        "num_attention_heads": 40,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151674,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "architectures": ["InternVisionModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": 3200,
        "image_size": [448, 448],
        "initializer_factor": 0.1,
        "initializer_range": 1e-10,
        "intermediate_size": 12800,
        "layer_norm_eps": 1e-06,
        "layer_scale_init_value": 0.1,
        "model_type": "internvl_vision",
        "norm_type": "rms_norm",
        "num_attention_heads": 25,
        "num_channels": 3,
        "num_hidden_layers": 45,
        "patch_size": [14, 14],
        "projection_dropout": 0.0,
        "use_absolute_position_embeddings": True,
        "use_mask_token": False,
        "use_mean_pooling": True,
        "use_qk_norm": True,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}


def test_a_published_config_of_internvl_gives_a_tower_of_tiles(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.485, 0.456, 0.406]}))
    arch = read_values(tmp_path, INTERNVL)
    tower = arch.tower
    assert tower is not None and not arch.has_axes and not tower.tokens.sees_ahead and tower.patches.class_token
    assert (tower.hidden_size, tower.table_len, tower.merged_size) == (3200, 1024, 12800)
    assert tower.layers == LayerShape(45, 25, 128, 12800, activation="gelu", qkv_bias=False, scales=True)
    assert tower.norms == Norms("root", heads="joint")
    assert tower.tokens == TowerTokens(image_id=151_667, most=256) and tower.positioning.image_side == 32
    assert tower.patches.pixels.mean[0] == 0.485
    assert arch.attention_bias and arch.tie_embeddings, "as transformers ties it, unless the tensors differ"
    small = {
        "attention_bias": True, "norm_type": "layer_norm", "use_qk_norm": False, "image_size": 448, "patch_size": 14,
    }  # fmt: skip
    told = {**INTERNVL, "vision_config": INTERNVL["vision_config"] | small, "vision_feature_layer": [-1]}
    found = read_values(tmp_path, told)
    assert found.tower == replace(tower, norms=Norms(), layers=replace(tower.layers, qkv_bias=True))


@pytest.mark.parametrize("kind", ["gpt_oss", "llama_untied_llama3_rope", "qwen3", "qwen3_moe"])
def test_the_decoder_of_internvl_is_that_of_its_own_family(kind: str, tmp_path: Path) -> None:
    text = configuration(kind) | {"torch_dtype": "bfloat16"}
    alone = read_values(tmp_path, text)
    beside = read_values(tmp_path, {**INTERNVL, "text_config": text, "tie_word_embeddings": alone.tie_embeddings})
    assert beside.tower is not None
    assert replace(beside, name=alone.name, tower=None) == alone


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("text_config", "model_type", "mistral", "text_config.model_type is mistral, but decoders of .* are qwen2, "),
        ("vision_config", "norm_type", "group_norm", "norm_type is group_norm, but must be layer_norm or rms_norm"),
        ("vision_config", "use_mean_pooling", False, "vision_config.use_mean_pooling is False, but must be True"),
        ("vision_config", "use_mask_token", True, "vision_config.use_mask_token is True, but must be False"),
        ("vision_config", "hidden_act", "silu", "hidden_act is silu, but must be gelu"),
        ("vision_config", "image_size", [448, 224], "image_size is .448, 224., but only models are served where"),
        ("vision_config", "image_size", 434, "images of 31 x 31 patches, but needs a multiple of 2"),
        ("", "downsample_ratio", 0.25, "downsample_ratio is 0.25, but must be 0.5"),
        ("", "vision_feature_layer", -2, "vision_feature_layer is -2, but must be -1"),
        ("", "vision_feature_select_strategy", "full", "vision_feature_select_strategy is full, but must be default"),
    ],
)
def test_what_internvl_may_not_have_is_refused_by_name(
    section: str, key: str, value: Any, words: str, tmp_path: Path
) -> None:
    values = copy.deepcopy(INTERNVL)
    (values[section] if section else values)[key] = value
    with pytest.raises(CheckpointError, match=words):
        read_values(tmp_path, values)


def test_what_a_config_of_internvl_leaves_out_is_as_in_transformers(tmp_path: Path) -> None:
    text = {**INTERNVL["text_config"], "rope_scaling": None}
    told = {"architectures": INTERNVL["architectures"], "model_type": "internvl", "text_config": text}
    told["vision_config"] = {"model_type": "internvl_vision"}
    found = read_values(tmp_path, told)
    whole = {**AutoConfig.from_pretrained(tmp_path).to_dict(), "architectures": told["architectures"]}
    assert "image_size" in whole["vision_config"] and read_values(tmp_path, whole) == found


# LLaVA 1.5 7B, as published: the decoder's sizes are those of transformers' class.
LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "vocab_size": 32064,
}
# Pixtral 12B in transformers' form, as published.
PIXTRAL_12B: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_seq_length": 1,
    "image_token_index": 10,
    "model_type": "llava",
    "projector_hidden_act": "gelu",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 14336,
        "is_composition": True,
        "max_position_embeddings": 1024000,
        "model_type": "mistral",
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "head_dim": 64,
        "hidden_act": "silu",
        "image_size": 1024,
        "is_composition": True,
        "model_type": "pixtral",
        "patch_size": 16,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}


# LLaVA-NeXT 7B with Mistral, and LLaVA-OneVision 0.5B, as published, in part.
LLAVA_NEXT: dict[str, Any] = {
    "architectures": ["LlavaNextForConditionalGeneration"],
    "model_type": "llava_next",
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "text_config": {"model_type": "mistral", "intermediate_size": 14336, "max_position_embeddings": 32768,
                    "num_key_value_heads": 8, "sliding_window": None, "rope_theta": 1000000.0, "vocab_size": 32064},
    "tie_word_embeddings": False,
    "use_image_newline_parameter": True,
    "vision_config": LLAVA["vision_config"],
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "vocab_size": 32064,
}  # fmt: skip
ONEVISION: dict[str, Any] = {
    "architectures": ["LlavaOnevisionForConditionalGeneration"],
    "model_type": "llava_onevision",
    "image_token_index": 151646,
    "projector_hidden_act": "gelu",
    "text_config": {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "vocab_size": 152000,
                    "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
                    "max_position_embeddings": 32768, "tie_word_embeddings": True},
    "tie_word_embeddings": False,
    "use_image_newline_parameter": True,
    "video_token_index": 151647,
    "vision_aspect_ratio": "anyres_max_9",
    "vision_config": {"hidden_size": 1152, "image_size": 384, "intermediate_size": 4304,
                      "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 26,
                      "patch_size": 14, "vision_use_head": False},
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}  # fmt: skip


def test_published_configs_of_joined_tiles_give_the_towers_of_one(tmp_path: Path) -> None:
    arch, onevision = read_values(tmp_path, LLAVA_NEXT), read_values(tmp_path, ONEVISION)
    alone = read_values(tmp_path, LLAVA).tower
    assert arch.name == "LlavaNextMistralForConditionalGeneration" and onevision.tie_embeddings
    assert alone is not None and arch.tower is not None and onevision.tower is not None
    assert arch.tower == replace(alone, tokens=replace(alone.tokens, joins_tiles=True, most=0))
    found = onevision.tower
    assert (found.layers.count, found.positioning.image_side, found.merger.kind) == (26, 27, "plain")
    assert found.tokens == TowerTokens(image_id=151_646, joins_tiles=True)
    assert not found.patches.class_token and not found.norms.last


def test_a_published_config_of_llava_gives_all_layers_of_clip_but_the_last(tmp_path: Path) -> None:
    arch = read_values(tmp_path, LLAVA)
    tower = arch.tower
    assert tower is not None and not arch.has_axes and arch.name == "LlavaForConditionalGeneration"
    assert (arch.hidden_size, arch.num_layers, arch.num_heads, arch.vocab_size) == (4096, 32, 32, 32064)
    assert tower.layers == LayerShape(23, 16, 64, 4096, activation="quick_gelu")
    assert (tower.hidden_size, tower.table_len) == (1024, 576) and tower.patches.class_token
    assert tower.positioning == Positioning("square", side=24, image_side=24, turns=False)
    assert tower.tokens == TowerTokens(image_id=32_000, most=576)
    assert tower.norms == Norms(eps=1e-5, first=True, first_last=True)
    assert tower.merger == MergerShape("plain", 1, norm=None, eps=1e-5)
    whole = read_values(tmp_path, {**LLAVA, "vision_feature_layer": [-1]})
    assert whole.tower == replace(tower, layers=replace(tower.layers, count=24))
    assert read_values(tmp_path, {**LLAVA, "vision_feature_layer": None}).tower == tower


def test_a_published_config_of_pixtral_gives_a_tower_whose_patches_are_not_merged(tmp_path: Path) -> None:
    arch = read_values(tmp_path, PIXTRAL_12B)
    tower = arch.tower
    assert tower is not None and not tower.patches.class_token
    assert (arch.hidden_size, arch.num_layers, arch.num_heads, arch.head_dim) == (5120, 40, 32, 128)
    assert (tower.hidden_size, tower.patches.size, tower.positioning.image_side) == (1024, 16, 0)
    assert tower.layers == LayerShape(24, 16, 64, 4096, activation="silu", gated=True, bias=False)
    assert tower.merger == MergerShape("plain", 1, norm=None, eps=1e-5)
    assert tower.tokens == TowerTokens(image_id=10, has_lines=True)


@pytest.mark.parametrize(
    ("told", "changed", "words"),
    [
        (LLAVA, {"vision_feature_select_strategy": "full"}, "strategy is full, but must be default"),
        (LLAVA, {"vision_feature_layer": [-2, -5]}, "vision_feature_layer is .-2, -5., but must be a layer"),
        (LLAVA, {"vision_feature_layer": -25}, "vision_feature_layer is -25, but must be .*, -1 to -24"),
        (LLAVA, {"projector_hidden_act": "relu"}, "projector_hidden_act is relu, but must be gelu"),
        (LLAVA, {"text_config": {"model_type": "phi"}}, "model_type is phi, but decoders of Llava.* llama, mistral, q"),
        (LLAVA, {"vision_config": {"model_type": "siglip_vision_model"}}, "siglip_vision_model, but towers of Llava"),
        (PIXTRAL_12B, {"vision_feature_select_strategy": None}, "strategy is default, but must be full"),
    ],
)
def test_what_llava_may_not_have_is_refused_by_name(
    told: dict[str, Any], changed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_values(tmp_path, {key: each for key, each in {**told, **changed}.items() if each is not None})


@pytest.mark.parametrize(("kind", "name"), [("glm4v", "Glm4v"), ("glm4v_moe", "Glm4vMoe")])
def test_the_class_of_glm_46v_is_that_of_its_decoder(kind: str, name: str, tmp_path: Path) -> None:
    config_class, _, text = KINDS[kind]
    config = config_class(text_config={**TEXT, **text}, vision_config=TOWERS[kind])
    known, found = (
        read_values(tmp_path, {**config.to_dict(), "architectures": [f"{each}ForConditionalGeneration"]})
        for each in (name, "Glm46V")
    )
    assert found == known and found.name == f"{name}ForConditionalGeneration"


def test_a_flat_config_of_paddleocr_vl_gives_a_tower_of_one_frame(tmp_path: Path) -> None:
    """As published: what the tower's object says of time belongs to no part of it."""
    told: dict[str, Any] = {
        "architectures": ["PaddleOCRVLForConditionalGeneration"], "compression_ratio": 1.0, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 1024, "ignored_index": -100, "image_token_id": 100295,
        "intermediate_size": 3072, "max_position_embeddings": 131072, "model_type": "paddleocr_vl",
        "num_attention_heads": 16, "num_hidden_layers": 18, "num_key_value_heads": 2, "rms_norm_eps": 1e-05,
        "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
        "rope_theta": 500000, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_bias": False, "video_token_id": 101307, "vision_start_token_id": 101305, "vocab_size": 103424,
        "vision_config": {
            "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304,
            "layer_norm_eps": 1e-06, "model_type": "paddleocr_vl", "num_attention_heads": 16, "num_channels": 3,
            "num_hidden_layers": 27, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "tokens_per_second": 2,
        },
    }  # fmt: skip
    arch = read_values(tmp_path, told)
    tower = arch.tower
    assert tower is not None and arch.has_axes and not arch.tie_embeddings and not arch.ropes[0].interleaved
    assert (tower.patches.frames, tower.out_size, tower.tokens.video_id) == (1, 1024, -1)
    assert tower.positioning == Positioning("edges", side=27) and tower.norms == Norms(last=True)
    assert tower.merger == MergerShape("mlp", 2, eps=1e-5)


def test_a_config_of_exaone_4_5_gives_a_tower_whose_heads_share_keys(tmp_path: Path) -> None:
    config_class, _, text = KINDS["exaone4_5"]
    tower = {"out_hidden_size": 64, "hidden_size": 2048, "num_heads": 32, "num_key_value_heads": 8}
    told = config_class(text_config={**TEXT, **text}, vision_config=tower).to_dict()
    told["architectures"] = ["Exaone4_5_ForConditionalGeneration"]
    arch = read_values(tmp_path, told)
    assert arch.tower is not None and not arch.has_axes
    assert (layers := arch.tower.layers).window == 4 and layers.ffn_size == 3420
    assert (layers.num_heads, layers.num_kv_heads, layers.kv_size) == (32, 8, 512)
    assert (arch.tower.tokens.image_id, arch.tower.tokens.video_id) == (67, -1)
    told["vision_config"]["num_key_value_heads"] = 5
    with pytest.raises(CheckpointError, match="32 heads of vision_config can't share 5 kv heads evenly"):
        read_values(tmp_path, told)


# SmolVLM 2.2B, as published.
SMOLVLM: dict[str, Any] = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "image_token_id": 49153,
    "model_type": "idefics3",
    "scale_factor": 3,
    "text_config": {
        "_flash_attn_2_enabled": True,
        "architectures": ["VLlama3ForCausalLM"],
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 16384,
        "model_type": "llama",
        "neftune_noise_alpha": 0.0,
        "num_attention_heads": 32,
        "num_hidden_layers": 24,
        "num_key_value_heads": 32,
        "perceiver_config": {"hidden_act": "silu", "model_type": "vllama3", "resampler_n_latents": 64},
        "pixel_shuffle_factor": 3,
        "qk_layer_norms": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 273768.0,
        "use_resampler": False,
        "vocab_size": 49155,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 384,
        "intermediate_size": 4304,
        "max_image_size": {"longest_edge": 384},
        "model_type": "idefics3",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "tie_word_embeddings": False,
        "use_base_siglip": False,
    },
    "vocab_size": 49155,
}


def test_a_published_config_of_smolvlm_gives_a_tower_whose_squares_pass_a_product(tmp_path: Path) -> None:
    arch = read_values(tmp_path, SMOLVLM)
    tower = arch.tower
    assert tower is not None and not (arch.has_axes or arch.tie_embeddings)
    assert (tower.out_size, tower.merged_size, tower.patches) == (2048, 9 * 1152, PatchShape(14, 1, 3))
    assert tower.positioning == Positioning("square", side=27, image_side=27, turns=False)
    assert tower.merger == MergerShape("product", 3, norm=None, bias=False)
    assert tower.tokens == TowerTokens(image_id=49_153, most=81)
    smol = {**SMOLVLM, "architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm"}
    assert replace(read_values(tmp_path, smol), name=arch.name) == arch


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("text_config", "model_type", "mistral", "text_config.model_type is mistral, but decoders of Idefics3"),
        ("vision_config", "image_size", 14 * 40, "images of 40 x 40 patches, whose places transformers rounds"),
        ("", "scale_factor", 2, "images of 27 x 27 patches, but needs a multiple of 2"),
    ],
)
def test_what_smolvlm_may_not_have_is_refused_by_name(
    section: str, key: str, value: Any, words: str, tmp_path: Path
) -> None:
    values = copy.deepcopy(SMOLVLM)
    (values[section] if section else values)[key] = value
    values["scale_factor"] = 4 if value == 14 * 40 else values["scale_factor"]
    with pytest.raises(CheckpointError, match=words):
        read_values(tmp_path, values)


def test_a_config_of_aya_vision_gives_a_tower_whose_tokens_have_no_mean(tmp_path: Path) -> None:
    """Since norms of the decoder would take it away."""
    config_class, _, text = KINDS["aya_vision"]
    tower = {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 364, "intermediate_size": 4304,
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    told = config_class(text_config={**TEXT, **text}, vision_config=tower, alignment_intermediate_size=36864).to_dict()
    arch = read_values(tmp_path, {**told, "architectures": ["AyaVisionForConditionalGeneration"]})
    found = arch.tower
    assert found is not None and arch.centred and not found.tokens.sees_ahead and not found.norms.last
    assert found.merger == MergerShape("halved", 2, ffn_size=36_864, centred=True)
    assert (found.tokens.image_id, found.tokens.most) == (255_036, 169)
    assert (found.layers.count, found.layers.activation) == (27, "gelu_pytorch_tanh")
