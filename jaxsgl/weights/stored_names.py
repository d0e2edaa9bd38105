"""What files call the tensors that recipes name: folders of other times and tools, and decoders next to a vision tower.

Owns where the decoder lies within a name, and other spellings of names. Never knows which parameter a tensor fills, and
opens no file. Called by `tensor_files.py` for all names of a folder, and by those that make recipes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from jaxsgl.models import ModelArch
from jaxsgl.models.families.hearing import HEARING
from jaxsgl.models.families.internvl import INTERNVL
from jaxsgl.models.families.llava import LLAVA, LLAVA_NEXT, LLAVA_ONEVISION
from jaxsgl.weights.encoder_names import as_a_decoders

# Where the decoder is within "model.", beside a tower; the output head is outside. With the names of the other parts.
_HEARS = "model.audio_tower."
_QWEN_TOWER = ("model.visual.",)
_PROJECTED_TOWER = ("model.vision_tower.", "model.multi_modal_projector.")
_BESIDE_TOWER = {
    **dict.fromkeys(HEARING, (_HEARS, "model.multi_modal_projector.")),
    "Qwen2VLForConditionalGeneration": _QWEN_TOWER,
    "Qwen2_5_VLForConditionalGeneration": _QWEN_TOWER,
    "Qwen3VLForConditionalGeneration": _QWEN_TOWER,
    "Qwen3VLMoeForConditionalGeneration": _QWEN_TOWER,
    "Qwen3_5ForConditionalGeneration": _QWEN_TOWER,
    "Qwen3_5MoeForConditionalGeneration": _QWEN_TOWER,
    "Glm4vForConditionalGeneration": _QWEN_TOWER,
    "Glm4vMoeForConditionalGeneration": _QWEN_TOWER,
    "GlmOcrForConditionalGeneration": _QWEN_TOWER,
    "Exaone4_5_ForConditionalGeneration": _QWEN_TOWER,
    "Kimi_K25ForConditionalGeneration": ("model.vision_tower.", "model.mm_projector."),
    "AyaVisionForConditionalGeneration": _PROJECTED_TOWER,
    "Cohere2VisionForConditionalGeneration": _PROJECTED_TOWER,
    "Lfm2VlForConditionalGeneration": _PROJECTED_TOWER,
    "Gemma3ForConditionalGeneration": _PROJECTED_TOWER,
    **dict.fromkeys(
        (f"{name}ForConditionalGeneration" for name in ("Mistral3", "Ministral3", "Mistral4")), _PROJECTED_TOWER
    ),
    **dict.fromkeys((*INTERNVL, *LLAVA), _PROJECTED_TOWER),
    **dict.fromkeys((*LLAVA_NEXT, *LLAVA_ONEVISION), (*_PROJECTED_TOWER, "model.image_newline")),
    **dict.fromkeys(
        ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
        ("model.vision_model.", "model.connector."),
    ),
    "PaddleOCRVLForConditionalGeneration": ("model.visual.", "model.projector."),
    "LightOnOcrForConditionalGeneration": ("model.vision_encoder.", "model.vision_projection."),
    **dict.fromkeys(
        ("Gemma3nForConditionalGeneration", "Gemma4ForConditionalGeneration"),
        ("model.vision_tower.", "model.embed_vision."),
    ),
    "Gemma4UnifiedForConditionalGeneration": ("model.vision_embedder.", "model.embed_vision."),
    "Llama4ForConditionalGeneration": ("model.vision_model.", "model.multi_modal_projector."),
}
_NEVER_SERVED = (_HEARS, "model.embed_audio.")  # where the tower is one that sees
_WITHIN = "model.language_model."
# How names begin in files where the decoder is a model of its own, beside the tower, and how recipes have them.
_OF_OWN_MODEL = {
    "language_model.model.": _WITHIN,
    "language_model.lm_head.": "lm_head.",
    "audio_tower.": _HEARS,
    "vision_tower.": "model.vision_tower.",
    "vision_model.": "model.vision_model.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "mm_projector.": "model.mm_projector.",
    "image_newline": "model.image_newline",
}

# Of a draft head: what recipes have within the layer after the last one, and the files' names.
_DRAFT_HEAD = {
    "enorm.": "mtp.pre_fc_norm_embedding.",
    "hnorm.": "mtp.pre_fc_norm_hidden.",
    "eh_proj.": "mtp.fc.",
    "shared_head.norm.": "mtp.norm.",
}

# Decoders that call their parts otherwise: what names may begin with, the table that shows the form, and how recipes
# have what they begin with then.
_OTHER_WORDS = (
    (
        ("gpt_neox.", ""),
        "embed_in.weight",
        {
            "embed_in.": "model.embed_tokens.",
            "layers.": "model.layers.",
            "final_layer_norm.": "model.norm.",
            "embed_out.": "lm_head.",
        },
    ),
    (
        ("transformer.", ""),
        "wte.weight",
        {
            "wte.": "model.embed_tokens.",
            "wpe.": "model.embed_positions.",
            "h.": "model.layers.",
            "ln_f.": "model.norm.",
        },
    ),
    (
        ("transformer.", ""),
        "word_embeddings.weight",
        {"word_embeddings.": "model.embed_tokens.", "h.": "model.layers.", "ln_f.": "model.norm."},
    ),
    (
        ("model.decoder.", "decoder."),
        "embed_positions.weight",
        {"embed_": "model.embed_", "layers.": "model.layers.", "final_layer_norm.": "model.norm."},
    ),
)

# DeepSeek V4's words within a layer and beside layers, in order: patterns, and how recipes have them.
_DEEPSEEK_V4 = (
    (r"(?<!_hc)\.scale$", ".weight_scale_inv"),  # of blocks; those of connections stay
    (r"^(?=(layers|norm|embed|hc_head)[._])", "model."),
    (r"^model\.embed\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^model\.hc_head_", "model.hc_head.hc_"),
    (r"\.hc_(attn|ffn)_", r".\1_hc."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.self_attn\.indexer\.", ".self_attn.compressor.indexer."),
    (r"\.indexer\.weights_proj\.", ".indexer.scorer.weights_proj."),
    (r"(self_attn|compressor|indexer)\.norm\.", r"\1.kv_norm."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.ape$", ".position_bias"),
    (r"\.w([qo])_([ab])\.", r".\1_\2_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
)
# EXAONE 3's, and Ling's and Sarvam's.
_EXAONE = (
    (r"^transformer\.wte\.", "model.embed_tokens."),
    (r"^transformer\.h\.", "model.layers."),
    (r"^transformer\.ln_f\.", "model.norm."),
    (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
    (r"\.attn\.attention\.", ".self_attn."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
    (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
)
_BAILING = (
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.attention\.dense\.", ".self_attn.o_proj."),
    (r"\.attention\.query_layernorm\.", ".self_attn.q_norm."),
    (r"\.attention\.key_layernorm\.", ".self_attn.k_norm."),
    (r"\.gate\.expert_bias$", ".gate.e_score_correction_bias"),
    (r"^(model\.layers\.\d+)\.final_layernorm\.", r"\1.shared_head.norm."),  # of a draft head
)
# By a part of names that shows them.
_WORDS_BY_PATTERNS = {
    ".attn.wq_a.": _DEEPSEEK_V4,
    ".mlp.c_fc_0.": _EXAONE,
    "model.word_embeddings.": _BAILING,
}
# Of adapters, whose names alone may show nothing.
_WORDS_OF_ADAPTERS = {
    "ExaoneForCausalLM": _EXAONE,
    **dict.fromkeys(("BailingMoeV2ForCausalLM", "SarvamMoEForCausalLM"), _BAILING),
}

_HEADS = ("lm_head.", "score.")
_OF_LAYER = re.compile(r"model\.layers\.\d+\.")
_HALF = re.compile(r"model\.layers\.(\d+)\.(self_attn|mlps|input_layernorm|post_attention_layernorm)\.([01])\.")
_OF_FIRST_HALF = re.compile(r"model\.layers\.(\d+)\.mlp\.")
_LISTED = re.compile(r"(\.experts)\.(gate_proj|up_proj|down_proj)\.(\d+)\.")
_STACKED = re.compile(r"(\.experts\.(?:gate_up|down)_proj)\.(\w+)")

# Parts of names, and how recipes have them.
_OTHER_SPELLINGS = {
    "model.text_model.": _WITHIN,  # as Idefics 3 calls the decoder
    "vision_tower.vision_model.": "vision_tower.",  # which is a model of its own in older folders
    ".self_attn.g_proj.": ".self_attn.gate_proj.",  # of LFM3 in transformers' memory, and of Laguna
    ".mlp.post_mlp_layernorm.": ".post_mlp_layernorm.",  # of A.X-K1 there
    ".attention_sink_bias": ".sinks",  # of MiMo
    ".attention_layer_norm.": ".input_layernorm.",  # of OLMo's layers with states
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
    # Of Kimi Linear's layers without experts, as transformers writes them.
    **{f".block_sparse_moe.{part}_proj.": f".mlp.{part}_proj." for part in ("gate", "up", "down")},
    ".ln_attn.": ".input_layernorm.",  # where Falcon has a second norm
    ".ln_mlp.": ".post_attention_layernorm.",
}


def as_in_recipes(names: Iterable[str]) -> dict[str, str]:
    """The files' names by those that recipes have: decoders saved without a head lack the first part, for which
    Nemotron-H has another word, LongCat-Flash has two layers in one, GPT-2, GPT-NeoX and OPT have words of their own,
    older folders of decoders with a tower have the parts in another order, ModelOpt lists Qwen3-VL's experts by what
    they are, a stack of experts may be called as a module is, and parts of layers have `_OTHER_SPELLINGS`.
    """
    by_names = {_in_one_spelling(name): name for name in names}
    return {recipes: by_names[name] for recipes, name in _of_decoder(list(by_names)).items()}


def _in_one_spelling(name: str) -> str:
    name = _STACKED.sub(_of_stack, _LISTED.sub(r"\1.\3.\2.", name))
    for theirs, recipes in _OTHER_SPELLINGS.items():
        name = name.replace(theirs, recipes)
    return name


def _of_stack(name: re.Match[str]) -> str:
    return name[1] if name[2] == "weight" else f"{name[1]}_{name[2]}"


def _in_words_of_recipes(name: str, start: str, words: Mapping[str, str]) -> str:
    part = name.removeprefix(start)
    theirs = next((each for each in words if part.startswith(each)), None)
    return name if theirs is None else words[theirs] + part.removeprefix(theirs)


def _of_half(name: str) -> str:
    """A name where what stands twice in a layer, or in its first half, is of a layer by itself."""
    half, of_experts = _HALF.match(name), _OF_FIRST_HALF.match(name)
    if half is not None:
        layer, part, which = 2 * int(half[1]) + int(half[3]), half[2].replace("mlps", "mlp"), name[half.end() :]
        return f"model.layers.{layer}.{part}.{which}"
    if of_experts is not None:
        return f"model.layers.{2 * int(of_experts[1])}.moe.{name[of_experts.end() :]}"
    return name


def _by_patterns(name: str, words: Iterable[tuple[str, str]]) -> str:
    if not name.startswith("mtp."):
        for pattern, recipes in words:
            name = re.sub(pattern, recipes, name)
    return name


def adapters_name(name: str, arch: ModelArch) -> str:
    """What recipes call the part of the decoder `arch` that a tensor of an adapter changes."""
    return _by_patterns(name, _WORDS_OF_ADAPTERS.get(arch.name, ()))


def _of_decoder(stored: list[str]) -> dict[str, str]:
    if (of_encoder := as_a_decoders(stored)) is not None:
        return of_encoder
    if any(name.startswith("model.layers.0.mlps.0.") for name in stored):
        return {_of_half(name): name for name in stored}
    for part, patterns in _WORDS_BY_PATTERNS.items():
        if any(part in name for name in stored):
            return {_by_patterns(name, patterns): name for name in stored}
    for starts, table, words in _OTHER_WORDS:
        start = next((each for each in starts if each + table in stored), None)
        if start is not None:
            return {_in_words_of_recipes(name, start, words): name for name in stored}
    if not {"embed_tokens.weight", "embeddings.weight"}.isdisjoint(stored):
        return {name if name.startswith(_HEADS) else f"model.{name}": name for name in stored}
    if "backbone.embeddings.weight" in stored:
        return {re.sub(r"^backbone\.", "model.", name): name for name in stored}
    if any(name.startswith("visual.") for name in stored):
        within = {"visual.": "model.visual.", "mlp_AR.": "model.projector.", "model.": _WITHIN}
        return {re.sub(r"^(visual|mlp_AR|model)\.", lambda start: within[start[0]], name): name for name in stored}
    if "language_model.model.embed_tokens.weight" not in stored:
        return dict(zip(stored, stored, strict=True))

    def renamed(name: str) -> str:
        start = next((each for each in _OF_OWN_MODEL if name.startswith(each)), "")
        return _OF_OWN_MODEL.get(start, "") + name.removeprefix(start)

    return {renamed(name): name for name in stored}


def stored_name(name: str, arch: ModelArch) -> str:
    """What recipes call a tensor of the decoder, which is `name` where the model is nothing but a decoder."""
    if arch.stage.is_draft_head and (of_next := _OF_LAYER.match(name)):
        part = name[of_next.end() :]
        start = next((each for each in _DRAFT_HEAD if part.startswith(each)), "")
        return _DRAFT_HEAD.get(start, "mtp.layers.0.") + part.removeprefix(start)
    is_within = arch.name in _BESIDE_TOWER and name.startswith("model.")
    return _WITHIN + name.removeprefix("model.") if is_within else name


def own_name(name: str, arch: ModelArch) -> str | None:
    """The inverse of `stored_name`; None for a tensor of a part of the model that is not served."""
    if arch.name not in _BESIDE_TOWER:
        return name
    if name.startswith(_BESIDE_TOWER[arch.name]):
        return name if arch.tower is not None and arch.tower.has_tower else None
    if name.startswith(_NEVER_SERVED):
        return None
    return "model." + name.removeprefix(_WITHIN) if name.startswith(_WITHIN) else name
