"""Tiny checkpoints of models that see images, requests with random images, and what transformers says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from jaxsgl.preprocess.patches import joined_tiles
from jaxsgl.preprocess.settings import PixelSettings, ProcessorSettings
from jaxsgl.requests.media import Grid, MediaItem, Tiling, digest_of, patches_of
from jaxsgl.requests.request import Request, SamplingParams

VOCAB = 256
IMAGE, VIDEO, START, END = 250, 251, 252, 253
FIRST_SPECIAL = 250
BREAK, LAST = 248, 249  # what ends the lines of an image, and its last one
VIDEO_START, VIDEO_END = 245, 246  # around the frames of a video that the model sees as images
PATCH_LEN = 3 * 2 * 4 * 4
SQUARE: Grid = (1, 8, 8)  # the one grid of Gemma 3's images, and of InternVL's tiles
# Grids of images that are seen whole, 4 to 16 tokens.
WHOLE_GRIDS: dict[str, list[Grid]] = {
    "gemma3": [SQUARE],
    "gemma4": [(1, 12, 12), (1, 6, 9), (1, 3, 12)],
    "gemma4_unified": [(1, 4, 4), (1, 2, 3), (1, 1, 9)],
}

# All sizes differ, and no two axes of a tensor can be mistaken for each other.
VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
    "patch_size": 4,
}
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 16,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
STATES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 2, 1],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 14,
    "linear_value_head_dim": 18,
    "linear_conv_kernel_dim": 3,
}
# Of models whose pairs of the three positions stand in order.
IN_ORDER: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
}
# Of GLM-4V's, which turn half of each head: in the dense one neighbours turn together, in the mixture they don't.
IN_PART: dict[str, Any] = {
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 2, 1],
    },
}  # fmt: skip
# Of GLM-OCR's, which turn whole heads.
OF_ALL: dict[str, Any] = {
    "head_dim": 20,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 5, 2]},
}
GLM_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "n_group": 4, "topk_group": 2,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "attention_bias": True,
}  # fmt: skip
AYA: dict[str, Any] = {
    "model_type": "cohere2", "num_hidden_layers": 4, "sliding_window": 20, "logit_scale": 1.0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
LFM2: dict[str, Any] = {
    "model_type": "lfm2", "num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"],
    "conv_L_cache": 3, "block_multiple_of": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
EXAONE: dict[str, Any] = {
    "model_type": "exaone4", "num_hidden_layers": 4, "sliding_window": 20, "sliding_window_pattern": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
GLM46V: dict[str, Any] = {"model_type": "glm4v_moe_text", **GLM_EXPERTS}
# Of decoders whose images are told by lines.
IN_LINES: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "sliding_window": None}
GROWING: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
    },
}  # fmt: skip
# Of decoders whose tokens see whole images; windows are shorter than some texts, and longer than an image.
WHOLE: dict[str, Any] = {
    "num_hidden_layers": 4, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 100000.0},
    },
}  # fmt: skip
# Of Gemma 4: layers with windows see whole images, if the model says so, and full ones never do.
AHEAD_IN_WINDOWS: dict[str, Any] = {
    "num_hidden_layers": 4, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 32, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision",
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 100000.0},
    },
}  # fmt: skip
WITHOUT_LAYERS = {key: value for key, value in AHEAD_IN_WINDOWS.items() if key != "hidden_size_per_layer_input"}
OF_LAYERS: dict[str, Any] = {
    **AHEAD_IN_WINDOWS, "use_bidirectional_attention": None, "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2, "pad_token_id": 3,
}  # fmt: skip
# Of decoders whose images are cut into tiles.
IN_TILES: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
OF_TILES: dict[str, dict[str, Any]] = {
    "internvl": {"model_type": "qwen2"},
    "internvl_llama": {"model_type": "llama"},
    "internvl_qwen3": {"model_type": "qwen3"},
    "internvl_moe": {"model_type": "qwen3_moe", **MOE},
    "internvl_gpt_oss": {
        "model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
}  # fmt: skip
OF_LLAVA: dict[str, dict[str, Any]] = {
    "llava": {"model_type": "llama"},
    "llava_qwen2": {"model_type": "qwen2"},
    "llava_mistral": {"model_type": "mistral", "sliding_window": None},
    "pixtral": {"model_type": "mistral", "sliding_window": None},
    "pixtral_llama": {"model_type": "llama"},
}
# Of pictures whose tiles are joined: what tiles make together, and sizes of pictures that tiles of 16 pixels show.
RESOLUTIONS = [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]]
JOINED_SIZES = ((20, 40), (40, 20), (31, 33), (90, 30), (7, 20), (16, 16), (64, 80), (3, 90))
OF_JOINED: dict[str, dict[str, Any]] = {
    "llava_next": {"model_type": "llama"},
    "llava_next_mistral": {"model_type": "mistral", "sliding_window": None},
    "llava_next_qwen2": {"model_type": "qwen2"},
    "llava_onevision": {"model_type": "qwen2", "tie_word_embeddings": True},
}
# Configuration, model, and what differs from `TEXT`.
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2_vl": (transformers.Qwen2VLConfig, transformers.Qwen2VLForConditionalGeneration, IN_ORDER),
    "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration, IN_ORDER),
    "gemma3": (transformers.Gemma3Config, transformers.Gemma3ForConditionalGeneration, WHOLE),
    "gemma4": (transformers.Gemma4Config, transformers.Gemma4ForConditionalGeneration, AHEAD_IN_WINDOWS),
    "gemma4_small": (transformers.Gemma4Config, transformers.Gemma4ForConditionalGeneration, OF_LAYERS),
    "gemma4_unified": (
        transformers.Gemma4UnifiedConfig,
        transformers.Gemma4UnifiedForConditionalGeneration,
        WITHOUT_LAYERS,
    ),
    "glm4v": (transformers.Glm4vConfig, transformers.Glm4vForConditionalGeneration, IN_PART),
    "glm4v_moe": (
        transformers.Glm4vMoeConfig,
        transformers.Glm4vMoeForConditionalGeneration,
        IN_PART | GLM_EXPERTS,
    ),
    **{
        kind: (transformers.InternVLConfig, transformers.InternVLForConditionalGeneration, IN_TILES | of_kind)
        for kind, of_kind in OF_TILES.items()
    },
    "glm46v": (transformers.Glm46VConfig, transformers.Glm46VForConditionalGeneration, IN_PART | GLM46V),
    "paddleocr_vl": (transformers.PaddleOCRVLConfig, transformers.PaddleOCRVLForConditionalGeneration, OF_ALL),
    "idefics3": (
        transformers.Idefics3Config,
        transformers.Idefics3ForConditionalGeneration,
        OF_LLAVA["llava"] | IN_TILES,
    ),
    "smolvlm": (transformers.SmolVLMConfig, transformers.SmolVLMForConditionalGeneration, OF_LLAVA["llava"] | IN_TILES),
    "aya_vision": (transformers.AyaVisionConfig, transformers.AyaVisionForConditionalGeneration, AYA),
    "cohere2_vision": (transformers.Cohere2VisionConfig, transformers.Cohere2VisionForConditionalGeneration, AYA),
    "lfm2_vl": (transformers.Lfm2VlConfig, transformers.Lfm2VlForConditionalGeneration, LFM2),
    "exaone4_5": (transformers.Exaone4_5_Config, transformers.Exaone4_5_ForConditionalGeneration, EXAONE),
    "lighton_ocr": (transformers.LightOnOcrConfig, transformers.LightOnOcrForConditionalGeneration, IN_TILES),
    **{
        kind: (transformers.LlavaConfig, transformers.LlavaForConditionalGeneration, IN_TILES | of_kind)
        for kind, of_kind in OF_LLAVA.items()
    },
    **{
        kind: (transformers.LlavaNextConfig, transformers.LlavaNextForConditionalGeneration, IN_TILES | of_kind)
        for kind, of_kind in OF_JOINED.items()
        if kind != "llava_onevision"
    },
    "llava_onevision": (
        transformers.LlavaOnevisionConfig,
        transformers.LlavaOnevisionForConditionalGeneration,
        IN_TILES | OF_JOINED["llava_onevision"],
    ),
    "glm_ocr": (transformers.GlmOcrConfig, transformers.GlmOcrForConditionalGeneration, OF_ALL),
    "mistral": (transformers.Mistral3Config, transformers.Mistral3ForConditionalGeneration, IN_LINES),
    "ministral3": (transformers.Mistral3Config, transformers.Mistral3ForConditionalGeneration, GROWING),
    "qwen3_vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration, {}),
    "qwen3_vl_moe": (transformers.Qwen3VLMoeConfig, transformers.Qwen3VLMoeForConditionalGeneration, MOE),
    "qwen3_5": (transformers.Qwen3_5Config, transformers.Qwen3_5ForConditionalGeneration, STATES),
    "qwen3_5_moe": (
        transformers.Qwen3_5MoeConfig,
        transformers.Qwen3_5MoeForConditionalGeneration,
        {**STATES, **MOE, "shared_expert_intermediate_size": 36},
    ),
}
WITH_STATES = ("qwen3_5", "qwen3_5_moe")
OF_PIXTRAL = ("pixtral", "pixtral_llama")  # whose patches are not merged
WITH_LINES = ("mistral", "ministral3", *OF_PIXTRAL)
OF_GEMMA4 = ("gemma4", "gemma4_small")
OF_GLM = ("glm4v", "glm4v_moe", "glm_ocr", "glm46v")
OF_COHERE = ("aya_vision", "cohere2_vision")
OF_IDEFICS = ("idefics3", "smolvlm")
# Transformers' types.
JOINED_TYPES = ("llava_next", "llava_onevision")
WITH_PICTURES = (
    *JOINED_TYPES, *OF_COHERE, *OF_IDEFICS,
    "gemma3", "gemma4", "gemma4_unified", "internvl", "lfm2_vl", "lighton_ocr", "llava", "mistral3",
)  # fmt: skip
OF_CLIP = ("llava", "llava_mistral", "llava_qwen2")
WITH_TILES = tuple(OF_TILES)
WITH_JOINED = tuple(OF_JOINED)
# Towers that differ from `VISION`.
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "depth": 4, "embed_dim": 24, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 2, "patch_size": 4,
    },
    "qwen2_5_vl": {
        "depth": 4, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
        "window_size": 16, "fullatt_block_indexes": [1, 3], "tokens_per_second": 3,
    },
    **{
        kind: {
            "model_type": "pixtral", "num_hidden_layers": 4, "hidden_size": 24, "intermediate_size": 40,
            "num_attention_heads": 2, "patch_size": 4, "image_size": 64, "hidden_act": "silu",
        }
        for kind in (*WITH_LINES, "lighton_ocr")
    },
    **{
        kind: {
            "model_type": "clip_vision_model", "num_hidden_layers": 4, "hidden_size": 24, "intermediate_size": 40,
            "num_attention_heads": 2, "patch_size": 4, "image_size": 32,
        }
        for kind in OF_CLIP
    },
    **{
        kind: {
            "model_type": "siglip_vision_model" if kind == "llava_onevision" else "clip_vision_model",
            "num_hidden_layers": 4, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2,
            "patch_size": 4, "image_size": 16, **({"vision_use_head": False} if kind == "llava_onevision" else {}),
        }
        for kind in WITH_JOINED
    },
    **{
        kind: {
            "num_hidden_layers": 4, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2,
            "patch_size": 4, "image_size": 34,
        }
        for kind in OF_IDEFICS
    },
    **{
        kind: {
            "model_type": "siglip_vision_model", "num_hidden_layers": 4, "hidden_size": 24, "intermediate_size": 40,
            "num_attention_heads": 2, "patch_size": 4, "image_size": 32, "vision_use_head": False,
        }
        for kind in OF_COHERE
    },
    "exaone4_5": {
        "depth": 4, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "num_key_value_heads": 2,
        "out_hidden_size": 64, "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1, 3],
    },
    "paddleocr_vl": {
        "num_hidden_layers": 4, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2, "patch_size": 4,
        "image_size": 20,
    },
    "gemma3": {
        "model_type": "siglip_vision_model", "num_hidden_layers": 4, "hidden_size": 24, "intermediate_size": 40,
        "num_attention_heads": 2, "patch_size": 4, "image_size": 32, "vision_use_head": False,
    },
    **{
        kind: {
            "num_hidden_layers": 4, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 12, "patch_size": 4, "pooling_kernel_size": 3,
            "position_embedding_size": 64, "use_clipped_linears": kind == "gemma4_small",
            "standardize": kind == "gemma4",
        }
        for kind in OF_GEMMA4
    },
    "lfm2_vl": {
        "num_hidden_layers": 4, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2,
        "patch_size": 4, "num_patches": 25, "vision_use_head": False,
    },
    "gemma4_unified": {
        "mm_embed_dim": 24, "output_proj_dims": 24, "mm_posemb_size": 32, "patch_size": 2, "pooling_kernel_size": 2,
    },
    **{
        kind: {
            "depth": 4, "hidden_size": 24, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 64,
            "patch_size": 4, "image_size": 20,
        }
        for kind in OF_GLM
    },
    **{
        kind: {
            "num_hidden_layers": 4, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2,
            "patch_size": [4, 4], "image_size": [32, 32], "attention_bias": kind != "internvl_moe",
            "norm_type": "rms_norm" if kind == "internvl_moe" else "layer_norm", "use_qk_norm": kind == "internvl_moe",
        }
        for kind in WITH_TILES
    },
    **{kind: {key: VISION[key] for key in VISION if key != "deepstack_visual_indexes"} for kind in WITH_STATES},
}  # fmt: skip
_PIXELS = PixelSettings(256, 256, tuple(OPENAI_CLIP_MEAN), tuple(OPENAI_CLIP_STD))
_NEXT_SETTINGS = ProcessorSettings(
    4, 1, _PIXELS, _PIXELS, IMAGE, fixed_side=16,
    resolutions=tuple((height, width) for height, width in RESOLUTIONS),
)  # fmt: skip
JOINED_SETTINGS = dict.fromkeys(WITH_JOINED, _NEXT_SETTINGS) | {
    "llava_onevision": replace(_NEXT_SETTINGS, most_tiles=2, several_whole=True)
}
# Patches along the sides of a token, unless two.
MERGES = dict.fromkeys(OF_GEMMA4, 3) | dict.fromkeys(("gemma4_unified", *OF_PIXTRAL, *OF_CLIP, *WITH_JOINED), 1)
SECONDS = 0.25  # between temporal patches of videos
# Positions between them, of models whose videos are one run.
APART = {"qwen2_vl": 1.0, "qwen2_5_vl": 3 * SECONDS}
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


def make_model(folder: Path, kind: str = "qwen3_vl", *, seed: int = 0, **text_changes: Any) -> Any:
    """Saves a random model of one of `KINDS` into `folder`; returns it. It never answers with a placeholder.

    `text_changes` are values of the decoder's configuration that differ from those of its kind.
    """
    transformers.logging.disable_progress_bar()
    config_class, model_class, of_kind = KINDS[kind]
    text = {**TEXT, **of_kind, **text_changes}
    vision = TOWERS.get(kind, VISION)
    ids: dict[str, Any] = {"image_token_index": IMAGE} if kind in (*WITH_LINES, *OF_CLIP) else IDS
    if kind == "aya_vision":
        ids = {"image_token_index": IMAGE, "alignment_intermediate_size": 44}
    if kind == "cohere2_vision":
        ids = {"image_token_id": IMAGE, "alignment_intermediate_size": 44}
    if kind in WITH_JOINED:
        ids = {"image_token_index": IMAGE, "image_grid_pinpoints": RESOLUTIONS}
        ids |= {"vision_aspect_ratio": "anyres_max_2"} if kind == "llava_onevision" else {}
    if kind == "lfm2_vl":
        ids = {"image_token_id": IMAGE, "projector_hidden_size": 44}
    if kind in OF_IDEFICS:
        ids = {"image_token_id": IMAGE, "scale_factor": 2}
    if kind == "exaone4_5":
        ids = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    if kind == "lighton_ocr":
        ids = {"image_token_id": IMAGE, "tie_word_embeddings": False}
    if kind in OF_PIXTRAL:
        ids |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    if kind == "gemma3":
        ids = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END, "mm_tokens_per_image": 16}
    if kind.startswith("gemma4"):
        ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "boi_token_id": START, "eoi_token_id": END}
    if kind in WITH_TILES:
        ids = {"image_token_id": IMAGE, "image_seq_length": 16, "tie_word_embeddings": kind == "internvl_llama"}
    if kind in OF_GLM:
        ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "image_start_token_id": START}
        ids |= {"image_end_token_id": END, "video_start_token_id": VIDEO_START, "video_end_token_id": VIDEO_END}
    if kind in ("mistral", "ministral3"):
        text["model_type"] = kind
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = model_class(config_class(text_config=text, vision_config=vision, **ids)).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.15 if parameter.ndim > 1 else 0.1))
            if ("norm" in name and name.endswith("weight")) or "lambda" in name:
                parameter.add_(1.0)
        for name, buffer in model.named_buffers():
            if name.endswith(("_min", "_max")):  # clips a part of all numbers
                buffer.fill_((-1 if name.endswith("_min") else 1) * (0.2 + 0.6 * torch.rand(())))
            elif "std_" in name:
                buffer.copy_(1 + 0.2 * torch.randn_like(buffer))
        model.lm_head.weight[FIRST_SPECIAL:] = 0
    torch.random.set_rng_state(state)
    model.save_pretrained(folder)
    return model


def image(offset: int, grid: Grid, seed: int, in_lines: bool = False, frames: int = 2, merge: int = 2) -> MediaItem:
    """A random image that stands at `offset`; `in_lines`: of a model that tells its lines."""
    patch_len, line_len = (PATCH_LEN // 2, grid[2] // merge + 1) if in_lines else (PATCH_LEN * frames // 2, 0)
    pixels = np.random.default_rng(seed).integers(0, 256, (grid[1] * grid[2], patch_len), dtype=np.uint8).tobytes()
    length = grid[1] // merge * line_len if in_lines else grid[1] * grid[2] // merge**2
    return MediaItem(digest_of(pixels, grid, "test"), offset, length, grid, pixels, line_len=line_len)


def request_in_lines(request_id: str, grids: Sequence[Grid], seed: int, merge: int = 2, **params: Any) -> Request:
    """Text with images of `grids` between it, whose lines end."""
    rng = np.random.default_rng(seed)
    ids: list[int] = rng.integers(5, 240, 4).tolist()
    items = []
    for i, grid in enumerate(grids):
        items.append(image(len(ids), grid, 100 * seed + i, in_lines=True, merge=merge))
        lines = [*[IMAGE] * (grid[2] // merge), BREAK] * (grid[1] // merge)
        ids += [*lines[:-1], LAST, *rng.integers(5, 240, rng.integers(1, 5)).tolist()]
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params})
    return Request(request_id, ids, sampling, media=tuple(items))


def request_of_whole_images(
    request_id: str, num_images: int, seed: int, kind: str = "gemma3", token: int = IMAGE, **params: Any
) -> Request:
    """Text with images of the model's grids between it, or frames of a video, which have another `token`."""
    rng = np.random.default_rng(seed)
    ids: list[int] = rng.integers(5, 240, rng.integers(1, 9)).tolist()
    items = []
    of_kind = WHOLE_GRIDS.get("gemma4" if kind in OF_GEMMA4 else kind, [SQUARE])
    grids = [of_kind[(seed + i) % len(of_kind)] for i in range(num_images)]
    for i, grid in enumerate(grids if token == IMAGE else grids[:1] * num_images):
        items.append(image(len(ids) + 1, grid, 100 * seed + i, frames=1, merge=MERGES.get(kind, 2)))
        ids += [START, *[token] * items[-1].length, END, *rng.integers(5, 240, rng.integers(1, 9)).tolist()]
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params})
    return Request(request_id, ids, sampling, media=tuple(items))


