"""What is read of a vision tower's config.json and its image processor, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from jaxsgl.errors import CheckpointError
from jaxsgl.models import ModelArch
from tests.vision_models import IDS, TEXT, VISION

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
    return ModelArch.from_folder(folder)


def test_a_hub_config_gives_tower_and_rope(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]})
    )
    arch = read(tmp_path)
    assert arch.vision is not None
    assert arch.ropes[0].sections == (4, 2, 2) and arch.ropes[0].theta == 5_000_000
    assert (arch.vision.table_side, arch.vision.deepstack_layers, arch.vision.row_len) == (5, (0, 2), 3 * 64)
    assert (arch.vision.mean, arch.vision.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))


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
