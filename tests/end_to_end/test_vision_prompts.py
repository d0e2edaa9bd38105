"""Files of pictures and frames of videos in prompts, all the way to the tokens of transformers.

The processors' part is transformers' own, as far as it needs no torchvision: what cuts pictures, and what cuts frames.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split, WhitespaceSplit
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

import jaxsgl
from jaxsgl.config.features import VisionConfig
from tests.grids import daily
from tests.preprocess.pictures import file_of, picture
from tests.vision_models import (
    BREAK,
    END,
    IMAGE,
    LAST,
    MERGES,
    OF_CLIP,
    OF_GLM,
    OF_IDEFICS,
    RESOLUTIONS,
    START,
    VIDEO,
    VIDEO_END,
    VIDEO_START,
    WITH_LINES,
    make_model,
    types_of,
)

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("greedy_steps_by_day")]
FPS = 2.0  # of the frames, as nothing else is said: a temporal patch is 3 positions later than the one before
LIMITS: dict[str, Any] = {
    "patch_size": 4,
    "merge_size": 2,
    "image_mean": OPENAI_CLIP_MEAN,
    "image_std": OPENAI_CLIP_STD,
}
EMPTY = 247  # an empty line
PIXELS = {"min_pixels": 64, "max_pixels": 2048}


SIZES: dict[str, Any] = {
    "page_size": 4, "max_total_tokens": 512, "context_length": 256, "max_running_requests": 1, "decode_buckets": (1,),
    "extend_buckets": (64,), "chunked_prefill_size": 64, "dtype": "float32",
    "vision": VisionConfig(mm_pool_tokens=256, mm_max_patches=256),
}  # fmt: skip
GREEDY = jaxsgl.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def greedy(model: Any, prompt: list[int], media: dict[str, Any], has_types: bool) -> list[int]:
    """transformers' answer of 6 tokens; without videos in `media`, frames are pictures."""
    answer: list[int] = []
    most = 2 if any("video" in name for name in media) else 1
    for _ in range(6):
        tokens = torch.tensor([[*prompt, *answer]])
        name = "token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids"
        types = {name: types_of(tokens).clip(max=most)} if has_types else {}
        model.model.rope_deltas = None
        with torch.no_grad():
            logits = model(input_ids=tokens, use_cache=False, **types, **media).logits
        answer.append(int(logits[0, -1].argmax()))
    return answer