def request_of_tiles(request_id: str, num_tiles: Sequence[int], seed: int, **params: Any) -> Request:
    """Text with pictures between it that have so many tiles."""
    rng = np.random.default_rng(seed)
    ids: list[int] = rng.integers(5, 240, rng.integers(1, 9)).tolist()
    items: list[MediaItem] = []
    for count in num_tiles:
        ids.append(START)
        for _ in range(count):
            items.append(image(len(ids), SQUARE, 100 * seed + len(items), frames=1))
            ids += [IMAGE] * items[-1].length
        ids += [END, *rng.integers(5, 240, rng.integers(1, 9)).tolist()]
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params})
    return Request(request_id, ids, sampling, media=tuple(items))


ALONE = Tiling(0, 0, 0, 0, 0)  # of one that is shown whole alone


def joined_image(kind: str, offset: int, size: tuple[int, int] | None, seed: int) -> MediaItem:
    """A random picture of that size, whose tiles are joined; None: it is one of several, and shown whole alone."""
    tiles, tiling = 1, ALONE
    if size is not None:
        way = joined_tiles(*size, JOINED_SETTINGS[kind], 1 << 20)
        tiles, tiling = 1 + way.all_height * way.all_width // 16**2, way.tiling
    item = image(offset, (1, 4 * tiles, 4), seed, frames=1, merge=1)
    return msgspec.structs.replace(item, length=tiling.num_tokens(4), tiling=tiling)


