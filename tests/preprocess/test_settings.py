"""The settings of a processor are read from the model's folder, and other processors are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxsgl.errors import CheckpointError
from jaxsgl.preprocess.processors import load_settings
from jaxsgl.preprocess.settings import PixelSettings, TileWords
from tests.preprocess.pictures import (
    CLIP,
    CROPPED,
    FILLED,
    IMAGENET,
    IN_LINES,
    JOINED,
    LIFTED,
    OLDER,
    SETTINGS,
    SHRUNK,
    SQUARE,
    STEPPED,
    TILED,
    TOLD_TILES,
    UNMERGED,
)

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


# As published with Qwen2.5-VL, and with Qwen2-VL.
OLDER_IMAGE = {
    "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
}  # fmt: skip


def older(model_type: str) -> dict[str, Any]:
    tower = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    tower |= {"tokens_per_second": 2} if model_type == "qwen2_5_vl" else {}
    return {**CONFIG, "model_type": model_type, "vision_config": tower}


def test_the_one_file_of_qwen2_5_vl_is_of_images_and_normalizes_videos_too(tmp_path: Path) -> None:
    write(tmp_path, config=older("qwen2_5_vl"), preprocessor_config=OLDER_IMAGE)
    assert load_settings(tmp_path) == OLDER


def test_times_of_qwen2_vl_count_temporal_patches(tmp_path: Path) -> None:
    write(tmp_path, config=older("qwen2_vl"), preprocessor_config=OLDER_IMAGE)
    assert load_settings(tmp_path) == replace(OLDER, positions_per_s=None)


def test_a_folder_of_qwen2_vl_without_a_processor_has_transformers_settings(tmp_path: Path) -> None:
    settings = load_settings(write(tmp_path, config=older("qwen2_vl")))
    assert settings is not None
    assert settings.image == replace(OLDER.image, max_pixels=1003520) and settings.video == OLDER.video


def test_a_file_for_videos_counts_for_qwen2_5_vl(tmp_path: Path) -> None:
    video = {**OLDER_IMAGE, "min_pixels": 4000, "cap_pixels_per_frame": False, "max_frames": 6}
    write(tmp_path, config=older("qwen2_5_vl"), preprocessor_config=OLDER_IMAGE, video_preprocessor_config=video)
    settings = load_settings(tmp_path)
    assert settings is not None
    assert (settings.video.min_pixels, settings.caps_frames, settings.max_frames) == (4000, False, 6)


# InternVL3, as published; transformers 4 names the tokens in the tokenizer's configuration.
INTERNVL = {
    "model_type": "internvl", "image_token_id": 151667, "downsample_ratio": 0.5,
    "vision_config": {"image_size": [448, 448], "patch_size": [14, 14]},
}  # fmt: skip
INTERNVL_IMAGE = {
    "size": {"height": 448, "width": 448}, "crop_to_patches": False, "min_patches": 1, "max_patches": 12,
    "do_convert_rgb": True, "do_center_crop": None, "resample": 3, "rescale_factor": 0.00392156862745098,
    "image_mean": list(IMAGENET[0]), "image_std": list(IMAGENET[1]), "image_processor_type": "GotOcr2ImageProcessor",
}  # fmt: skip
INTERNVL_TOKENS = {
    "added_tokens_decoder": {
        str(number): {"content": text}
        for number, text in ((151665, "<img>"), (151666, "</img>"), (151667, "<IMG_CONTEXT>"), (151674, "<video>"))
    }
}


def test_the_files_of_internvl_are_understood(tmp_path: Path) -> None:
    write(tmp_path, config=INTERNVL, preprocessor_config=INTERNVL_IMAGE, tokenizer_config=INTERNVL_TOKENS)
    assert load_settings(tmp_path) == TILED
    image = {**INTERNVL_IMAGE, "max_patches": 6, "image_mean": None, "image_std": None}
    write(tmp_path, config=INTERNVL, preprocessor_config=image, video_preprocessor_config={"num_frames": 16})
    pixels = PixelSettings(448**2, 448**2, *CLIP)
    assert load_settings(tmp_path) == replace(TILED, tiles=(1, 6), num_frames=16, image=pixels, video=pixels)


def test_frames_of_internvl_are_as_its_pictures_whatever_a_file_of_their_own_says(tmp_path: Path) -> None:
    """As published with InternVL3.5: the defaults of transformers' class, on which its model fails."""
    video = {"size": {"height": 384, "width": 384}, "image_mean": list(CLIP[0]), "image_std": list(CLIP[1])}
    files = {"video_preprocessor_config": video | {"do_sample_frames": False, "initial_shift": True}}
    write(tmp_path, config=INTERNVL, preprocessor_config=INTERNVL_IMAGE, tokenizer_config=INTERNVL_TOKENS, **files)
    assert load_settings(tmp_path) == TILED


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"size": {"height": 384, "width": 384}}, "size is .*384.*, but only .*448"),
        ({"do_center_crop": True}, "do_center_crop is True, but only False"),
        ({"max_patches": "x"}, "can't be understood"),
    ],
)
def test_what_a_processor_of_internvl_may_not_do_is_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    image = INTERNVL_IMAGE | changed
    write(tmp_path, config=INTERNVL, preprocessor_config=image, tokenizer_config=INTERNVL_TOKENS)
    with pytest.raises(CheckpointError, match=message):
        load_settings(tmp_path)


