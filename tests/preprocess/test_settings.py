"""The settings of a processor are read from the model's folder, and other processors are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxsgl.errors import CheckpointError
from jaxsgl.preprocess.settings import load_settings
from tests.preprocess.pictures import SETTINGS

CONFIG = {
    "vision_config": {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2},
    "image_token_id": 7, "video_token_id": 8, "vision_start_token_id": 5, "vision_end_token_id": 6,
}  # fmt: skip
IMAGE = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2,
    "merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast",
}  # fmt: skip
VIDEO = {**IMAGE, "size": {"longest_edge": 25165824, "shortest_edge": 4096}}


def write(folder: Path, **files: Any) -> Path:
    for name, values in {"config": CONFIG, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def test_the_files_of_qwen3_vl_are_understood(tmp_path: Path) -> None:
    write(tmp_path, preprocessor_config=IMAGE, video_preprocessor_config=VIDEO)
    assert load_settings(tmp_path) == SETTINGS


def test_one_file_for_both_is_understood(tmp_path: Path) -> None:
    write(tmp_path, processor_config={"image_processor": IMAGE, "video_processor": VIDEO})
    assert load_settings(tmp_path) == SETTINGS


def test_a_folder_without_them_has_the_settings_of_qwen3_vl(tmp_path: Path) -> None:
    assert load_settings(write(tmp_path)) == SETTINGS


def test_a_model_without_a_tower_has_none(tmp_path: Path) -> None:
    assert load_settings(write(tmp_path, config={"model_type": "qwen3"})) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"do_resize": False}, "do_resize is False, but only True"),
        ({"resample": 2}, "resample is 2, but only 3"),
        ({"patch_size": 14}, "patch_size is 14, but only 16"),
        ({"rescale_factor": 1.0}, "rescale_factor is 1.0, but only 1/255"),
        ({"image_mean": "x"}, "can't be understood"),
    ],
)
def test_a_processor_that_does_something_else_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_settings(write(tmp_path, preprocessor_config={**IMAGE, **changed}))


def test_videos_with_another_normalization_than_images_are_refused(tmp_path: Path) -> None:
    video = {**VIDEO, "image_mean": [0.4, 0.5, 0.5]}
    with pytest.raises(CheckpointError, match="must agree"):
        load_settings(write(tmp_path, preprocessor_config=IMAGE, video_preprocessor_config=video))
