"""What checkpoints call the tensors of towers, and how these fill the parameters of `models/towers/tower.py`.

Owns these tables, one for each form of tower, by the names that recipes have (`stored_names.py`). Never knows files.
`quantized.py`, through which the loader reads all tables, asks here for a parameter's recipe.
"""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

from jaxsgl.models import ModelArch
from jaxsgl.models.families.internvl import INTERNVL
from jaxsgl.models.families.llava import LLAVA_NEXT, LLAVA_ONEVISION, WITH_CLIP, WITH_PIXTRAL
from jaxsgl.weights import pieces
from jaxsgl.weights.recipe import Path, Pieces, Recipe, Source


class _Of(NamedTuple):
    """What makes a parameter, or each row of one that is stacked.

    Attributes:
      names: of tensors, without ".weight" and ".bias"; `{}` stands for a layer's number, or a deepstack merger's.
      axes: of each one's weights, as names of `sizes`; of a bias the first.
      pieces: how the weights fill the row.
      ending: of the names of weights.
    """

    names: tuple[str, ...]
    axes: tuple[str, ...]
    pieces: Pieces = pieces.as_is
    ending: str = ".weight"


_VISUAL, _BLOCK, _TAP = "model.visual.", "model.visual.blocks.{}.", "model.visual.deepstack_merger_list.{}."
_QWEN3_VL: dict[str, _Of] = {
    "patches": _Of((_VISUAL + "patch_embed.proj",), ("VM", "VI", "VT", "VP", "VP"), pieces.flat_patches),
    "positions": _Of((_VISUAL + "pos_embed",), ("VG", "VM")),
    "qkv": _Of((_BLOCK + "attn.qkv",), ("V3M", "VM")),
    "o": _Of((_BLOCK + "attn.proj",), ("VM", "VM")),
    "fc1": _Of((_BLOCK + "mlp.linear_fc1",), ("VF", "VM")),
    "fc2": _Of((_BLOCK + "mlp.linear_fc2",), ("VM", "VF")),
    "norm1": _Of((_BLOCK + "norm1",), ("VM",)),
    "norm2": _Of((_BLOCK + "norm2",), ("VM",)),
    "merger.norm": _Of((_VISUAL + "merger.norm",), ("VM",)),
    "merger.fc1": _Of((_VISUAL + "merger.linear_fc1",), ("VW", "VW")),
    "merger.fc2": _Of((_VISUAL + "merger.linear_fc2",), ("D", "VW")),
    "deepstack.norm": _Of((_TAP + "norm",), ("VW",)),
    "deepstack.fc1": _Of((_TAP + "linear_fc1",), ("VW", "VW")),
    "deepstack.fc2": _Of((_TAP + "linear_fc2",), ("D", "VW")),
}
_QWEN2_VL = _QWEN3_VL | {
    "fc1": _Of((_BLOCK + "mlp.fc1",), ("VF", "VM")),
    "fc2": _Of((_BLOCK + "mlp.fc2",), ("VM", "VF")),
    "merger.norm": _Of((_VISUAL + "merger.ln_q",), ("VM",)),
    "merger.fc1": _Of((_VISUAL + "merger.mlp.0",), ("VW", "VW")),
    "merger.fc2": _Of((_VISUAL + "merger.mlp.2",), ("D", "VW")),
}
_QWEN2_5_VL = _QWEN2_VL | {
    "gate": _Of((_BLOCK + "mlp.gate_proj",), ("VF", "VM")),
    "fc1": _Of((_BLOCK + "mlp.up_proj",), ("VF", "VM")),
    "fc2": _Of((_BLOCK + "mlp.down_proj",), ("VM", "VF")),
}

_GLM4V = _QWEN2_5_VL | {
    "norm0": _Of((_VISUAL + "post_conv_layernorm",), ("VM",)),
    "norm3": _Of((_VISUAL + "post_layernorm",), ("VM",)),
    "positions": _Of((_VISUAL + "embeddings.position_embedding",), ("VG", "VM")),
    "merger.merge": _Of((_VISUAL + "downsample",), ("D", "VM", "VS", "VS"), pieces.convolved_squares),
    "merger.mix": _Of((_VISUAL + "merger.proj",), ("D", "D")),
    "merger.norm": _Of((_VISUAL + "merger.post_projection_norm",), ("D",)),
    "merger.gate": _Of((_VISUAL + "merger.gate_proj",), ("VU", "D")),
    "merger.fc1": _Of((_VISUAL + "merger.up_proj",), ("VU", "D")),
    "merger.fc2": _Of((_VISUAL + "merger.down_proj",), ("D", "VU")),
}