def request_of_joined(request_id: str, kind: str, num_images: int, seed: int, **params: Any) -> Request:
    """Text with pictures of several sizes between it; several ones of LLaVA-OneVision are shown whole alone."""
    rng = np.random.default_rng(seed)
    ids: list[int] = rng.integers(5, 240, rng.integers(1, 9)).tolist()
    items: list[MediaItem] = []
    for i in range(num_images):
        is_whole = kind == "llava_onevision" and num_images > 1
        size = None if is_whole else JOINED_SIZES[(3 * seed + i) % len(JOINED_SIZES)]
        items.append(joined_image(kind, len(ids), size, 100 * seed + i))
        ids += [*[IMAGE] * items[-1].length, *rng.integers(5, 240, rng.integers(1, 9)).tolist()]
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params})
    return Request(request_id, ids, sampling, media=tuple(items))


def tiles_of(model: Any, media: Sequence[MediaItem]) -> dict[str, Any]:
    """What transformers takes of pictures whose tiles are joined: their tiles, and sizes that make the same lines."""
    most = max(item.grid[1] // 4 for item in media)
    pixels = torch.zeros(len(media), most, 3, 16, 16)
    sizes, kind = [], model.config.model_type
    for index, item in enumerate(media):
        tiles = normalized(model, [item]).reshape(-1, 4, 4, 3, 4, 4).permute(0, 3, 1, 4, 2, 5).reshape(-1, 3, 16, 16)
        pixels[index, : len(tiles)] = tiles
        made = [joined_image(kind, 0, size, 0) for size in JOINED_SIZES]
        is_alike = [(each.tiling, each.grid) == (item.tiling, item.grid) for each in made]
        sizes.append(JOINED_SIZES[is_alike.index(True) if any(is_alike) else 0])
    taken = {"pixel_values": pixels, "image_sizes": torch.tensor(sizes)}
    if kind == "llava_onevision":
        taken["batch_num_images"] = torch.tensor([1] * len(media) if media[0].tiling != ALONE else [len(media)])
    return taken


def request(
    request_id: str,
    grids: Sequence[Grid],
    seed: int,
    *,
    max_tokens: int = 8,
    is_video: bool = False,
    apart: float | None = None,
    as_images: bool = False,
    text_seed: int | None = None,
    frames: int = 2,
    merge: int = 2,
    **params: Any,
) -> Request:
    """Text with images of `grids` between it. The same `seed` gives the same images, `text_seed` the same text.

    `apart`: they are one run of a video's frames, whose times are so many positions apart. `as_images`: they are frames
    of a video whose placeholders are those of images. `frames`, `merge`: of the model's patches and tokens.
    """
    rng = np.random.default_rng(seed if text_seed is None else text_seed)
    ids: list[int] = rng.integers(5, 240, 4).tolist()
    items: list[MediaItem] = []
    if apart is not None:
        ids.append(START)
        for i, grid in enumerate(grids):
            item = image(len(ids), grid, 100 * seed + i)
            items.append(msgspec.structs.replace(item, later=int(i * apart) if i else None))
            ids += [VIDEO] * item.length
        ids.append(END)
        grids = ()
    ids += [VIDEO_START] * as_images
    for i, grid in enumerate(grids):
        items.append(image(len(ids) + 1, grid, 100 * seed + i, frames=frames, merge=merge))
        ids += [START, *[VIDEO if is_video else IMAGE] * items[-1].length, END]
        ids += rng.integers(5, 240, rng.integers(1, 5)).tolist()
    ids += [VIDEO_END, 17] * as_images
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **params})
    return Request(request_id, ids, sampling, media=tuple(items))