GLM4V = {
    "model_type": "glm4v", "image_token_id": 151343, "video_token_id": 151344, "image_start_token_id": 151339,
    "image_end_token_id": 151340, "video_start_token_id": 151341, "video_end_token_id": 151342,
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
}  # fmt: skip
GLM4V_IMAGE = {
    "size": {"shortest_edge": 12544, "longest_edge": 9633792}, "do_rescale": True, "patch_size": 14, "merge_size": 2,
    "temporal_patch_size": 2, "image_mean": list(CLIP[0]), "image_std": list(CLIP[1]),
    "image_processor_type": "Glm4vImageProcessor", "processor_class": "Glm4vProcessor",
}  # fmt: skip
GLM4V_VIDEO = {
    **GLM4V_IMAGE, "size": {"shortest_edge": 12544, "longest_edge": 47040000}, "num_frames": 16, "fps": 2,
    "max_image_size": {"longest_edge": 47040000}, "video_processor_type": "Glm4vVideoProcessor",
}  # fmt: skip


def test_the_files_of_glm_4v_are_understood(tmp_path: Path) -> None:
    write(tmp_path, config=GLM4V, preprocessor_config=GLM4V_IMAGE, video_preprocessor_config=GLM4V_VIDEO)
    assert load_settings(tmp_path) == STEPPED
    video = {**GLM4V_VIDEO, "fps": 1, "max_duration": 60}
    write(tmp_path, config=GLM4V, preprocessor_config=GLM4V_IMAGE, video_preprocessor_config=video)
    assert load_settings(tmp_path) == replace(STEPPED, video_fps=1.0, max_duration_s=60.0)


def test_a_folder_of_glm_45v_without_a_processor_has_transformers_settings(tmp_path: Path) -> None:
    bare = {"model_type": "glm4v_moe", "vision_config": {"patch_size": 14}}
    image = replace(STEPPED.image, max_pixels=28 * 28 * 15_000)
    expected = replace(STEPPED, image=image, image_token_id=151_363, video_token_id=151_364, frame_token_id=151_363)
    assert load_settings(write(tmp_path, config=bare)) == expected


def test_a_folder_of_glm_ocr_has_tokens_of_its_own(tmp_path: Path) -> None:
    bare = {"model_type": "glm_ocr", "vision_config": {"patch_size": 14}}
    found = load_settings(write(tmp_path, config=bare, preprocessor_config=GLM4V_IMAGE))
    assert found is not None and found.frame_token_id == 59_280
    told = (found.image_token_id, found.video_token_id, found.vision_start_token_id, found.vision_end_token_id)
    assert told == (59_280, 59_281, 59_256, 59_257) and found.image == STEPPED.image