def expected(model: Any, ids: list[int], image: Any, frames: list[Any]) -> list[int]:
    """The answer of Qwen2.5-VL."""
    size = {"shortest_edge": PIXELS["min_pixels"], "longest_edge": PIXELS["max_pixels"]}
    of_image = Qwen2VLImageProcessorPil(size=size, temporal_patch_size=2, **LIMITS)(images=[image], return_tensors="pt")
    stacked = torch.tensor(np.stack([np.asarray(frame).transpose(2, 0, 1) for frame in frames]))[None].float()
    mean, std = (torch.tensor(each).reshape(1, 1, 3, 1, 1) for each in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
    patches, *grid = Qwen3VLVideoProcessor.patchify(None, (stacked / 255 - mean) / std, 4, 2, 2)
    media = {
        "pixel_values": of_image["pixel_values"], "image_grid_thw": of_image["image_grid_thw"],
        "pixel_values_videos": patches.reshape(-1, patches.shape[-1]), "video_grid_thw": torch.tensor([grid]),
        "second_per_grid_ts": torch.tensor([2 / FPS]),
    }  # fmt: skip
    counts = {IMAGE: int(of_image["image_grid_thw"].prod()) // 4, VIDEO: int(np.prod(grid)) // 4}
    prompt = [token for token in ids for _ in range(counts.get(token, 1))]
    return greedy(model, prompt, media, has_types=True)


def test_a_picture_and_a_video_give_transformers_tokens(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen2_5_vl")
    for name in ("preprocessor_config", "video_preprocessor_config"):
        (tmp_path / f"{name}.json").write_text(json.dumps(LIMITS | PIXELS))
    image, frames = picture(61, 42), [picture(48, 24, seed=i) for i in range(4)]
    ids = [11, START, IMAGE, END, 23, 35, START, VIDEO, END, 47, 59]
    llm = jaxsgl.LLM(str(tmp_path), **SIZES)
    data = {"image": file_of(image), "video": [[file_of(frame) for frame in frames]]}
    (answer,) = llm.generate({"prompt_token_ids": ids, "multi_modal_data": data}, GREEDY, use_tqdm=False)
    llm.close()
    assert list(answer.token_ids) == expected(model, ids, image, frames)


OF_GLM_IN_WORDS = {
    IMAGE: "<|image|>", VIDEO: "<|video|>", START: "<|begin_of_image|>", END: "<|end_of_image|>",
    VIDEO_START: "<|begin_of_video|>", VIDEO_END: "<|end_of_video|>",
}  # fmt: skip


@pytest.mark.parametrize("kind", daily(OF_GLM, every=2))
def test_a_picture_and_a_video_of_glm_4v_give_transformers_tokens(kind: str, tmp_path: Path) -> None:
    """In a text and among ids: each pair of frames is a picture, which the time of the first one follows."""
    model = make_model(tmp_path, kind)
    write_words(tmp_path, OF_GLM_IN_WORDS)
    size, of_frames = ({"shortest_edge": 64, "longest_edge": most} for most in (4096, 4000))
    for name, each in (("preprocessor_config", size), ("video_preprocessor_config", of_frames)):
        told = {**LIMITS, "size": each, "processor_class": "Glm4vProcessor"}
        (tmp_path / f"{name}.json").write_text(json.dumps(told))
    image, frames = picture(61, 42), [picture(48, 24, seed=i) for i in range(4)]
    cut = Glm4vImageProcessorPil(size=size, temporal_patch_size=2, **LIMITS)(images=[image], return_tensors="pt")
    scaled = [frame.resize((40, 16), Image.Resampling.BICUBIC) for frame in frames]  # 4 x 48 x 24 are more than 4,000
    stacked = torch.tensor(np.stack([np.asarray(frame).transpose(2, 0, 1) for frame in scaled]))[None].float()
    mean, std = (torch.tensor(each).reshape(1, 1, 3, 1, 1) for each in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
    patches, *grid = Glm4vVideoProcessor.patchify(None, (stacked / 255 - mean) / std, 4, 2, 2)
    patches = patches.reshape(-1, patches.shape[-1])
    num_image, num_frame = int(cut["image_grid_thw"].prod()) // 4, grid[1] * grid[2] // 4
    pairs = [token for time_s in (0, 1) for token in (START, *[IMAGE] * num_frame, END, time_s)]
    video = [23, VIDEO_START, *pairs, VIDEO_END, 35]
    prompt = [11, START, *[IMAGE] * num_image, END, *video]
    of_video = {"pixel_values_videos": patches, "video_grid_thw": torch.tensor([grid])}
    # transformers takes pictures or videos, not both, but frames are pictures.
    as_pictures = {
        "pixel_values": torch.cat([cut["pixel_values"], patches]),
        "image_grid_thw": torch.tensor([cut["image_grid_thw"][0].tolist(), *[[1, *grid[1:]]] * 2]),
    }
    llm = jaxsgl.LLM(str(tmp_path), **SIZES)
    files = {"image": [file_of(image)], "video": [[file_of(frame) for frame in frames]]}
    image_text, video_text = (f"<|begin_of_{kind}|><|{kind}|><|end_of_{kind}|>" for kind in ("image", "video"))
    ids = [11, START, IMAGE, END, 23, VIDEO_START, VIDEO, VIDEO_END, 35]
    cases: list[tuple[dict[str, Any], list[int], dict[str, Any]]] = [
        ({"prompt": f"23 {video_text} 35"}, video, of_video),
        ({"prompt": f"11 {image_text} 23 {video_text} 35"}, prompt, as_pictures),
        ({"prompt_token_ids": ids}, prompt, as_pictures),
    ]
    for form, seen, media in cases:
        data = files if "pixel_values" in media else {"video": files["video"]}
        (answer,) = llm.generate({**form, "multi_modal_data": data}, GREEDY, use_tqdm=False)
        assert answer.prompt_tokens == len(seen)
        assert list(answer.token_ids) == greedy(model, seen, media, has_types=True)
    llm.close()


def write_words(folder: Path, names: dict[int, str]) -> None:
    """A tokenizer of words "0" to "255", of which some are the tokens `names`."""
    words = Tokenizer(WordLevel({names.get(i, str(i)): i for i in range(256)}, unk_token="0"))
    words.pre_tokenizer = Split("\n\n", "isolated") if EMPTY in names else WhitespaceSplit()
    words.add_special_tokens([*names.values()])
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


@pytest.mark.parametrize("kind", daily(["internvl_qwen3", "internvl", "internvl_llama", "internvl_moe"], every=4))
def test_pictures_and_a_video_of_internvl_give_transformers_tokens(kind: str, tmp_path: Path) -> None:
    """In a text and among ids; what stands for pictures and videos is written by transformers' own processor."""
    model = make_model(tmp_path, kind)
    write_words(
        tmp_path,
        {IMAGE: "<IMG_CONTEXT>", VIDEO: "<video>", START: "<img>", END: "</img>", 90: "Frame1:", 91: "Frame2:"},
    )
    told = {"size": {"height": 32, "width": 32}, "max_patches": 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**told, "crop_to_patches": False}))
    given = [picture(100, 42), picture(17, 24, seed=1), picture(40, 40, seed=2)]
    frames = [picture(48, 24, seed=i) for i in range(2)]
    cut = GotOcr2ImageProcessorPil(**told, crop_to_patches=True)(images=given, return_tensors="pt")
    of_frames = GotOcr2ImageProcessorPil(**told)(images=frames, return_tensors="pt")["pixel_values"]
    first, *others = torch.split(cut["pixel_values"], cut["num_patches"].tolist())
    media = {"pixel_values": torch.cat([first, of_frames, *others])}
    words = SimpleNamespace(
        start_image_token="<img>", end_image_token="</img>", image_token="<IMG_CONTEXT>", image_seq_length=16
    )
    pictures = [InternVLProcessor.replace_image_token(words, cut, number) for number in range(3)]
    video = InternVLProcessor.replace_video_token(words, {"pixel_values_videos": [of_frames]}, 0)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    prompt = tokenizer.encode(f"11 {pictures[0]} 23 {video} 35 {pictures[1]} 47 {pictures[2]}").ids
    assert cut["num_patches"].tolist() == [3, 3, 1] and prompt.count(IMAGE) == 16 * 9 and 91 in prompt
    llm = jaxsgl.LLM(str(tmp_path), **SIZES)
    data = {"image": [file_of(each) for each in given], "video": [[file_of(frame) for frame in frames]]}
    for form in (
        {"prompt": "11 <IMG_CONTEXT> 23 <video> 35 <IMG_CONTEXT> 47 <IMG_CONTEXT>"},
        {"prompt_token_ids": [11, IMAGE, 23, VIDEO, 35, IMAGE, 47, START, IMAGE, END]},
    ):
        (answer,) = llm.generate({**form, "multi_modal_data": data}, GREEDY, use_tqdm=False)
        assert answer.prompt_tokens == len(prompt)
        assert list(answer.token_ids) == greedy(model, prompt, media, has_types=False)
    llm.close()


@pytest.mark.parametrize("kind", daily(["mistral", "pixtral", "lighton_ocr"], every=2))
def test_pictures_of_mistral_3_give_transformers_tokens(kind: str, tmp_path: Path) -> None:
    """Words around a picture's lines are those of its folder; `image_size` is all that it says of pictures."""
    model, unit = make_model(tmp_path, kind), 4 * MERGES.get(kind, 2)
    write_words(tmp_path, {IMAGE: "[IMG]", BREAK: "[IMG_BREAK]", LAST: "[IMG_END]"})
    given = [picture(100, 42), picture(17, 24, seed=1)]
    size = {"longest_edge": 64}
    processor = PixtralImageProcessorPil(size=size, patch_size=unit)
    cut = processor(images=given, return_tensors="pt")
    prompt = [11]
    for height, width in cut["image_sizes"].tolist():
        lines = [*[IMAGE] * (width // unit), *[BREAK] * (kind in WITH_LINES)] * (height // unit)
        prompt += [*lines[:-1], LAST if kind in WITH_LINES else IMAGE, 23]
    llm = jaxsgl.LLM(str(tmp_path), **SIZES)
    asked = {"prompt": "11 [IMG] 23 [IMG] 23", "multi_modal_data": {"image": [file_of(each) for each in given]}}
    (answer,) = llm.generate(asked, GREEDY, use_tqdm=False)
    with pytest.raises(jaxsgl.errors.InvalidRequest, match="pictures alone"):
        llm.generate({"prompt": "11", "multi_modal_data": {"video": [[given[0]]]}}, GREEDY, use_tqdm=False)
    llm.close()
    assert answer.prompt_tokens == len(prompt)
    assert list(answer.token_ids) == greedy(model, prompt, dict(cut), has_types=False)


@pytest.mark.parametrize("kind", daily(OF_IDEFICS, every=2))
def test_pictures_of_idefics_3_give_transformers_tokens(kind: str, tmp_path: Path) -> None:
    """In a text and among ids; the words around tiles are those that transformers' own processor writes."""
    model = make_model(tmp_path, kind)
    fake, places = "<fake_token_around_image>", [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    names = {IMAGE: "<image>", START: fake, END: "<global-img>", EMPTY: "\n\n", 90: "\n"}
    write_words(tmp_path, names | {91 + i: place for i, place in enumerate(places)})
    told = {"size": {"longest_edge": 68}, "max_image_size": {"longest_edge": 34}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(told))
    given = [picture(60, 61), picture(50, 20, seed=1)]
    cut = Idefics3ImageProcessorPil(**told)(images=[given], return_tensors="pt", return_row_col_info=True)
    words = SimpleNamespace(
        fake_image_token=fake, global_image_tag="<global-img>", image_token="<image>", image_seq_len=16
    )
    pictures = [Idefics3Processor.replace_image_token(words, cut, number) for number in range(2)]
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    prompt = tokenizer.encode(f"11{pictures[0]}23{pictures[1]}").ids
    assert (cut["rows"], cut["cols"], prompt.count(IMAGE)) == ([[2, 1]], [[2, 2]], 16 * 8)
    llm = jaxsgl.LLM(str(tmp_path), **SIZES)
    data = {"image": [file_of(each) for each in given]}
    media = {"pixel_values": cut["pixel_values"]}
    for form in ({"prompt": "11<image>23<image>"}, {"prompt_token_ids": [11, IMAGE, 23, IMAGE]}):
        (answer,) = llm.generate({**form, "multi_modal_data": data}, GREEDY, use_tqdm=False)
        assert answer.prompt_tokens == len(prompt)
        assert list(answer.token_ids) == greedy(model, prompt, media, has_types=False)
    llm.close()


def test_pictures_of_aya_vision_give_transformers_tokens(tmp_path: Path) -> None:
    """In a text, whose word for a picture is no token of the model's, and among ids."""
    model = make_model(tmp_path, "aya_vision")
    ends, numbers = {START: "<|START_OF_IMG|>", END: "<|END_OF_IMG|>"}, ["TILE_GLOBAL", "TILE_1", "TILE_2"]
    write_words(tmp_path, ends | {IMAGE: "<|IMG_PATCH|>"} | {90 + i: word for i, word in enumerate(numbers)})
    told = {"size": {"height": 32, "width": 32}, "max_patches": 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(told))
    given = [picture(100, 42), picture(40, 40, seed=1)]
    cut = GotOcr2ImageProcessorPil(**told, crop_to_patches=True)(images=given, return_tensors="pt")
    words = SimpleNamespace(
        start_of_img_token=ends[START], end_of_img_token=ends[END], img_patch_token="<|IMG_PATCH|>", img_size=32,
        patch_size=8, tile_token="TILE", tile_global_token="TILE_GLOBAL",
    )  # fmt: skip
    pictures = [AyaVisionProcessor.replace_image_token(words, cut, number) for number in range(2)]
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    prompt = tokenizer.encode(f"11 {pictures[0]} 23 {pictures[1]}").ids
    assert cut["num_patches"].tolist() == [3, 1] and prompt.count(IMAGE) == 16 * 4 and {90, 91, 92} <= {*prompt}
    llm = jaxsgl.LLM(str(tmp_path), **SIZES)
    data, media = {"image": [file_of(each) for each in given]}, {"pixel_values": cut["pixel_values"]}
    for form in ({"prompt": "11 <image> 23 <image>"}, {"prompt_token_ids": [11, IMAGE, 23, IMAGE]}):
        (answer,) = llm.generate({**form, "multi_modal_data": data}, GREEDY, use_tqdm=False)
        assert answer.prompt_tokens == len(prompt)
        assert list(answer.token_ids) == greedy(model, prompt, media, has_types=False)
    llm.close()


def test_pictures_of_command_a_vision_give_transformers_tokens(tmp_path: Path) -> None:
    """By an own reading of its image processor, which needs torchvision: three tiles and the whole, and one alone."""
    model = make_model(tmp_path, "cohere2_vision")
    ends = {START: "<|START_OF_IMG|>", END: "<|END_OF_IMG|>", BREAK: "<|IMG_LINE_BREAK|>"}
    write_words(tmp_path, ends | {IMAGE: "<|IMG_PATCH|>"})
    told = {"size": {"height": 32, "width": 32}, "max_patches": 3, "patch_size": 4}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(told))
    given = [picture(100, 42), picture(30, 30, seed=1)]
    wide = given[0].resize((96, 32), Image.Resampling.BICUBIC)
    tiles = [wide.crop((x, 0, x + 32, 32)) for x in (0, 32, 64)]
    tiles += [each.resize((32, 32), Image.Resampling.BICUBIC) for each in given]
    pixels = np.stack([np.asarray(each) for each in tiles]).astype(np.float32) / 255
    normalized = (pixels - np.array(OPENAI_CLIP_MEAN, np.float32)) / np.array(OPENAI_CLIP_STD, np.float32)
    of_tile = [*[IMAGE] * 16, BREAK]
    prompt = [11, START, *of_tile * 4, END, 23, START, *of_tile, END]
    llm = jaxsgl.LLM(str(tmp_path), **SIZES)
    media = {"pixel_values": torch.tensor(normalized.transpose(0, 3, 1, 2))}
    data = {"image": [file_of(each) for each in given]}
    for form in ({"prompt": "11 <|IMG_PATCH|> 23 <|IMG_PATCH|>"}, {"prompt_token_ids": [11, IMAGE, 23, IMAGE]}):
        (answer,) = llm.generate({**form, "multi_modal_data": data}, GREEDY, use_tqdm=False)
        assert answer.prompt_tokens == len(prompt)
        assert list(answer.token_ids) == greedy(model, prompt, media, has_types=False)
    llm.close()


def patches_by_pixel(given: list[Image.Image]) -> dict[str, Any]:
    """What LFM2-VL takes of scaled pictures: an own reading of its image processor, which needs torchvision."""
    pixels, shapes = [], []
    for each in given:
        values = (np.asarray(each).astype(np.float32) / 255 - np.float32(0.5)) / np.float32(0.5)
        h, w = values.shape[0] // 4, values.shape[1] // 4
        pixels.append(torch.tensor(values.reshape(h, 4, w, 4, 3).transpose(0, 2, 1, 3, 4).reshape(h * w, 48)))
        shapes.append((h, w))
    mask = [torch.ones(len(each), dtype=torch.int32) for each in pixels]
    pad = torch.nn.utils.rnn.pad_sequence
    of_all = {"pixel_values": pad(pixels, batch_first=True), "pixel_attention_mask": pad(mask, batch_first=True)}
    return of_all | {"spatial_shapes": torch.tensor(shapes)}


def test_pictures_of_lfm2_vl_give_transformers_tokens(tmp_path: Path) -> None:
    """One in two tiles, whose places are told in words, and whole; and one whole alone."""
    model = make_model(tmp_path, "lfm2_vl")
    words = ["<|img_row_1_col_1|>", "<|img_row_1_col_2|>", "<|img_thumbnail|>"]
    ends = {IMAGE: "<image>", START: "<|image_start|>", END: "<|image_end|>"}
    write_words(tmp_path, ends | {90 + i: word for i, word in enumerate(words)})
    told = {"min_image_tokens": 4, "max_image_tokens": 16, "tile_size": 32, "max_tiles": 4, "encoder_patch_size": 4}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(told))
    given = [picture(100, 42), picture(20, 24, seed=1)]
    wide = given[0].resize((64, 32), Image.Resampling.BILINEAR)
    seen = [wide.crop((x, 0, x + 32, 32)) for x in (0, 32)]
    seen += [given[0].resize((48, 16), Image.Resampling.BILINEAR), given[1].resize((16, 24), Image.Resampling.BILINEAR)]
    writer = SimpleNamespace(
        image_token="<image>", image_start_token=ends[START], image_end_token=ends[END], image_thumbnail_token=words[2]
    )
    first, second = (
        Lfm2VlProcessor._build_image_tokens(writer, *sizes, use_thumbnail=True, use_image_special_tokens=True)
        for sizes in ((1, 2, 16, 12), (1, 1, 16, 6))
    )
    prompt = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(f"11 {first} 23 {second}").ids
    assert prompt.count(IMAGE) == 2 * 16 + 12 + 6 and {90, 91, 92} <= {*prompt}
    llm = jaxsgl.LLM(str(tmp_path), **SIZES | {"page_size": 64, "max_total_tokens": 1024})
    data = {"image": [file_of(each) for each in given]}
    for form in ({"prompt": "11 <image> 23 <image>"}, {"prompt_token_ids": [11, IMAGE, 23, IMAGE]}):
        (answer,) = llm.generate({**form, "multi_modal_data": data}, GREEDY, use_tqdm=False)
        assert answer.prompt_tokens == len(prompt)
        assert list(answer.token_ids) == greedy(model, prompt, patches_by_pixel(seen), has_types=False)
    llm.close()


PROCESSORS: dict[str, Any] = {"paddleocr_vl": PaddleOCRVLImageProcessorPil, "exaone4_5": Qwen2VLImageProcessorPil}


@pytest.mark.parametrize("kind", daily([*PROCESSORS], every=2))
def test_pictures_scaled_as_qwen2_vls_give_transformers_tokens(kind: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, kind)
    size = {"shortest_edge": 64, "longest_edge": 2048}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**LIMITS, "size": size}))
    given = [picture(100, 42), picture(5, 24, seed=1)]
    processor = PROCESSORS[kind](size=size, **LIMITS)
    cut = processor(images=given, return_tensors="pt")
    counts = [int(grid.prod()) // 4 for grid in cut["image_grid_thw"]]
    prompt = [11, START, *[IMAGE] * counts[0], END, 23, START, *[IMAGE] * counts[1], END, 35]
    llm = jaxsgl.LLM(str(tmp_path), **SIZES)
    asked = {"prompt_token_ids": [11, START, IMAGE, END, 23, START, IMAGE, END, 35]}
    data = {"image": [file_of(each) for each in given]}
    (answer,) = llm.generate({**asked, "multi_modal_data": data}, GREEDY, use_tqdm=False)
    llm.close()
    assert answer.prompt_tokens == len(prompt)
    assert list(answer.token_ids) == greedy(model, prompt, dict(cut), has_types=kind == "paddleocr_vl")


@pytest.mark.parametrize("kind", daily(OF_CLIP, every=3))
def test_pictures_of_llava_give_transformers_tokens(kind: str, tmp_path: Path) -> None:
    """In a text and among ids; a picture's tokens are those that transformers' own processor writes."""
    model = make_model(tmp_path, kind)
    write_words(tmp_path, {IMAGE: "<image>"})
    given, side = [picture(100, 42), picture(17, 24, seed=1)], {"height": 32, "width": 32}
    cut = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=side)(images=given, return_tensors="pt")
    words = SimpleNamespace(
        image_token="<image>", patch_size=4, num_additional_image_tokens=1, vision_feature_select_strategy="default"
    )
    pictures = [LlavaProcessor.replace_image_token(words, cut, number) for number in range(2)]
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    prompt = tokenizer.encode(f"11 {pictures[0]} 23 {pictures[1]}").ids
    assert prompt.count(IMAGE) == 2 * 64
    sizes = SIZES | {"vision": VisionConfig(mm_pool_tokens=256, mm_max_patches=128)}
    llm = jaxsgl.LLM(str(tmp_path), **sizes)
    data = {"image": [file_of(each) for each in given]}
    for form in ({"prompt": "11 <image> 23 <image>"}, {"prompt_token_ids": [11, IMAGE, 23, IMAGE]}):
        (answer,) = llm.generate({**form, "multi_modal_data": data}, GREEDY, use_tqdm=False)
        assert answer.prompt_tokens == len(prompt)
        assert list(answer.token_ids) == greedy(model, prompt, dict(cut), has_types=False)
    llm.close()