def normalized(model: Any, media: Sequence[MediaItem]) -> Any:
    """The patches of images one after the other, `[P, C]`, as `model` takes them."""
    pixels = np.concatenate([patches_of(item) for item in media]).astype(np.float32) / 255
    is_older = model.config.model_type.startswith(
        ("qwen2", "mistral3", "glm", "internvl", "light", "llava", "paddle", "exaone", "aya", "cohere")
    )
    told = (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD) if is_older else ([0.5] * 3, [0.5] * 3)
    mean, std = (np.array(each, np.float32) for each in told)
    by_channel = pixels.reshape(len(pixels), 3, -1)
    return torch.tensor(((by_channel - mean[:, None]) / std[:, None]).reshape(pixels.shape))


def pictures(model: Any, media: Sequence[MediaItem]) -> dict[str, Any]:
    """What transformers' models of `WITH_PICTURES` take of images: padded pixels, and sizes, or patches' places."""
    if model.config.model_type.startswith("gemma4"):
        return places_of(media, 3 if model.config.model_type == "gemma4" else 1)
    if model.config.model_type == "paddleocr_vl":
        return line_by_line(model, media)
    if model.config.model_type == "lfm2_vl":
        return spatial(model, media)
    if model.config.model_type in JOINED_TYPES:
        return tiles_of(model, media)
    patches = torch.split(normalized(model, media), [item.num_patches for item in media])
    sizes = [(4 * item.grid[1], 4 * item.grid[2]) for item in media]
    pixels = torch.zeros(len(media), 3, max(h for h, _ in sizes), max(w for _, w in sizes))
    merge = 1 if model.config.model_type == "llava" else 2
    for image, (h, w), of_image in zip(pixels, sizes, patches, strict=True):
        of_square = (merge, merge, 3, 4, 4)  # patches, channels, pixels
        squares = of_image.reshape(h // 4 // merge, w // 4 // merge, *of_square)
        image[:, :h, :w] = squares.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, h, w)
    of_size = {"image_sizes": torch.tensor(sizes)} if model.config.vision_config.model_type == "pixtral" else {}
    return {"pixel_values": pixels[None] if model.config.model_type in OF_IDEFICS else pixels, **of_size}