@pytest.mark.parametrize("file", ["preprocessor_config", "processor_config", "tokenizer_config"])
def test_the_class_of_glm_46vs_processor_says_how_times_are_told_and_frames_found(file: str, tmp_path: Path) -> None:
    """Each by its own class, as transformers finds them."""
    image = {key: value for key, value in GLM4V_IMAGE.items() if not key.endswith(("_type", "_class"))}
    files = {"preprocessor_config": image, "processor_config": {}, "tokenizer_config": {}}
    files[file] = {**files[file], "processor_class": "Glm46VProcessor"}
    write(tmp_path, config=GLM4V, **files)
    expected = replace(STEPPED, times="seconds after", sampling="by length")
    assert load_settings(tmp_path) == expected
    older = {"video_processor_type": "Glm4vVideoProcessor"}
    assert load_settings(write(tmp_path, config=GLM4V, video_preprocessor_config=older, **files)) == replace(
        expected, sampling="steps"
    )


def test_a_folder_of_the_class_glm_46v_has_its_processor_where_none_is_told(tmp_path: Path) -> None:
    image = {key: value for key, value in GLM4V_IMAGE.items() if not key.endswith(("_type", "_class"))}
    write(tmp_path, config={**GLM4V, "model_type": "glm46v"}, preprocessor_config=image)
    assert load_settings(tmp_path) == replace(STEPPED, times="seconds after", sampling="by length")


def test_a_processor_of_another_glm_is_refused(tmp_path: Path) -> None:
    video = {**GLM4V_VIDEO, "video_processor_type": "GlmgaVideoProcessor"}
    write(tmp_path, config=GLM4V, preprocessor_config=GLM4V_IMAGE, video_preprocessor_config=video)
    with pytest.raises(CheckpointError, match="names the processor GlmgaVideoProcessor, but"):
        load_settings(tmp_path)


MISTRAL3 = {
    "model_type": "mistral3", "image_token_index": 10, "spatial_merge_size": 2,
    "vision_config": {"model_type": "pixtral", "patch_size": 14, "image_size": 1540},
}  # fmt: skip
PIXTRAL_IMAGE = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "resample": 3,
    "image_mean": list(CLIP[0]), "image_std": list(CLIP[1]), "image_processor_type": "PixtralImageProcessor",
    "patch_size": {"height": 14, "width": 14}, "rescale_factor": 1 / 255, "size": {"longest_edge": 1540},
}  # fmt: skip
PIXTRAL = {
    "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]", "image_token": "[IMG]", "patch_size": 14,
    "processor_class": "PixtralProcessor", "spatial_merge_size": 2,
}  # fmt: skip
NAMES = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
LISTED = {"added_tokens": [{"id": 10 + 2 * (i > 0) + (i > 1), "content": name} for i, name in enumerate(NAMES)]}
BY_ID = {"added_tokens_decoder": {str(each["id"]): {"content": each["content"]} for each in LISTED["added_tokens"]}}