def joined_processors(kind: str) -> tuple[Any, Any, dict[str, Any]]:
    """Returns a tiled model's image processor, the processor that writes placeholders, and both ones' settings."""
    square = {"height": 16, "width": 16}
    told: dict[str, Any] = {"image_grid_pinpoints": RESOLUTIONS, "size": square}
    pixels, writer = LlavaOnevisionImageProcessorPil, object.__new__(LlavaOnevisionProcessor)
    if kind != "llava_onevision":
        told |= {"size": {"shortest_edge": 16}, "crop_size": square}
        pixels, writer = LlavaNextImageProcessorPil, object.__new__(LlavaNextProcessor)
    writer.image_processor, writer.image_token, writer.patch_size = pixels(**told), "<image>", 4
    writer.num_additional_image_tokens, writer.num_image_tokens, writer.vision_aspect_ratio = 1, 16, "anyres_max_2"
    writer.vision_feature_select_strategy = "full" if kind == "llava_onevision" else "default"
    return writer.image_processor, writer, told


@pytest.mark.parametrize("kind", daily(["llava_onevision", "llava_next", "llava_next_mistral"], every=3))
def test_pictures_whose_tiles_are_joined_give_transformers_tokens(kind: str, tmp_path: Path) -> None:
    """One in a text, and two among ids, which LLaVA-OneVision sees whole alone."""
    model = make_model(tmp_path, kind)
    write_words(tmp_path, {IMAGE: "<image>"})
    processor, writer, told = joined_processors(kind)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(told))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    llm = jaxsgl.LLM(str(tmp_path), **SIZES | {"vision": VisionConfig(mm_pool_tokens=256, mm_max_patches=112)})
    for given, form in (
        ([picture(100, 82)], {"prompt": "11 <image> 23"}),
        ([picture(100, 42), picture(17, 24, seed=1)], {"prompt_token_ids": [11, IMAGE, 23, IMAGE, 35]}),
    ):
        cut = processor(images=[given] if kind == "llava_onevision" else given, return_tensors="pt")
        words = [writer.replace_image_token(cut, number) for number in range(len(given))]
        prompt = tokenizer.encode(
            " ".join(f"{text} {word}" for text, word in zip(("11", "23"), words, strict=False))
        ).ids
        prompt.append((23, 35)[len(given) - 1])
        data = {"image": [file_of(each) for each in given]}
        (answer,) = llm.generate({**form, "multi_modal_data": data}, GREEDY, use_tqdm=False)
        assert answer.prompt_tokens == len(prompt) and prompt.count(IMAGE) > 30
        assert list(answer.token_ids) == greedy(model, prompt, dict(cut), has_types=False)
    llm.close()


