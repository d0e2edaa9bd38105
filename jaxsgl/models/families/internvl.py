"""InternVL 2.5 to 3.5 in transformers' form: decoders of other families next to a tower (arXiv 2312.14238)."""

from __future__ import annotations

from dataclasses import replace

from jaxsgl.models.families.dense import DENSE
from jaxsgl.models.families.mixtures import MIXTURES
from jaxsgl.models.families.towers import INTERNVL_TOWER
from jaxsgl.models.family import Family

# Of the tower's beginning and training; and the tokens of a tile, which follow from its size.
_IGNORED = {"drop_path_rate", "image_seq_length", "initializer_factor", "layer_scale_init_value", "projection_dropout"}


def _beside_tower(decoder: Family) -> Family:
    """A family whose decoders stand next to the tower."""
    return replace(
        decoder,
        section="text_config",
        ties_whole=True,
        vision=INTERNVL_TOWER,
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