@pytest.mark.parametrize("tokens", [{"tokenizer": LISTED}, {"tokenizer_config": BY_ID}], ids=["listed", "by id"])
@pytest.mark.parametrize(
    "processor",
    [
        {"preprocessor_config": PIXTRAL_IMAGE, "processor_config": PIXTRAL},
        {"processor_config": {**PIXTRAL, "image_processor": {**PIXTRAL_IMAGE, "patch_size": 14}}},
        {},
    ],
    ids=["two files", "one file", "none"],
)
def test_the_files_of_mistral_3_are_understood(
    processor: dict[str, Any], tokens: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, config=MISTRAL3, **processor, **tokens)
    assert load_settings(tmp_path) == IN_LINES


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"processor_config": {**PIXTRAL, "spatial_merge_size": 1}}, "spatial_merge_size is 1, but only 2"),
        ({"preprocessor_config": {**PIXTRAL_IMAGE, "patch_size": {"height": 14, "width": 16}}}, "patch_size is"),
        ({"preprocessor_config": {**PIXTRAL_IMAGE, "do_resize": False}}, "do_resize is False"),
        ({"processor_config": {**PIXTRAL, "image_end_token": "[LAST]"}}, "can't be understood.*LAST"),
    ],
)
def test_another_processor_of_mistral_3_is_refused(files: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_settings(write(tmp_path, config=MISTRAL3, tokenizer=LISTED, **files))


def test_the_files_of_pixtral_12b_are_understood(tmp_path: Path) -> None:
    """Those of transformers' form; without a processor's, too."""
    vision = {"model_type": "pixtral", "patch_size": 16, "image_size": 1024}
    config = {"model_type": "llava", "image_token_index": 10, "vision_config": vision}
    image = {**PIXTRAL_IMAGE, "patch_size": {"height": 16, "width": 16}, "size": {"longest_edge": 1024}}
    names = {key: value for key, value in PIXTRAL.items() if key != "spatial_merge_size"}
    write(tmp_path, config=config, tokenizer=LISTED)
    assert load_settings(tmp_path) == UNMERGED
    write(tmp_path, config=config, preprocessor_config=image, processor_config={**names, "patch_size": 16})
    assert load_settings(tmp_path) == UNMERGED


def test_the_files_of_light_on_ocr_are_understood(tmp_path: Path) -> None:
    """No token ends lines, and sides are multiples of a token's."""
    vision = {"model_type": "pixtral", "patch_size": 14, "image_size": 1540}
    config = {"model_type": "lighton_ocr", "image_token_id": 10, "spatial_merge_size": 2, "vision_config": vision}
    processor = {"patch_size": 14, "spatial_merge_size": 2, "processor_class": "LightOnOcrProcessor"}
    image = {**PIXTRAL_IMAGE, "patch_size": {"height": 28, "width": 28}}
    write(tmp_path, config=config, processor_config=processor, preprocessor_config=image)
    assert load_settings(tmp_path) == replace(IN_LINES, line_ends=None)
    with pytest.raises(CheckpointError, match="patch_size is 14, but only 28"):
        load_settings(write(tmp_path, config=config, preprocessor_config=PIXTRAL_IMAGE))


def test_the_files_of_paddleocr_vl_are_understood(tmp_path: Path) -> None:
    """Frames of a patch are those of its processor, whatever the tower's object says."""
    vision = {"model_type": "paddleocr_vl", "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = {"model_type": "paddleocr_vl", "image_token_id": 100295, "vision_config": vision}
    assert load_settings(write(tmp_path, config=config)) == LIFTED
    image = {
        "min_pixels": 147384, "max_pixels": 2822400, "patch_size": 14, "temporal_patch_size": 1, "merge_size": 2,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_processor_type": "PaddleOCRVLImageProcessor",
    }  # fmt: skip
    pixels = PixelSettings(147384, 2822400, (0.5,) * 3, (0.5,) * 3)
    write(tmp_path, config=config, preprocessor_config=image)
    assert load_settings(tmp_path) == replace(LIFTED, image=pixels, video=pixels)
    with pytest.raises(CheckpointError, match="temporal_patch_size is 2, but only 1"):
        load_settings(write(tmp_path, config=config, preprocessor_config={**image, "temporal_patch_size": 2}))


def test_a_folder_of_exaone_45_takes_pictures_alone(tmp_path: Path) -> None:
    """Its placeholder stands alone, and pixels are Qwen2-VL's."""
    config = {**older("exaone4_5"), "image_token_id": 67}
    config = {key: value for key, value in config.items() if not key.startswith("vision_") or key == "vision_config"}
    found = load_settings(write(tmp_path, config=config, preprocessor_config=OLDER_IMAGE))
    assert found is not None and found.image == OLDER.image and not found.takes_pixels
    assert (found.patch_size, found.temporal_patch_size, found.merge_size, found.fixed_side) == (14, 2, 2, None)
    told = (found.image_token_id, found.video_token_id, found.vision_start_token_id, found.vision_end_token_id)
    assert told == (67, -1, -1, -1)


SMOLVLM = {
    "model_type": "idefics3", "image_token_id": 49153, "scale_factor": 3,
    "vision_config": {"model_type": "idefics3", "image_size": 384, "patch_size": 14},
}  # fmt: skip
SMOLVLM_IMAGE = {
    "do_convert_rgb": True, "do_image_splitting": True, "do_normalize": True, "do_pad": True, "do_rescale": True,
    "do_resize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "max_image_size": {"longest_edge": 384},
    "image_processor_type": "Idefics3ImageProcessor", "resample": 1, "size": {"longest_edge": 1536},
}  # fmt: skip


def test_the_files_of_smolvlm_are_understood(tmp_path: Path) -> None:
    tokens = {"image_seq_len": 81, "processor_class": "Idefics3Processor"}
    write(tmp_path, config=SMOLVLM, preprocessor_config=SMOLVLM_IMAGE, processor_config=tokens)
    assert load_settings(tmp_path) == TOLD_TILES
    write(tmp_path, config={**SMOLVLM, "model_type": "smolvlm"})
    assert load_settings(tmp_path) == TOLD_TILES


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ({"do_image_splitting": False}, "do_image_splitting is False, but only True"),
        ({"resample": 3}, "resample is 3, but only 1"),
        ({"max_image_size": {"longest_edge": 364}}, "max_image_size is 364 and size 1536, but supported are 384"),
        ({"size": {"longest_edge": 5000}}, "and size 5000, but supported are .* up to 4096"),
        ({"size": {"height": 384, "width": 384}}, "can't be understood"),
    ],
)
def test_another_processor_of_smolvlm_is_refused(image: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_settings(write(tmp_path, config=SMOLVLM, preprocessor_config=SMOLVLM_IMAGE | image))


def test_the_files_of_aya_vision_are_understood(tmp_path: Path) -> None:
    """Tiles are InternVL's, and clients write another word than the placeholder's."""
    vision = {"model_type": "siglip_vision_model", "image_size": 364, "patch_size": 14}
    config = {"model_type": "aya_vision", "image_token_index": 255036, "downsample_factor": 2, "vision_config": vision}
    image = {
        "size": {"height": 364, "width": 364}, "crop_to_patches": True, "min_patches": 1, "max_patches": 12,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_processor_type": "GotOcr2ImageProcessor",
    }  # fmt: skip
    tokens = {"img_size": 364, "patch_size": 14, "downsample_factor": 2, "processor_class": "AyaVisionProcessor"}
    write(tmp_path, config=config, preprocessor_config=image, processor_config=tokens)
    found = load_settings(tmp_path)
    assert found is not None and found.tile_words is not None and found.tile_words.placeholder == "<image>"
    assert (found.fixed_side, found.tiles, found.merge_size, found.tiles_longest) == (364, (1, 12), 2, None)
    assert (found.image_token_id, found.image.mean, found.resample) == (255036, (0.5,) * 3, 3)
    with pytest.raises(CheckpointError, match="downsample_factor is 1, but only 2"):
        load_settings(write(tmp_path, config=config, processor_config={**tokens, "downsample_factor": 1}))


def test_the_files_of_command_a_vision_are_understood(tmp_path: Path) -> None:
    config = {"model_type": "cohere2_vision", "vision_config": {"image_size": 512, "patch_size": 16}}
    image = {"size": {"height": 512, "width": 512}, "crop_to_patches": True, "max_patches": 9, "patch_size": 16}
    told = {"img_line_break_token": {"content": "<|break|>"}, "image_token": "<|IMG_PATCH|>"}
    found = load_settings(write(tmp_path, config=config, preprocessor_config=image, tokenizer_config=told))
    words = TileWords("", "", "", "", "<|END_OF_IMG|>", "<|START_OF_IMG|>", "<|IMG_PATCH|>", "<|break|>")
    assert found is not None and found.tile_words == words
    assert (found.fixed_side, found.tiles, found.tiles_fit, found.image_token_id) == (512, (1, 9), True, 255_036)
    with pytest.raises(CheckpointError, match="patch_size is 14, but only 16"):
        load_settings(write(tmp_path, config=config, preprocessor_config=image | {"patch_size": 14}))


def test_the_files_of_lfm2_vl_are_understood(tmp_path: Path) -> None:
    config = {"model_type": "lfm2_vl", "downsample_factor": 2, "vision_config": {"patch_size": 16}}
    image = {
        "downsample_factor": 2, "encoder_patch_size": 16, "max_image_tokens": 128, "max_tiles": 6, "resample": 2,
        "max_pixels_tolerance": 2.0, "tile_size": 512, "use_thumbnail": True, "image_mean": [0.5] * 3,
    }  # fmt: skip
    found = load_settings(write(tmp_path, config=config, preprocessor_config=image))
    assert found is not None and (found.tile_side, found.tiles, found.resample) == (512, (2, 6), 2)
    assert found.image == PixelSettings(64 * 1024, 128 * 1024, (0.5,) * 3, (0.5,) * 3)
    assert found.tile_words is not None and found.tile_words.start == "<|image_start|>"
    with pytest.raises(CheckpointError, match="use_thumbnail is False, but only True"):
        load_settings(write(tmp_path, config=config, preprocessor_config=image | {"use_thumbnail": False}))


LLAVA = {
    "model_type": "llava", "image_token_index": 32000,
    "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
}  # fmt: skip
LLAVA_IMAGE = {
    "crop_size": {"height": 336, "width": 336}, "do_center_crop": True, "do_convert_rgb": True, "do_normalize": True,
    "do_rescale": True, "do_resize": True, "image_mean": list(CLIP[0]), "image_std": list(CLIP[1]), "resample": 3,
    "image_processor_type": "CLIPImageProcessor", "rescale_factor": 1 / 255, "size": {"shortest_edge": 336},
}  # fmt: skip
LLAVA_TOKENS = {
    "image_token": "<image>", "num_additional_image_tokens": 1, "patch_size": 14, "processor_class": "LlavaProcessor",
    "vision_feature_select_strategy": "default",
}  # fmt: skip


@pytest.mark.parametrize(
    "image", [LLAVA_IMAGE, {**LLAVA_IMAGE, "size": 336, "crop_size": 336}, {}], ids=["published", "older", "none"]
)
def test_the_files_of_llava_are_understood(image: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, config=LLAVA, preprocessor_config=image, processor_config=LLAVA_TOKENS)
    assert load_settings(tmp_path) == CROPPED


@pytest.mark.parametrize(
    ("image", "tokens", "message"),
    [
        ({"do_pad": True}, {}, "do_pad is True, but only False"),
        ({"size": {"height": 336, "width": 336}}, {}, "size is"),
        ({"crop_size": 224}, {}, "crop_size is"),
        ({"do_center_crop": False}, {}, "do_center_crop is False"),
        ({}, {"vision_feature_select_strategy": "full"}, "select_strategy is full, but only default"),
        ({}, {"num_additional_image_tokens": 0}, "num_additional_image_tokens is 0, but only 1"),
    ],
)
def test_another_processor_of_llava_is_refused(
    image: dict[str, Any], tokens: dict[str, Any], message: str, tmp_path: Path
) -> None:
    files = {"preprocessor_config": LLAVA_IMAGE | image, "processor_config": LLAVA_TOKENS | tokens}
    with pytest.raises(CheckpointError, match=message):
        load_settings(write(tmp_path, config=LLAVA, **files))


GEMMA3 = {
    "model_type": "gemma3", "image_token_index": 262144, "boi_token_index": 255999, "eoi_token_index": 256000,
    "mm_tokens_per_image": 256, "vision_config": {"image_size": 896, "patch_size": 14},
}  # fmt: skip
GEMMA3_IMAGE = {
    "do_convert_rgb": None, "do_normalize": True, "do_pan_and_scan": None, "do_rescale": True, "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "image_seq_length": 256, "resample": 2,
    "image_processor_type": "Gemma3ImageProcessor", "rescale_factor": 1 / 255, "size": {"height": 896, "width": 896},
}  # fmt: skip


@pytest.mark.parametrize("files", [{"preprocessor_config": GEMMA3_IMAGE}, {}], ids=["published", "none"])
def test_the_files_of_gemma_3_are_understood(files: dict[str, Any], tmp_path: Path) -> None:
    assert load_settings(write(tmp_path, config=GEMMA3, **files)) == SQUARE


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"do_pan_and_scan": True}, "do_pan_and_scan is True"),
        ({"resample": 3}, "resample is 3, but only 2"),
        ({"size": {"height": 448, "width": 896}}, "size is"),
    ],
)
def test_another_processor_of_gemma_3_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_settings(write(tmp_path, config=GEMMA3, preprocessor_config={**GEMMA3_IMAGE, **changed}))