_GLM_OCR = _GLM4V | {f"{part}_norm": _Of((f"{_BLOCK}attn.{part}_norm",), ("VH",)) for part in "qk"}

_TOWER, _LAYER = "model.vision_tower.", "model.vision_tower.transformer.layers.{}."
_PROJECTOR = "model.multi_modal_projector."
_MISTRAL3: dict[str, _Of] = {
    "patches": _Of((_TOWER + "patch_conv",), ("VM", "VI", "VP", "VP"), pieces.flat_patches),
    "norm0": _Of((_TOWER + "ln_pre",), ("VM",)),
    "qkv": _Of(tuple(f"{_LAYER}attention.{part}_proj" for part in "qkv"), ("VM", "VM"), pieces.in_rows),
    "o": _Of((_LAYER + "attention.o_proj",), ("VM", "VM")),
    "gate": _Of((_LAYER + "feed_forward.gate_proj",), ("VF", "VM")),
    "fc1": _Of((_LAYER + "feed_forward.up_proj",), ("VF", "VM")),
    "fc2": _Of((_LAYER + "feed_forward.down_proj",), ("VM", "VF")),
    "norm1": _Of((_LAYER + "attention_norm",), ("VM",)),
    "norm2": _Of((_LAYER + "ffn_norm",), ("VM",)),
    "merger.norm": _Of((_PROJECTOR + "norm",), ("VM",)),
    "merger.merge": _Of((_PROJECTOR + "patch_merger.merging_layer",), ("VM", "VW"), pieces.squares_by_patch),
    "merger.fc1": _Of((_PROJECTOR + "linear_1",), ("D", "VM")),
    "merger.fc2": _Of((_PROJECTOR + "linear_2",), ("D", "D")),
}
_LIGHT_ON_OCR = {
    parameter: of._replace(
        names=tuple(
            name.replace(_TOWER, "model.vision_encoder.").replace(_PROJECTOR, "model.vision_projection.")
            for name in of.names
        )
    )
    for parameter, of in _MISTRAL3.items()
}
_SIGLIP, _ENCODER_LAYER = _TOWER, _TOWER + "encoder.layers.{}."
_GEMMA3: dict[str, _Of] = {
    "patches": _Of((_SIGLIP + "embeddings.patch_embedding",), ("VM", "VI", "VP", "VP"), pieces.flat_patches),
    "positions": _Of((_SIGLIP + "embeddings.position_embedding",), ("VG", "VM")),
    "qkv": _Of(tuple(f"{_ENCODER_LAYER}self_attn.{part}_proj" for part in "qkv"), ("VM", "VM"), pieces.in_rows),
    "o": _Of((_ENCODER_LAYER + "self_attn.out_proj",), ("VM", "VM")),
    "fc1": _Of((_ENCODER_LAYER + "mlp.fc1",), ("VF", "VM")),
    "fc2": _Of((_ENCODER_LAYER + "mlp.fc2",), ("VM", "VF")),
    "norm1": _Of((_ENCODER_LAYER + "layer_norm1",), ("VM",)),
    "norm2": _Of((_ENCODER_LAYER + "layer_norm2",), ("VM",)),
    "norm3": _Of((_SIGLIP + "post_layernorm",), ("VM",)),
    "merger.norm": _Of((_PROJECTOR + "mm_soft_emb_norm",), ("VM",), pieces.norm),
    "merger.fc1": _Of((_PROJECTOR + "mm_input_projection_weight",), ("VM", "D"), pieces.transposed, ending=""),
}
_CLIP = _GEMMA3 | {
    "positions": _Of((_SIGLIP + "embeddings.position_embedding",), ("V1G", "VM"), pieces.all_but_first),
    "class_token": _Of((_SIGLIP + "embeddings.class_embedding",), ("VM",), ending=""),
    "class_place": _Of((_SIGLIP + "embeddings.position_embedding",), ("V1G", "VM"), pieces.first_row),
    "norm0": _Of((_SIGLIP + "pre_layrnorm",), ("VM",)),
    "merger.fc1": _Of((_PROJECTOR + "linear_1",), ("D", "VM")),
    "merger.fc2": _Of((_PROJECTOR + "linear_2",), ("D", "D")),
}
_LINE_END = {"line_end": _Of(("model.image_newline",), ("D",), ending="")}
_ONEVISION = _GEMMA3 | {part: _CLIP[part] for part in ("merger.fc1", "merger.fc2")} | _LINE_END
_AYA = _GEMMA3 | {
    "merger.norm": _Of((_PROJECTOR + "layernorm",), ("VW",)),
    "merger.fc1": _Of((_PROJECTOR + "linear_1",), ("VU", "VW")),
    "merger.fc2": _Of((_PROJECTOR + "linear_2",), ("D", "VUH")),
}
_LFM2_VL = _GEMMA3 | {
    "patches": _Of((_SIGLIP + "embeddings.patch_embedding",), ("VM", "VC"), pieces.patches_by_pixel),
    "merger.norm": _Of((_PROJECTOR + "layer_norm",), ("VW",)),
    "merger.fc1": _Of((_PROJECTOR + "linear_1",), ("VU", "VW")),
    "merger.fc2": _Of((_PROJECTOR + "linear_2",), ("D", "VU")),
}
_IDEFICS3 = {
    parameter: of._replace(names=tuple(name.replace(_SIGLIP, "model.vision_model.") for name in of.names))
    for parameter, of in _GEMMA3.items()
} | {"merger.fc1": _Of(("model.connector.modality_projection.proj",), ("D", "VW"))}
_PADDLE = "model.projector."
_PADDLE_OCR = {
    **{
        parameter: of._replace(names=tuple(name.replace(_SIGLIP, _VISUAL + "vision_model.") for name in of.names))
        for parameter, of in _GEMMA3.items()
    },
    "merger.norm": _Of((_PADDLE + "pre_norm",), ("VM",)),
    "merger.fc1": _Of((_PADDLE + "linear_1",), ("VW", "VW")),
    "merger.fc2": _Of((_PADDLE + "linear_2",), ("D", "VW")),
}

