"""Files of pictures and frames of videos in a prompt of Qwen2.5-VL, all the way to the tokens of transformers.

Its processor's part is transformers' own, as far as it needs no torchvision: what cuts pictures, and what cuts frames.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

import jaxsgl
from jaxsgl.config.features import VisionConfig
from tests.preprocess.pictures import file_of, picture
from tests.vision_models import END, IMAGE, START, VIDEO, make_model

pytestmark = pytest.mark.device
FPS = 2.0  # of the frames, as nothing else is said: a temporal patch is 3 positions later than the one before
LIMITS: dict[str, Any] = {
    "patch_size": 4,
    "merge_size": 2,
    "image_mean": OPENAI_CLIP_MEAN,
    "image_std": OPENAI_CLIP_STD,
}
PIXELS = {"min_pixels": 64, "max_pixels": 2048}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    model = make_model(folder, "qwen2_5_vl")
    (folder / "preprocessor_config.json").write_text(json.dumps(LIMITS | PIXELS))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(LIMITS | PIXELS))
    return folder, model


def expected(model: Any, ids: list[int], image: Any, frames: list[Any], num_tokens: int) -> list[int]:
    """transformers' greedy answer."""
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
    answer: list[int] = []
    for _ in range(num_tokens):
        tokens = torch.tensor([[*prompt, *answer]])
        types = (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int()
        model.model.rope_deltas = None
        with torch.no_grad():
            logits = model(input_ids=tokens, mm_token_type_ids=types, use_cache=False, **media).logits
        answer.append(int(logits[0, -1].argmax()))
    return answer


def test_a_picture_and_a_video_give_transformers_tokens(made: tuple[Path, Any]) -> None:
    folder, model = made
    image, frames = picture(61, 42), [picture(48, 24, seed=i) for i in range(4)]
    ids = [11, START, IMAGE, END, 23, 35, START, VIDEO, END, 47, 59]
    llm = jaxsgl.LLM(
        str(folder), page_size=4, max_total_tokens=512, context_length=256, max_running_requests=1, decode_buckets=(1,),
        extend_buckets=(64,), chunked_prefill_size=64, dtype="float32",
        vision=VisionConfig(mm_pool_tokens=256, mm_max_patches=256),
    )  # fmt: skip
    data = {"image": file_of(image), "video": [[file_of(frame) for frame in frames]]}
    params = jaxsgl.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    (answer,) = llm.generate({"prompt_token_ids": ids, "multi_modal_data": data}, params, use_tqdm=False)
    llm.close()
    assert list(answer.token_ids) == expected(model, ids, image, frames, 6)