def line_by_line(model: Any, media: Sequence[MediaItem]) -> dict[str, Any]:
    """What PaddleOCR-VL takes of images: patches line by line, and grids."""
    patches = torch.split(normalized(model, media), [item.num_patches for item in media])
    lines = [
        of_image.reshape(item.grid[1] // 2, item.grid[2] // 2, 2, 2, 3, 4, 4).transpose(1, 2).reshape(-1, 3, 4, 4)
        for item, of_image in zip(media, patches, strict=True)
    ]
    return {"pixel_values": torch.cat(lines), "image_grid_thw": torch.tensor([item.grid for item in media])}


def spatial(model: Any, media: Sequence[MediaItem]) -> dict[str, Any]:
    """What LFM2-VL takes of images: padded patches line by line, whose numbers lie pixel by pixel, and their lines."""
    lines = [torch.tensor(()) for _ in media]
    for number, item in enumerate(media):
        squares = normalized(model, [item]).reshape(item.grid[1] // 2, item.grid[2] // 2, 2, 2, 3, 16)
        lines[number] = squares.permute(0, 2, 1, 3, 5, 4).reshape(item.num_patches, -1)
    pixels = torch.nn.utils.rnn.pad_sequence(lines, batch_first=True)
    mask = torch.arange(pixels.shape[1])[None] < torch.tensor([[item.num_patches] for item in media])
    shapes = torch.tensor([item.grid[1:] for item in media])
    return {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask.int()}


def places_of(media: Sequence[MediaItem], merge: int) -> dict[str, Any]:
    """What Gemma 4 takes of images: padded patches, whose numbers lie pixel by pixel, and where each is."""
    most = max(item.num_patches for item in media)
    pixels, places = torch.zeros(len(media), most, PATCH_LEN // 2), torch.full((len(media), most, 2), -1)
    for index, item in enumerate(media):
        by_channel = torch.tensor(patches_of(item).astype(np.float32) / 255).reshape(item.num_patches, 3, -1)
        pixels[index, : item.num_patches] = by_channel.transpose(1, 2).reshape(item.num_patches, -1)
        squares = np.indices(item.grid[1:]).reshape(2, item.grid[1] // merge, merge, item.grid[2] // merge, merge)
        rows, columns = torch.tensor(squares.transpose(0, 1, 3, 2, 4).reshape(2, -1))
        places[index, : item.num_patches] = torch.stack([columns, rows], dim=1)
    return {"pixel_values": pixels, "image_position_ids": places}


def types_of(ids: Any) -> Any:
    """What transformers calls the types of tokens `[1, n]`: 1 of images, 2 of videos."""
    is_within = (ids == VIDEO_START).cumsum(1) > (ids == VIDEO_END).cumsum(1)
    return ((ids == IMAGE) * (1 + is_within.int()) + 2 * (ids == VIDEO)).int()


def logits_of(model: Any, request: Request, answer: Sequence[int] = ()) -> np.ndarray:
    """transformers' logits `[n, V]` of the prompt and the answer."""
    ids = torch.tensor([[*request.prompt_ids, *answer]])
    types = types_of(ids)
    media: dict[str, Any] = {}
    if model.config.model_type in WITH_PICTURES:
        media = pictures(model, request.media) if request.media else {}
        if VIDEO in request.prompt_ids:
            media = {"pixel_values_videos": media["pixel_values"], "video_position_ids": media["image_position_ids"]}
            media["num_frames_per_video"] = torch.tensor([len(request.media)])
        if model.config.model_type.startswith("gemma"):
            media["token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids"] = types
        with torch.no_grad():
            in_lines: np.ndarray = model(input_ids=ids, use_cache=False, **media).logits[0].numpy()
        return in_lines
    if model.config.model_type == "paddleocr_vl" and request.media:
        media = line_by_line(model, request.media)
    elif request.media:
        pixels = normalized(model, request.media)
        grids = [item.grid for item in request.media]
        if 2 in types:
            frames = (len(grids), *grids[0][1:])
            media = {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([frames])}
            if model.config.model_type == "qwen2_5_vl":
                media["second_per_grid_ts"] = torch.tensor([SECONDS])
        else:
            media = {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}
    model.model.rope_deltas = None
    of_tokens = {} if model.config.model_type == "exaone4_5" else {"mm_token_type_ids": types}
    with torch.no_grad():
        logits: np.ndarray = model(input_ids=ids, use_cache=False, **of_tokens, **media).logits[0].numpy()
    return logits


def is_greedy(model: Any, request: Request, answer: Sequence[int]) -> bool:
    """Whether each token of `answer` is the one that transformers finds most likely behind those before it."""
    best = logits_of(model, request, answer)[len(request.prompt_ids) - 1 : -1].argmax(axis=-1)
    return bool(best.tolist() == list(answer))