_EMBED, _OF_HEADS, _OF_MLP = _TOWER + "patch_embedder.", _ENCODER_LAYER + "self_attn.", _ENCODER_LAYER + "mlp."
_BOUNDED = (
    *(f"{_OF_HEADS}{part}_proj" for part in "qkvo"),
    *(f"{_OF_MLP}{part}_proj" for part in ("gate", "up", "down")),
)
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
_GEMMA4: dict[str, _Of] = {
    "patches": _Of((_EMBED + "input_proj",), ("VM", "VC"), pieces.patches_by_pixel),
    "positions": _Of((_EMBED + "position_embedding_table",), ("V2", "VA", "VM"), pieces.one_table, ending=""),
    "qkv": _Of(tuple(f"{_OF_HEADS}{part}_proj.linear" for part in "qkv"), ("VM", "VM"), pieces.axial_heads),
    "q_norm": _Of((_OF_HEADS + "q_norm",), ("VH",), pieces.axial_norm),
    "k_norm": _Of((_OF_HEADS + "k_norm",), ("VH",), pieces.axial_norm),
    "o": _Of((_OF_HEADS + "o_proj.linear",), ("VM", "VM")),
    "gate": _Of((_OF_MLP + "gate_proj.linear",), ("VF", "VM")),
    "fc1": _Of((_OF_MLP + "up_proj.linear",), ("VF", "VM")),
    "fc2": _Of((_OF_MLP + "down_proj.linear",), ("VM", "VF")),
    "bounds": _Of(tuple(f"{name}.{bound}" for name in _BOUNDED for bound in _BOUNDS), (), pieces.numbers_in_fours, ""),
    "norm1": _Of((_ENCODER_LAYER + "input_layernorm",), ("VM",)),
    "norm1_out": _Of((_ENCODER_LAYER + "post_attention_layernorm",), ("VM",)),
    "norm2": _Of((_ENCODER_LAYER + "pre_feedforward_layernorm",), ("VM",)),
    "norm2_out": _Of((_ENCODER_LAYER + "post_feedforward_layernorm",), ("VM",)),
    "merger.shift": _Of((_TOWER + "std_bias",), ("VM",), ending=""),
    "merger.factor": _Of((_TOWER + "std_scale",), ("VM",), ending=""),
    "merger.fc1": _Of(("model.embed_vision.embedding_projection",), ("D", "VM")),
}

