"""InternVL 2.5 to 3.5 in transformers' form: decoders of other families next to a tower (arXiv 2312.14238)."""

from __future__ import annotations

from dataclasses import replace

from jaxsgl.models.families.dense import DENSE
from jaxsgl.models.families.mixtures import MIXTURES
from jaxsgl.models.family import Family, VisionFamily

_TOWER = VisionFamily(
    151_667,
    None,
    deepstack_layers=None,
    sections=None,
    activations=("gelu",),
    class_token=True,
    layer_scales=True,
    norm_key="norm_type",
    joint_norms_key="use_qk_norm",
    qkv_bias_key="attention_bias",
    merger="square",
    turns=False,
    frames=1,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
    required={"use_absolute_position_embeddings": True, "use_mean_pooling": True, "use_mask_token": False},
    required_beside={
        "downsample_ratio": 0.5,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    },
    keys={"depth": "num_hidden_layers", "num_heads": "num_attention_heads", "in_channels": "num_channels"},
    defaults={
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "patch_size": 14,
        "image_size": 448,
    },
)
# Of the tower's beginning and training; and the tokens of a tile, which follow from its size.
_IGNORED = {"drop_path_rate", "image_seq_length", "initializer_factor", "layer_scale_init_value", "projection_dropout"}


def _beside_tower(decoder: Family) -> Family:
    """A family whose decoders stand next to the tower."""
    return replace(
        decoder,
        section="text_config",
        ties_whole=True,
        vision=_TOWER,
        ignored=decoder.ignored | _IGNORED,
    )


INTERNVL: dict[str, Family] = {
    "InternVLForConditionalGeneration": _beside_tower(DENSE["Qwen2ForCausalLM"]),
    "InternVLGptOssForConditionalGeneration": _beside_tower(MIXTURES["GptOssForCausalLM"]),
    "InternVLLlamaForConditionalGeneration": _beside_tower(DENSE["LlamaForCausalLM"]),
    "InternVLQwen3ForConditionalGeneration": _beside_tower(DENSE["Qwen3ForCausalLM"]),
    "InternVLQwen3MoeForConditionalGeneration": _beside_tower(MIXTURES["Qwen3MoeForCausalLM"]),
}
# The names above by the decoder's `model_type`; InternLM 2.5 is a Llama there.
INTERNVL_BY_DECODER = {
    "qwen2": "InternVLForConditionalGeneration",
    "gpt_oss": "InternVLGptOssForConditionalGeneration",
    "llama": "InternVLLlamaForConditionalGeneration",
    "qwen3": "InternVLQwen3ForConditionalGeneration",
    "qwen3_moe": "InternVLQwen3MoeForConditionalGeneration",
}
