"""The model families that are served: what an architecture's name implies, as data.

Owns which family has which differences of `family`, a file for each kind. Never knows tensors' names
(`weights/families`), nor how a difference is computed. Read by `arch_file`, and for GGUF by `weights/gguf_config.py`.
docs/models.md says how to add one.
"""

from __future__ import annotations

from jaxsgl.models.families.dense import DENSE
from jaxsgl.models.families.encoders import ENCODERS
from jaxsgl.models.families.gemma import GEMMA
from jaxsgl.models.families.hearing import HEARING
from jaxsgl.models.families.internvl import INTERNVL, INTERNVL_BY_DECODER
from jaxsgl.models.families.latents import LATENTS
from jaxsgl.models.families.layer_norms import LAYER_NORMS
from jaxsgl.models.families.llava import LLAVA, LLAVA_BY_DECODER, LLAVA_BY_TOWER
from jaxsgl.models.families.mixtures import MIXTURES
from jaxsgl.models.families.recurrent import RECURRENT
from jaxsgl.models.families.seeing import SEEING
from jaxsgl.models.family import Family

FAMILIES: dict[str, Family] = {
    **DENSE,
    **GEMMA,
    **SEEING,
    **LAYER_NORMS,
    **MIXTURES,
    **LATENTS,
    **RECURRENT,
    **ENCODERS,
    **INTERNVL,
    **LLAVA,
    **HEARING,
}
# Where one architecture has different towers, and then where it has different decoders: the name in `FAMILIES` by the
# part's `model_type`. The first one holds where config.json doesn't say it.
BY_TOWER: dict[str, dict[str, str]] = {
    "AyaVisionForConditionalGeneration": {"siglip_vision_model": "AyaVisionForConditionalGeneration"},
    "Cohere2VisionForConditionalGeneration": {"siglip_vision_model": "Cohere2VisionForConditionalGeneration"},
    "Lfm2VlForConditionalGeneration": {"siglip2_vision_model": "Lfm2VlForConditionalGeneration"},
    "LightOnOcrForConditionalGeneration": {"pixtral": "LightOnOcrForConditionalGeneration"},
    "LlavaForConditionalGeneration": LLAVA_BY_TOWER,
    "LlavaNextForConditionalGeneration": {"clip_vision_model": "LlavaNextForConditionalGeneration"},
    "LlavaOnevisionForConditionalGeneration": {"siglip_vision_model": "LlavaOnevisionForConditionalGeneration"},
}
BY_DECODER: dict[str, dict[str, str]] = {
    "Qwen2AudioForConditionalGeneration": {"qwen2": "Qwen2AudioForConditionalGeneration"},
    "VoxtralForConditionalGeneration": {"llama": "VoxtralForConditionalGeneration"},
    "Mistral3ForConditionalGeneration": {
        "mistral": "Mistral3ForConditionalGeneration",
        "ministral3": "Ministral3ForConditionalGeneration",
        "mistral4": "Mistral4ForConditionalGeneration",
    },
    "Glm46VForConditionalGeneration": {
        "glm4v_text": "Glm4vForConditionalGeneration",
        "glm4v_moe_text": "Glm4vMoeForConditionalGeneration",
    },
    "InternVLForConditionalGeneration": INTERNVL_BY_DECODER,
    "AyaVisionForConditionalGeneration": {"cohere2": "AyaVisionForConditionalGeneration"},
    "Cohere2VisionForConditionalGeneration": {"cohere2": "Cohere2VisionForConditionalGeneration"},
    "Idefics3ForConditionalGeneration": {"llama": "Idefics3ForConditionalGeneration"},
    "SmolVLMForConditionalGeneration": {"llama": "SmolVLMForConditionalGeneration"},
    "Lfm2VlForConditionalGeneration": {"lfm2": "Lfm2VlForConditionalGeneration"},
    "LightOnOcrForConditionalGeneration": {"qwen3": "LightOnOcrForConditionalGeneration"},
    **LLAVA_BY_DECODER,
}
_OURS_ALONE = {
    "Ministral3ForConditionalGeneration",
    "Mistral4ForConditionalGeneration",
    *(name for name in (*INTERNVL, *LLAVA) if name not in ("InternVLForConditionalGeneration", *BY_TOWER)),
}
# Those that config.json may have.
TOLD_NAMES = (*(name for name in FAMILIES if name not in _OURS_ALONE), "Glm46VForConditionalGeneration")