GEMMA4 = {
    "model_type": "gemma4", "image_token_id": 258880, "video_token_id": 258884, "boi_token_id": 255999,
    "eoi_token_id": 258882, "vision_config": {"patch_size": 16, "pooling_kernel_size": 3},
}  # fmt: skip
GEMMA4_IMAGE = {
    "do_convert_rgb": True, "do_normalize": False, "do_rescale": True, "do_resize": True, "image_mean": [0.0] * 3,
    "image_std": [1.0] * 3, "image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 280, "patch_size": 16,
    "pooling_kernel_size": 3, "resample": 3, "rescale_factor": 1 / 255,
}  # fmt: skip
GEMMA4_VIDEO = {
    **GEMMA4_IMAGE, "do_normalize": True, "do_sample_frames": True, "max_soft_tokens": 70, "num_frames": 32,
    "video_processor_type": "Gemma4VideoProcessor",
}  # fmt: skip


@pytest.mark.parametrize(
    "files",
    [
        {"processor_config": {"image_processor": GEMMA4_IMAGE, "video_processor": GEMMA4_VIDEO}},
        {"processor_config": {"image_processor": GEMMA4_VIDEO | {"max_soft_tokens": 280}}},
        {"video_preprocessor_config": GEMMA4_IMAGE | {"max_soft_tokens": 70}},
        {},
    ],
    ids=["published", "normalized", "not normalized", "none"],
)
def test_the_files_of_gemma_4_are_understood(files: dict[str, Any], tmp_path: Path) -> None:
    assert load_settings(write(tmp_path, config=GEMMA4, **files)) == FILLED