_OF_PIXELS = "model.vision_embedder."
_GEMMA4_UNIFIED: dict[str, _Of] = {
    "pixel_norm": _Of((_OF_PIXELS + "patch_ln1",), ("VC",), pieces.pixels_by_channel),
    "patches": _Of((_OF_PIXELS + "patch_dense",), ("VM", "VC"), pieces.patches_by_pixel),
    "norm0": _Of((_OF_PIXELS + "patch_ln2",), ("VM",)),
    "positions": _Of((_OF_PIXELS + "pos_embedding",), ("VA", "V2", "VM"), pieces.table_by_axis, ending=""),
    "norm3": _Of((_OF_PIXELS + "pos_norm",), ("VM",)),
    "merger.fc1": _Of(("model.embed_vision.embedding_projection",), ("D", "VM")),
}

_LISTED = _TOWER + "encoder.layer.{}."
_INTERNVL: dict[str, _Of] = {
    "patches": _Of((_TOWER + "embeddings.patch_embeddings.projection",), ("VM", "VI", "VP", "VP"), pieces.flat_patches),
    "positions": _Of((_TOWER + "embeddings.position_embeddings",), ("V1", "V1G", "VM"), pieces.all_but_first, ""),
    "class_token": _Of((_TOWER + "embeddings.cls_token",), ("V1", "V1", "VM"), pieces.first_row, ""),
    "class_place": _Of((_TOWER + "embeddings.position_embeddings",), ("V1", "V1G", "VM"), pieces.first_row, ""),
    "qkv": _Of(tuple(f"{_LISTED}attention.{part}_proj" for part in "qkv"), ("VM", "VM"), pieces.in_rows),
    "q_norm": _Of((_LISTED + "attention.q_norm",), ("VM",)),
    "k_norm": _Of((_LISTED + "attention.k_norm",), ("VM",)),
    "o": _Of((_LISTED + "attention.projection_layer",), ("VM", "VM")),
    "fc1": _Of((_LISTED + "mlp.fc1",), ("VF", "VM")),
    "fc2": _Of((_LISTED + "mlp.fc2",), ("VM", "VF")),
    "norm1": _Of((_LISTED + "layernorm_before",), ("VM",)),
    "norm2": _Of((_LISTED + "layernorm_after",), ("VM",)),
    "attention_scales": _Of((_LISTED + "lambda_1",), ("VM",), ending=""),
    "mlp_scales": _Of((_LISTED + "lambda_2",), ("VM",), ending=""),
    "merger.norm": _Of((_PROJECTOR + "layer_norm",), ("VW",)),
    "merger.fc1": _Of((_PROJECTOR + "linear_1",), ("D", "VW")),
    "merger.fc2": _Of((_PROJECTOR + "linear_2",), ("D", "D")),
}

_HEARS, _HEARD = "model.audio_tower.", "model.audio_tower.layers.{}."
_WHISPER: dict[str, _Of] = {
    "frames": _Of((_HEARS + "conv1",), ("VM", "VB", "V3"), pieces.convolved_frames),
    "patches": _Of((_HEARS + "conv2",), ("VM", "VM", "V3"), pieces.convolved_frames),
    "positions": _Of((_HEARS + "embed_positions",), ("VG", "VM")),
    "qkv": _Of(tuple(f"{_HEARD}self_attn.{part}_proj" for part in "qkv"), ("VM", "VM"), pieces.in_rows),
    "o": _Of((_HEARD + "self_attn.out_proj",), ("VM", "VM")),
    "fc1": _Of((_HEARD + "fc1",), ("VF", "VM")),
    "fc2": _Of((_HEARD + "fc2",), ("VM", "VF")),
    "norm1": _Of((_HEARD + "self_attn_layer_norm",), ("VM",)),
    "norm2": _Of((_HEARD + "final_layer_norm",), ("VM",)),
}
_QWEN2_AUDIO = _WHISPER | {
    "merger.norm": _Of((_HEARS + "layer_norm",), ("VM",)),
    "merger.fc1": _Of((_PROJECTOR + "linear",), ("D", "VM")),
}
_VOXTRAL = _WHISPER | {
    "norm3": _Of((_HEARS + "layer_norm",), ("VM",)),
    "merger.fc1": _Of((_PROJECTOR + "linear_1",), ("D", "VW")),
    "merger.fc2": _Of((_PROJECTOR + "linear_2",), ("D", "D")),
}
_WITHOUT_BIAS = f"{_HEARD}self_attn.k_proj"  # whose number is zero

