"""The tensors of a checkpoint that make no parameter: scales of its KV cache, and those that may be left unread.

All others that are not read fail a load. Owns their names. Never knows what parameters are made of: `names.py` does.
Called by those who read tensors (`tensor_files.py`, `given_tensors.py`) and by `kv_scales.py`.
"""

from __future__ import annotations

import re

from jaxsgl.models import ModelArch
from jaxsgl.weights import stored_matrix
from jaxsgl.weights.names import own_name

# What scales K, V or both of a layer's KV cache in float8, by the end of the tensor's name: compressed-tensors and its
# older form, ModelOpt, Quark. Scales of queries and probabilities belong to attention in float8, which ours is not.
_KV_SCALES = {
    "k_scale": "k", "attn.k_scale": "k", "k_proj.k_scale": "k", "qkv_proj.k_scale": "k", "k_proj.output_scale": "k",
    "v_scale": "v", "attn.v_scale": "v", "v_proj.v_scale": "v", "qkv_proj.v_scale": "v", "v_proj.output_scale": "v",
    "kv_scale": "kv", "attn.kv_scale": "kv",
}  # fmt: skip
_UNUSED_SCALES = ("q_scale", "q_proj.q_scale", "q_proj.output_scale", "prob_scale", "prob_output_scale")
_OF_ATTENTION = re.compile(r"(?:language_model\.model|model\.language_model|model)\.layers\.(\d+)\.self_attn\.(.+)")
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Architectures whose checkpoints have layers behind the last one, which predict further tokens.
_PREDICT_MORE = ("Glm4MoeForCausalLM",)


def kv_scale_of(name: str) -> tuple[int, str] | None:
    """The layer, and "k", "v" or "kv" for both, whose cache a tensor of that name scales; None for any other tensor."""
    match = _OF_ATTENTION.fullmatch(name)
    return None if match is None or match[2] not in _KV_SCALES else (int(match[1]), _KV_SCALES[match[2]])


def is_harmless(name: str, arch: ModelArch) -> bool:
    """Whether a tensor may be left unread: rope's constants, a head that nothing reads, what predicts further tokens,
    scales, and the parts beside the decoder.

    The scales of the KV cache are read by themselves (`kv_scales.py`), if it is float8.
    """
    own = own_name(name, arch)
    if own is None:
        return True
    name = own
    of_attention = _OF_ATTENTION.fullmatch(name)
    if of_attention is not None and (of_attention[2] in _KV_SCALES or of_attention[2].endswith(_UNUSED_SCALES)):
        return True
    if name.startswith("mtp.") or name.endswith("rotary_emb.inv_freq"):
        return True
    behind = _OF_LAYER.match(name) if arch.name in _PREDICT_MORE else None
    if behind is not None and int(behind[1]) >= arch.num_layers:
        return True
    fmt = arch.weight_format
    if fmt is not None and fmt.storage is not None and stored_matrix.is_unused(name, fmt):
        return True
    return (arch.tie_embeddings or arch.head != "vocabulary") and name == "lm_head.weight"
