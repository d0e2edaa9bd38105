"""LLaVA in transformers' form: decoders of other families next to CLIP's tower, or Pixtral's (arXiv 2310.03744)."""

from __future__ import annotations

from dataclasses import replace

from jaxsgl.models.families.dense import DENSE
from jaxsgl.models.families.towers import CLIP, LLAVA_NEXT_TOWER, LLAVA_ONEVISION_TOWER, PIXTRAL_IN_LLAVA
from jaxsgl.models.family import Family
from jaxsgl.models.towers.family import VisionFamily

# Sizes that published folders leave out, as transformers' classes have them; other decoders' are told.
_SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_DECODERS: dict[str, Family] = {
    "llama": replace(
        DENSE["LlamaForCausalLM"],
        defaults={**DENSE["LlamaForCausalLM"].defaults, **_SIZES, "intermediate_size": 11_008},
    ),
    "mistral": replace(
        DENSE["MistralForCausalLM"],
        defaults={
            **DENSE["MistralForCausalLM"].defaults,
            **_SIZES,
            "intermediate_size": 14_336,
            "max_position_embeddings": 131_072,
        },
    ),
    "qwen2": DENSE["Qwen2ForCausalLM"],
}
# Of the tower: what its other half reads, and training; and the tokens of a picture, which follow from its size.
# And how pictures are cut into tiles.
_IGNORED = {"head_dim", "image_seq_length", "image_size", "initializer_factor", "projection_dim", "vocab_size"}
_IGNORED |= {"image_grid_pinpoints", "video_token_index", "vision_aspect_ratio", "vision_use_head"}


def _beside(tower: VisionFamily, decoder: Family) -> Family:
    """A family whose decoders stand next to the tower."""
    return replace(
        decoder,
        section="text_config",
        ties_either=tower is LLAVA_ONEVISION_TOWER,
        vision=tower,
        ignored=decoder.ignored | _IGNORED,
    )


# The names of `LLAVA` by the tower's and the decoder's `model_type`; the first ones hold where none is told.
LLAVA_BY_TOWER = {
    "clip_vision_model": "LlavaForConditionalGeneration",
    "pixtral": "LlavaPixtralForConditionalGeneration",
}
LLAVA_BY_DECODER = {
    "LlavaForConditionalGeneration": {
        "llama": "LlavaForConditionalGeneration",
        "mistral": "LlavaMistralForConditionalGeneration",
        "qwen2": "LlavaQwen2ForConditionalGeneration",
    },
    "LlavaPixtralForConditionalGeneration": {
        "llama": "LlavaPixtralLlamaForConditionalGeneration",
        "mistral": "LlavaPixtralForConditionalGeneration",
    },
    "LlavaNextForConditionalGeneration": {
        "llama": "LlavaNextForConditionalGeneration",
        "mistral": "LlavaNextMistralForConditionalGeneration",
        "qwen2": "LlavaNextQwen2ForConditionalGeneration",
    },
    "LlavaOnevisionForConditionalGeneration": {"qwen2": "LlavaOnevisionForConditionalGeneration"},
}
WITH_CLIP, WITH_PIXTRAL, LLAVA_NEXT, LLAVA_ONEVISION = (tuple(names.values()) for names in LLAVA_BY_DECODER.values())
_TOWERS = (CLIP, PIXTRAL_IN_LLAVA, LLAVA_NEXT_TOWER, LLAVA_ONEVISION_TOWER)
LLAVA: dict[str, Family] = {
    name: _beside(tower, _DECODERS[decoder])
    for names, tower in zip(LLAVA_BY_DECODER.values(), _TOWERS, strict=True)
    for decoder, name in names.items()
}
