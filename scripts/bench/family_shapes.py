"""A config.json for each architecture that is served, in the sizes of transformers' default configuration.

`CHANGES` has what the default leaves out, or has in sizes that no model has; `CLASSES` the architectures that
transformers gives no class. Knows no engine. Called by `targets.families`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from bench.models import COMPILED_SHAPES
from bench.output import write_json

# The `model_type` whose configuration an architecture has, where transformers doesn't say it.
CLASSES = {
    "BailingMoeV2ForCausalLM": "glm4_moe",
    "ExaoneForCausalLM": "llama",
    "IQuestCoderForCausalLM": "llama",
    "InternLM3ForCausalLM": "llama",
    "MiniCPMForCausalLM": "llama",
    "SarvamMLAForCausalLM": "deepseek_v3",
    "SarvamMoEForCausalLM": "glm4_moe",
    "VoxtralForConditionalGeneration": "voxtral",
    "Kimi_K25ForConditionalGeneration": "kimi_k25",
    "NewModel": "gte",
    "Qwen2AudioForConditionalGeneration": "qwen2_audio",
}
_HALF_ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "mrope_section": [8, 12, 12],
    "partial_rotary_factor": 0.5,
}
_EVEN_SIDE = {"image_size": 364, "patch_size": 14}
# Those of Falcon-H1-7B: the default's heads have 8 numbers.
_FALCON_H1 = {
    "hidden_size": 3072, "intermediate_size": 12_288, "num_attention_heads": 12, "num_key_value_heads": 2,
    "head_dim": 128, "mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128,
}  # fmt: skip
# Those of Nemotron 3 Nano 30B-A3B: the default's experts have 7,688 units.
_NEMOTRON_H = {
    "hidden_size": 2688, "num_key_value_heads": 2, "mamba_num_heads": 64, "n_routed_experts": 128,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
}  # fmt: skip
# Keys in the place of the default's, those of sections in theirs.
CHANGES: dict[str, dict[str, Any]] = {
    "AyaVisionForConditionalGeneration": {"vision_config": _EVEN_SIDE | {"num_attention_heads": 16}},
    "BailingMoeV2ForCausalLM": {"head_dim": 128},
    "BambaForCausalLM": {"attn_layer_indices": [9, 18, 27]},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},  # 1,407 by default
    "Dots1ForCausalLM": {"hidden_size": 4096, "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "ElectraModel": {"embedding_size": 256},
    "Exaone4_5_ForConditionalGeneration": {"vision_config": {"out_hidden_size": 4096}},
    "FalconH1ForCausalLM": _FALCON_H1,
    "Gemma3ForConditionalGeneration": {"vision_config": {"image_size": 896, "patch_size": 14}},
    "Glm46VForConditionalGeneration": {"text_config": {"rope_parameters": _HALF_ROPE}},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "Glm4vForConditionalGeneration": {"text_config": {"rope_parameters": _HALF_ROPE}},
    "Glm4vMoeForConditionalGeneration": {"text_config": {"head_dim": 128, "rope_parameters": _HALF_ROPE}},
    "GlmOcrForConditionalGeneration": {"vision_config": {"out_hidden_size": 1024}},
    "GraniteMoeHybridForCausalLM": COMPILED_SHAPES["granite-4.0-h-small"],
    "Idefics3ForConditionalGeneration": {"vision_config": _EVEN_SIDE},
    "NemotronHForCausalLM": _NEMOTRON_H,
    "Qwen2VLForConditionalGeneration": {"vision_config": {"hidden_size": 8192}},
    "Qwen2_5_VLForConditionalGeneration": {"vision_config": {"out_hidden_size": 8192}},
    "Qwen3VLForConditionalGeneration": {"vision_config": {"out_hidden_size": 4096}},
    "Qwen3VLMoeForConditionalGeneration": {"vision_config": {"out_hidden_size": 2048}},
    "Qwen3_5ForConditionalGeneration": {"vision_config": {"out_hidden_size": 4096}},
    "Qwen3_5MoeForConditionalGeneration": {"vision_config": {"out_hidden_size": 2048}},
    "SarvamMoEForCausalLM": {"head_dim": 64, "num_key_value_heads": 4},
    "SmolVLMForConditionalGeneration": {"vision_config": _EVEN_SIDE},
}
# Of the saved class itself, and no sizes.
_LEFT_OUT = ("_name_or_path", "transformers_version")


def write_family_config(architecture: str, folder: Path) -> Path:
    """Writes the config.json of the architecture; returns `folder`.

    Raises:
        KeyError: transformers has no class for it, and neither has `CLASSES`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    default = CONFIG_MAPPING[_model_types()[architecture]]().to_dict()
    plain = {key: value for key, value in default.items() if key not in _LEFT_OUT}
    told = {"architectures": [architecture], "dtype": "bfloat16"}
    write_json(folder / "config.json", _changed(plain, CHANGES.get(architecture, {}) | told))
    return folder


def _model_types() -> dict[str, str]:
    """The `model_type` of each architecture; a decoder's own, where its whole model has the same class."""
    found: dict[str, str] = {}
    mappings = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES
    for names in mappings:
        for model_type, classes in names.items():
            own = f"{model_type}_text"
            for name in (classes,) if isinstance(classes, str) else classes:
                found.setdefault(name, own if names.get(own) == name else model_type)
    return found | CLASSES


def _changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    sections = {
        key: _changed(config[key], value)
        for key, value in changes.items()
        if isinstance(value, dict) and isinstance(config.get(key), dict) and key.endswith("_config")
    }
    return config | changes | sections
