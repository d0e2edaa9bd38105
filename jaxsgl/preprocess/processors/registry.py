"""Which reader understands a model's processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from jaxsgl.preprocess.processors import gemma, glm, hearing, llava, pixtral, qwen, tiles
from jaxsgl.preprocess.processors.files import ProcessorFiles, read_files
from jaxsgl.preprocess.settings import ProcessorSettings

# By `model_type` of config.json; others are read as Qwen3-VL.
READERS: Mapping[str, Callable[[ProcessorFiles], ProcessorSettings]] = {
    "qwen2_vl": qwen.read_qwen_vl,
    "qwen2_5_vl": qwen.read_qwen_vl,
    "exaone4_5": qwen.read_pictures,
    "paddleocr_vl": qwen.read_pictures,
    "mistral3": pixtral.read_mistral3,
    "lighton_ocr": pixtral.read_light_on_ocr,
    "llava": llava.read_llava,
    "llava_next": llava.read_joined_tiles,
    "llava_onevision": llava.read_joined_tiles,
    "gemma3": gemma.read_gemma3,
    "gemma4": gemma.read_gemma4,
    "gemma4_unified": gemma.read_gemma4,
    "internvl": tiles.read_internvl,
    "idefics3": tiles.read_idefics3,
    "smolvlm": tiles.read_idefics3,
    "aya_vision": tiles.read_aya_vision,
    "cohere2_vision": tiles.read_cohere2_vision,
    "lfm2_vl": tiles.read_lfm2_vl,
    "lfm2-vl": tiles.read_lfm2_vl,
    **dict.fromkeys(glm.TOKENS, glm.read_glm4v),
    **dict.fromkeys(hearing.MODELS, hearing.read_sounds),
}


def load_settings(folder: str | Path) -> ProcessorSettings | None:
    """Returns the settings of the model in `folder`; None if it has no tower.

    Raises `CheckpointError` for a file that can't be read, or a processor that does something else to pictures.
    """
    if (files := read_files(Path(folder), hearing.MODELS)) is None:
        return None
    return READERS.get(files.model_type, qwen.read_qwen_vl)(files)