def test_pictures_of_gemma_3_give_transformers_tokens(tmp_path: Path) -> None:
    """What stands for a picture becomes its frame between empty lines, in a text and among ids."""
    model = make_model(tmp_path, "gemma3")
    write_words(
        tmp_path, {IMAGE: "<image_soft_token>", START: "<start_of_image>", END: "<end_of_image>", EMPTY: "\n\n"}
    )
    given = [picture(100, 42), picture(17, 24, seed=1)]
    processor = Gemma3ImageProcessorPil(
        size={"height": 32, "width": 32}, resample=2, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    cut = processor(images=given, return_tensors="pt")
    frame = [EMPTY, START, *[IMAGE] * 16, END, EMPTY]
    prompt = [11, *frame, 23, *frame, 35]
    media = {"pixel_values": torch.stack([*cut["pixel_values"]])}
    llm = jaxsgl.LLM(str(tmp_path), **SIZES)
    data = {"image": [file_of(each) for each in given]}
    for form in (
        {"prompt": "11<start_of_image>23<start_of_image>35"},
        {"prompt_token_ids": [11, START, 23, START, 35]},
    ):
        (answer,) = llm.generate({**form, "multi_modal_data": data}, GREEDY, use_tqdm=False)
        assert answer.prompt_tokens == len(prompt)
        answers = list(answer.token_ids)
        assert answers == greedy(model, prompt, media, has_types=True)
    llm.close()


def of_whole_squares(cut: dict[str, Any]) -> dict[str, Any]:
    """What `patches_merge` of Gemma 4's unified form makes of patches of 2 x 2 pixels: squares of 2 x 2 of them.

    Its image processor needs torchvision; sizes are those of Gemma 4's.
    """
    made, places = [], []
    for patches, at in zip(cut["pixel_values"], cut["image_position_ids"], strict=True):
        columns, rows = (int(most) + 1 for most in at.max(dim=0).values)
        squares = patches[: rows * columns].reshape(rows // 2, 2, columns // 2, 2, 2, 2, 3)
        made.append(squares.permute(0, 2, 1, 4, 3, 5, 6).reshape(-1, 48))
        across, down = torch.meshgrid(torch.arange(columns // 2), torch.arange(rows // 2), indexing="xy")
        places.append(torch.stack([across, down], dim=-1).reshape(-1, 2))
    pad = torch.nn.utils.rnn.pad_sequence
    return {**cut, "pixel_values": pad(made, True), "image_position_ids": pad(places, True, -1)}


@pytest.mark.parametrize("kind", daily(["gemma4_unified", "gemma4"], every=2))
def test_a_picture_and_a_video_of_gemma_4_give_transformers_tokens(kind: str, tmp_path: Path) -> None:
    """In a text and among ids: each frame has its time in words before it, and the second one a space before these."""
    sizes_of = {"patch_size": 4} if kind == "gemma4" else {"patch_size": 2, "pooling_kernel_size": 2}
    windows = {} if kind == "gemma4" else {"sliding_window": 70}  # which hold an image
    model = make_model(tmp_path, kind, **windows)
    write_words(
        tmp_path, {IMAGE: "<|image|>", VIDEO: "<|video|>", START: "<|image>", END: "<image|>", 90: "00:00", 91: "00:01"}
    )
    processor = Gemma4ImageProcessorPil(**sizes_of, max_soft_tokens=70, do_normalize=False)
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"image_processor": {"max_soft_tokens": 70, "do_normalize": False} | sizes_of})
    )
    image, frames = picture(100, 42), [picture(48, 48, seed=i) for i in range(3)]
    cut, of_frames = (dict(processor(images=given, return_tensors="pt")) for given in ([image], frames))
    if kind == "gemma4_unified":
        cut, of_frames = map(of_whole_squares, (cut, of_frames))
    media = {
        "pixel_values": cut["pixel_values"], "image_position_ids": cut["image_position_ids"],
        "pixel_values_videos": of_frames["pixel_values"], "video_position_ids": of_frames["image_position_ids"],
        "num_frames_per_video": torch.tensor([3]),
    }  # fmt: skip
    counts = {IMAGE: int(cut["num_soft_tokens_per_image"][0]), VIDEO: int(of_frames["num_soft_tokens_per_image"][0])}
    words = [11, START, IMAGE, END, 23]
    words += [token for time in (90, 90, 91) for token in (time, START, VIDEO, END)]
    prompt = [token for token in [*words, 35] for _ in range(counts.get(token, 1))]
    most = 140 * MERGES.get(kind, 2) ** 2
    sizes = SIZES | {"extend_buckets": (96,), "chunked_prefill_size": 96, "context_length": 512}
    llm = jaxsgl.LLM(str(tmp_path), **sizes | {"vision": VisionConfig(mm_pool_tokens=512, mm_max_patches=most)})
    data = {"image": file_of(image), "video": [[file_of(frame) for frame in frames]]}
    for form in ({"prompt": "11 <|image|> 23 <|video|> 35"}, {"prompt_token_ids": [11, IMAGE, 23, VIDEO, 35]}):
        (answer,) = llm.generate({**form, "multi_modal_data": data}, GREEDY, use_tqdm=False)
        assert answer.prompt_tokens == len(prompt)
        assert list(answer.token_ids) == greedy(model, prompt, media, has_types=True)
    llm.close()