NEXT = {"model_type": "llava_next", "image_token_index": 32000, "vision_config": {"image_size": 336, "patch_size": 14}}
NEXT_IMAGE = {
    "crop_size": {"height": 336, "width": 336}, "do_center_crop": True, "do_pad": True, "resample": 3,
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "image_mean": CLIP[0], "image_std": CLIP[1], "size": {"shortest_edge": 336},
}  # fmt: skip
ONEVISION = {"model_type": "llava_onevision", "vision_config": {"image_size": 384, "patch_size": 14}}


def test_the_files_of_joined_tiles_are_understood(tmp_path: Path) -> None:
    told = {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    for image in (NEXT_IMAGE, {}):
        assert load_settings(write(tmp_path, config=NEXT, preprocessor_config=image, processor_config=told)) == JOINED
    image = {"size": {"height": 384, "width": 384}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    write(tmp_path, config=ONEVISION, preprocessor_config=image, processor_config={"num_image_tokens": 729})
    assert load_settings(tmp_path) == SHRUNK


@pytest.mark.parametrize(
    ("config", "image", "message"),
    [
        (NEXT, {"image_grid_pinpoints": [[336, 336]]}, "the same in config.json and preprocessor_config.json"),
        (NEXT, {"crop_size": {"height": 224, "width": 224}}, "crop_size is"),
        ({**NEXT, "image_grid_pinpoints": [[336, 337]]}, {"image_grid_pinpoints": [[336, 337]]}, "multiples of 336"),
        ({**ONEVISION, "vision_aspect_ratio": "pad"}, {}, "can't be understood"),
    ],
)
def test_other_processors_of_joined_tiles_are_refused(
    config: dict[str, Any], image: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_settings(write(tmp_path, config=config, preprocessor_config=image))


def test_tokens_of_gemma_4_without_layers_are_its_patches(tmp_path: Path) -> None:
    files = {"processor_config": {"image_processor": GEMMA4_IMAGE, "video_processor": GEMMA4_VIDEO}}
    found = load_settings(write(tmp_path, config=GEMMA4 | {"model_type": "gemma4_unified"}, **files))
    assert found == replace(FILLED, patch_size=48, merge_size=1)


@pytest.mark.parametrize(
    ("image", "video", "message"),
    [
        ({"do_normalize": True, "image_std": [0.5] * 3}, {}, "image_std is"),
        ({"pooling_kernel_size": 2}, {}, "pooling_kernel_size is 2, but only 3"),
        ({"max_soft_tokens": "many"}, {}, "can't be understood"),
        ({}, {"image_mean": [0.5] * 3}, "image_mean is"),
    ],
)
def test_another_processor_of_gemma_4_is_refused(
    image: dict[str, Any], video: dict[str, Any], message: str, tmp_path: Path
) -> None:
    both = {"image_processor": GEMMA4_IMAGE | image, "video_processor": GEMMA4_VIDEO | video}
    with pytest.raises(CheckpointError, match=message):
        load_settings(write(tmp_path, config=GEMMA4, processor_config=both))