# By architecture; others are as Qwen3-VL.
_TOWERS = {
    "AyaVisionForConditionalGeneration": _AYA,
    "Cohere2VisionForConditionalGeneration": _AYA,
    "Exaone4_5_ForConditionalGeneration": _QWEN2_5_VL,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": _GEMMA4_UNIFIED,
    "Glm4vForConditionalGeneration": _GLM4V,
    "Glm4vMoeForConditionalGeneration": _GLM4V,
    "GlmOcrForConditionalGeneration": _GLM_OCR,
    "Qwen2VLForConditionalGeneration": _QWEN2_VL,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2_5_VL,
    **{f"{name}ForConditionalGeneration": _MISTRAL3 for name in ("Mistral3", "Ministral3", "Mistral4")},
    **dict.fromkeys(INTERNVL, _INTERNVL),
    "Lfm2VlForConditionalGeneration": _LFM2_VL,
    "LightOnOcrForConditionalGeneration": _LIGHT_ON_OCR,
    "PaddleOCRVLForConditionalGeneration": _PADDLE_OCR,
    "Idefics3ForConditionalGeneration": _IDEFICS3,
    "SmolVLMForConditionalGeneration": _IDEFICS3,
    **dict.fromkeys(WITH_PIXTRAL, _MISTRAL3),
    **dict.fromkeys(WITH_CLIP, _CLIP),
    **dict.fromkeys(LLAVA_NEXT, _CLIP | _LINE_END),
    **dict.fromkeys(LLAVA_ONEVISION, _ONEVISION),
    "Qwen2AudioForConditionalGeneration": _QWEN2_AUDIO,
    "VoxtralForConditionalGeneration": _VOXTRAL,
}


# A norm of what such models don't read, and a constant.
_UNREAD = ("post_layernorm.weight", "post_layernorm.bias", "embeddings.position_ids")
# PaddleOCR-VL's head, which is SigLIP's, and what older code of it reads.
_UNREAD_PARTS = (
    *(f"{_VISUAL}vision_model.{part}." for part in ("head", "embeddings.packing_position_embedding")),
    f"{_TOWER}head.",  # SigLIP 2's
)
_NUMBERED = re.compile(r"model\.vision_\w+\.(?:encoder|transformer)\.layers\.(\d+)\.")


def is_unread(name: str, arch: ModelArch) -> bool:
    """Whether a tensor is of a part of a tower that the model doesn't read: layers after the last one that counts."""
    tower = arch.tower
    if tower is None or not name.startswith(("model.vision_", _VISUAL)):
        return False
    if name.startswith(_UNREAD_PARTS):
        return True
    of_layer = _NUMBERED.match(name)
    is_behind = of_layer is not None and int(of_layer[1]) >= tower.layers.count
    return is_behind or (not tower.norms.last and name.endswith(_UNREAD))


def recipe_of_tower(path: Path, arch: ModelArch) -> Recipe | None:
    """The recipe of the parameter at `path`; None unless it belongs to a vision tower."""
    if path[0] != "visual":
        return None
    assert arch.tower is not None
    own = ".".join(map(str, path[1:]))
    is_bias = own.endswith("_bias")
    of = _TOWERS.get(arch.name, _QWEN3_VL)[own.removesuffix("_bias")]
    ending, axes, of_row = of.ending, of.axes, of.pieces
    names = of.names
    if is_bias:
        ending, axes = ".bias", of.axes[:1]
        if _WITHOUT_BIAS in names:
            names, of_row = tuple(name for name in names if name != _WITHOUT_BIAS), pieces.around_zeros
        elif of_row is not pieces.pixels_by_channel:
            of_row = pieces.as_is if len(names) == 1 else pieces.in_rows
    if "{}" not in names[0]:
        return Recipe(tuple(Source(name + ending, axes) for name in names), of_row)
    count = len(arch.tower.layers.taps) if own.startswith("deepstack.") else arch.tower.layers.count
    sources = tuple(Source(name.format(index) + ending, axes) for index in range(count) for name in names)
    return Recipe(sources, partial(pieces.stacked_rows, of_row, count))
