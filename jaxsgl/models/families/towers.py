"""The towers of families that see images, as data: which keys config.json has for them, and what these imply.

Owns what `VisionFamily` says of each. The decoders next to them are in the other files of this folder.
"""

from __future__ import annotations

from dataclasses import replace

from jaxsgl.models.towers.arch import Norms, Pixels
from jaxsgl.models.towers.family import MergerFamily, VisionFamily

# By which the processors of several families normalize, CLIP's (arXiv 2103.00020).
_CLIP_PIXELS = Pixels((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))

# What most families but Qwen's and GLM's call them.
_USUAL_KEYS = {"depth": "num_hidden_layers", "num_heads": "num_attention_heads", "in_channels": "num_channels"}

# What the towers of Qwen2-VL and Qwen2.5-VL have in common.
_QWEN2_TOWER = VisionFamily(
    151_655,
    151_656,
    sections=(16, 24, 24),
    takes_turns=False,
    patch_bias=False,
    positions="none",
    pixels=_CLIP_PIXELS,
)

QWEN2_VL_TOWER = replace(
    _QWEN2_TOWER,
    activations=("quick_gelu",),
    keys={"hidden_size": "embed_dim", "out_hidden_size": "hidden_size"},
    ffn_key=None,
    defaults={"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "patch_size": 14},
)

QWEN2_5_VL_TOWER = replace(
    _QWEN2_TOWER,
    activations=("silu",),
    gated=True,
    norms=Norms("root"),
    windows=True,
    defaults={"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "patch_size": 14},
)

# EXAONE 4.5's, to whose decoder tokens of images are as text.
EXAONE_TOWER = replace(
    QWEN2_5_VL_TOWER,
    image_token_id=67,
    video_token_id=None,
    sections=None,
    kv_heads_key="num_key_value_heads",
    defaults={**QWEN2_5_VL_TOWER.defaults, "num_key_value_heads": 8},
)

QWEN3_VL_TOWER = VisionFamily(151_655, 151_656, taps=(8, 16, 24), sections=(24, 20, 20))

QWEN3_5_TOWER = VisionFamily(248_056, 248_057, taps=(), sections=(11, 11, 10))

# The tower of GLM-4.1V to 4.6V, dense and with experts, to whose decoders a frame of a video is an image.
GLM4V_TOWER = VisionFamily(
    151_343,
    151_344,
    sections=(8, 12, 12),
    takes_turns=False,
    activations=("silu",),
    gated=True,
    norms=Norms("root", eps=1e-5, first=True, last=True),
    layer_bias=False,
    positions="cubic",
    merger=MergerFamily("gated"),
    pixels=_CLIP_PIXELS,
    keys={"layer_norm_eps": "rms_norm_eps"},
    ffn_key="out_hidden_size",
    defaults={
        "depth": 24,
        "num_heads": 12,
        "hidden_size": 1536,
        "intermediate_size": 13_696,
        "out_hidden_size": 4096,
        "patch_size": 14,
        "image_size": 336,
    },
)

GLM4V_MOE_TOWER = replace(GLM4V_TOWER, image_token_id=151_363, video_token_id=151_364)

GLM_OCR_TOWER = replace(
    GLM4V_TOWER,
    image_token_id=59_280,
    video_token_id=59_281,
    norms=Norms("root", eps=1e-5, last=True, heads="each"),
    layer_bias=True,
    layer_bias_key="attention_bias",
    positions="none",
    ffn_key="intermediate_size",
    merger=MergerFamily("gated", ffn_key=None),
    defaults={
        "depth": 24,
        "num_heads": 16,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "out_hidden_size": 1536,
        "patch_size": 14,
    },
)

# Mistral 3's (arXiv 2410.07073).
PIXTRAL = VisionFamily(
    10,
    activations=("gelu", "silu"),
    gated=True,
    norms=Norms("root", eps=1e-5, first=True),
    patch_bias=False,
    layer_bias=False,
    alternates=True,
    positions="none",
    merger=MergerFamily("projected"),
    has_lines=True,
    frames=1,
    pixels=_CLIP_PIXELS,
    required_beside={"projector_hidden_act": "gelu", "vision_feature_layer": -1},
    keys=_USUAL_KEYS,
    defaults={"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096, "patch_size": 14},
)

# Pixtral 12B's own form, in which patches are not merged.
PIXTRAL_IN_LLAVA = replace(
    PIXTRAL,
    image_token_id=32_000,
    merger=MergerFamily("plain"),
    feature_layer=-2,
    required_beside={"projector_hidden_act": "gelu", "vision_feature_select_strategy": "full"},
    defaults_beside={"vision_feature_select_strategy": "default"},
    defaults={**PIXTRAL.defaults, "patch_size": 16},
)

LIGHT_ON_OCR_TOWER = replace(PIXTRAL, image_token_id=151_655, has_lines=False, required_beside={})

# Idefics 3's and SmolVLM's: SigLIP's, too.
IDEFICS3_TOWER = VisionFamily(
    128_257,
    norms=Norms(last=True),
    merger=MergerFamily("product"),
    turns=False,
    frames=1,
    keys={**_USUAL_KEYS, "spatial_merge_size": "scale_factor"},
    defaults={
        "num_hidden_layers": 12,
        "hidden_size": 1152,
        "intermediate_size": 3072,
        "patch_size": 32,
        "image_size": 224,
    },
)

# LLaVA 1.5's (arXiv 2103.00020): its class token is left out of what the model reads.
CLIP = VisionFamily(
    32_000,
    activations=("quick_gelu", "gelu"),
    class_token=True,
    patch_bias=False,
    norms=Norms(eps=1e-5, first=True, first_last=True),
    merger=MergerFamily("plain"),
    feature_layer=-2,
    turns=False,
    frames=1,
    pixels=_CLIP_PIXELS,
    required_beside={"projector_hidden_act": "gelu", "vision_feature_select_strategy": "default"},
    keys=_USUAL_KEYS,
    defaults={
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "patch_size": 32,
        "image_size": 224,
    },
)

# Gemma 3's (arXiv 2303.15343).
SIGLIP = VisionFamily(
    262_144,
    norms=Norms(last=True),
    merger=MergerFamily("pooled"),
    turns=False,
    ahead="everywhere",
    frames=1,
    keys=_USUAL_KEYS,
    defaults={
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "patch_size": 16,
        "image_size": 224,
    },
)

# Aya Vision's: SigLIP's without its last norm.
AYA_TOWER = replace(
    SIGLIP,
    image_token_id=255_036,
    norms=Norms(),
    merger=MergerFamily("halved", ffn_beside="alignment_intermediate_size"),
    feature_layer=-1,
    ahead="nowhere",
    pixels=_CLIP_PIXELS,
    required_beside={"vision_feature_select_strategy": "full"},
    keys={**SIGLIP.keys, "spatial_merge_size": "downsample_factor"},
)

# Command A Vision's.
COHERE2_VISION_TOWER = replace(
    AYA_TOWER,
    norms=Norms(last=True),
    feature_layer=None,
    merger=replace(AYA_TOWER.merger, norm=False),
    required_beside={},
    defaults_beside={"alignment_intermediate_size": 36_864},
    defaults={**AYA_TOWER.defaults, "hidden_size": 1152, "image_size": 512, "num_hidden_layers": 27},
)

# LFM2-VL's, SigLIP 2's (arXiv 2502.14786) for pictures of any size.
LFM2_VL_TOWER = VisionFamily(
    396,
    norms=Norms(last=True),
    positions="blurred",
    merger=MergerFamily("square", norm_key="projector_use_layernorm", ffn_beside="projector_hidden_size"),
    turns=False,
    frames=1,
    required_beside={"projector_hidden_act": "gelu", "projector_bias": True},
    defaults_beside={"projector_hidden_size": 2560},
    keys={
        **_USUAL_KEYS,
        "spatial_merge_size": "downsample_factor",
        "num_position_embeddings": "num_patches",
    },
    defaults={
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "patch_size": 16,
        "num_patches": 256,
    },
)

# LLaVA-NeXT's and LLaVA-OneVision's, CLIP's and SigLIP's: a picture's tiles are joined.
LLAVA_NEXT_TOWER = replace(
    CLIP,
    joins_tiles=True,
    required_beside={**CLIP.required_beside, "use_image_newline_parameter": True},
    defaults={**CLIP.defaults, "image_size": 336},
)
LLAVA_ONEVISION_TOWER = replace(
    SIGLIP,
    image_token_id=151_646,
    norms=Norms(),
    merger=MergerFamily("plain"),
    feature_layer=-1,
    ahead="nowhere",
    joins_tiles=True,
    pixels=_CLIP_PIXELS,
    required_beside={
        "projector_hidden_act": "gelu",
        "vision_feature_select_strategy": "full",
        "use_image_newline_parameter": True,
    },
    defaults_beside={"vision_feature_select_strategy": "full"},
)

# PaddleOCR-VL's: SigLIP's, whose patches turn, too.
PADDLE_OCR_TOWER = VisionFamily(
    100_295,
    sections=(16, 24, 24),
    takes_turns=False,
    norms=Norms(last=True),
    positions="edges",
    merger=MergerFamily(out_size_told=False, eps=1e-5),
    frames=1,
    frames_told=False,
    pixels=_CLIP_PIXELS,
    keys=_USUAL_KEYS,
    defaults={
        "num_hidden_layers": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "patch_size": 14,
        "image_size": 384,
    },
)

GEMMA4_TOWER = VisionFamily(
    258_880,
    258_884,
    gated=True,
    norms=Norms("root", sandwich=True, heads="each", values=True),
    patch_bias=False,
    layer_bias=False,
    attention_scale=1.0,
    positions="axes",
    merger=MergerFamily("scaled"),
    ahead="in windows",
    ahead_key="use_bidirectional_attention",
    frames=1,
    own_pixels=True,
    keys={
        "depth": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "spatial_merge_size": "pooling_kernel_size",
        "layer_norm_eps": "rms_norm_eps",
        "hidden_act": "hidden_activation",
    },
    defaults={
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "position_embedding_size": 10_240,
        "rope_theta": 100.0,
    },
)

# Gemma 4 12B's, which has no layers.
GEMMA4_UNIFIED_TOWER = VisionFamily(
    258_880,
    258_884,
    norms=Norms(eps=1e-5, first=True, last=True),
    positions="axes",
    merger=MergerFamily("normed"),
    turns=False,
    ahead="everywhere",
    ahead_key="use_bidirectional_attention",
    ahead_told="vision",
    encoder_free=True,
    frames=1,
    pixels=Pixels((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    own_pixels=True,
    keys={
        "hidden_size": "mm_embed_dim",
        "spatial_merge_size": "pooling_kernel_size",
        "position_embedding_size": "mm_posemb_size",
    },
    defaults={"mm_embed_dim": 3840, "mm_posemb_size": 1120, "patch_size": 16, "pooling_kernel_size": 3},
)

INTERNVL_TOWER = VisionFamily(
    151_667,
    activations=("gelu",),
    class_token=True,
    layer_scales=True,
    norm_key="norm_type",
    joint_norms_key="use_qk_norm",
    qkv_bias_key="attention_bias",
    merger=MergerFamily("square"),
    turns=False,
    frames=1,
    pixels=_CLIP_PIXELS,
    required={"use_absolute_position_embeddings": True, "use_mean_pooling": True, "use_mask_token": False},
    required_beside={
        "downsample_ratio": 0.5,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    },
    keys=_USUAL_KEYS,
    defaults={
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "patch_size": 14,
        "image_size": 448,
    },
)
