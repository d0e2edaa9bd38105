"""The model families that are served: what an architecture's name implies, as data.

Owns which family has which differences of `family`, a file for each kind. Never knows tensors' names
(`weights/names.py`), nor how a difference is computed. Read by `arch`, and for GGUF by `weights/gguf_config.py`.
docs/models.md says how to add one.
"""

from __future__ import annotations

from jaxsgl.models.families.dense import DENSE
from jaxsgl.models.families.internvl import INTERNVL, INTERNVL_BY_DECODER
from jaxsgl.models.families.latents import LATENTS
from jaxsgl.models.families.layer_norms import LAYER_NORMS
from jaxsgl.models.families.mixtures import MIXTURES
from jaxsgl.models.families.recurrent import RECURRENT
from jaxsgl.models.family import Family

FAMILIES: dict[str, Family] = {**DENSE, **LAYER_NORMS, **MIXTURES, **LATENTS, **RECURRENT, **INTERNVL}
# Where one architecture has different decoders: the name in `FAMILIES` by the decoder's `model_type`.
BY_DECODER: dict[str, dict[str, str]] = {
    "Mistral3ForConditionalGeneration": {
        "mistral": "Mistral3ForConditionalGeneration",
        "ministral3": "Ministral3ForConditionalGeneration",
        "mistral4": "Mistral4ForConditionalGeneration",
    },
    "InternVLForConditionalGeneration": INTERNVL_BY_DECODER,
}
_OURS_ALONE = {name for names in BY_DECODER.values() for name in names.values()} - BY_DECODER.keys()
TOLD_NAMES = tuple(name for name in FAMILIES if name not in _OURS_ALONE)  # those that config.json may have
