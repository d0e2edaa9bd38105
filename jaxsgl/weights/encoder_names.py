"""What files of encoders call their tensors, as names of a decoder that normalizes before its blocks.

BERT normalizes the sum after each block, from which the residual stream goes on. That is the norm before the next
block: the embeddings' is the first layer's, and the last layer's the one of the model (`models/encoder.py`). Called by
`stored_names`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_STARTS = ("bert.", "roberta.", "distilbert.", "electra.", "mpnet.", "nomic_bert.", "new.", "gte.", "model.", "")
_TABLES = ("embeddings.word_embeddings.weight", "embeddings.tok_embeddings.weight")
_AFTER_MLP = "norm after the MLP."  # of a layer: the one before the next layer, or the model's
# What names begin with; then what those of layers' parts begin with, of BERT, DistilBERT, NomicBERT, ModernBERT, GTE.
_OF_MODEL = {
    "embeddings.word_embeddings.": "model.embed_tokens.",
    "embeddings.tok_embeddings.": "model.embed_tokens.",
    "embeddings.position_embeddings.": "model.embed_positions.",
    "embeddings.token_type_embeddings.": "model.embed_types.",
    "embeddings.LayerNorm.": "model.layers.0.input_layernorm.",
    "embeddings.norm.": "model.layers.0.input_layernorm.",
    "encoder.relative_attention_bias.": "model.distance_biases.",
    "emb_ln.": "model.layers.0.input_layernorm.",
    "final_norm.": "model.norm.",
    "pooler.dense.": "model.pooler.",
    "classifier.dense.": "model.pooler.",
    "pre_classifier.": "model.pooler.",
    "head.dense.": "model.pooler.",
    "head.norm.": "model.pooler_norm.",
    "classifier.out_proj.": "classifier.",
}
_OF_LAYER = {
    "attention.self.query.": "self_attn.q_proj.",
    "attention.self.key.": "self_attn.k_proj.",
    "attention.self.value.": "self_attn.v_proj.",
    "attention.output.dense.": "self_attn.o_proj.",
    "attention.output.LayerNorm.": "post_attention_layernorm.",
    "intermediate.dense.": "mlp.up_proj.",
    "output.dense.": "mlp.down_proj.",
    "output.LayerNorm.": _AFTER_MLP,
    **{f"attention.attn.{each}.": f"self_attn.{each}_proj." for each in "qkvo"},
    "attention.LayerNorm.": "post_attention_layernorm.",
    "attention.q_lin.": "self_attn.q_proj.",
    "attention.k_lin.": "self_attn.k_proj.",
    "attention.v_lin.": "self_attn.v_proj.",
    "attention.out_lin.": "self_attn.o_proj.",
    "sa_layer_norm.": "post_attention_layernorm.",
    "ffn.lin1.": "mlp.up_proj.",
    "ffn.lin2.": "mlp.down_proj.",
    "output_layer_norm.": _AFTER_MLP,
    "attn.out_proj.": "self_attn.o_proj.",
    "norm1.": "post_attention_layernorm.",
    "norm2.": _AFTER_MLP,
    "mlp.fc11.": "mlp.up_proj.",
    "mlp.fc12.": "mlp.gate_proj.",
    "mlp.fc2.": "mlp.down_proj.",
    "attn_norm.": "input_layernorm.",
    "mlp_norm.": "post_attention_layernorm.",
    "attn.Wqkv.": "self_attn.qkv_proj.",
    "attn.Wo.": "self_attn.o_proj.",
    "mlp.Wi.": "mlp.gate_up_proj.",
    "mlp.Wo.": "mlp.down_proj.",
    "attention.qkv_proj.": "self_attn.qkv_proj.",
    "attention.o_proj.": "self_attn.o_proj.",
    "attn_ln.": "post_attention_layernorm.",
    "mlp_ln.": _AFTER_MLP,
}
_LAYER = re.compile(r"(?:encoder\.|transformer\.)?layers?\.(\d+)\.")
_OLD_ENDS = {".gamma": ".weight", ".beta": ".bias"}  # of norms, in folders of TensorFlow's time
# What names begin with that make no parameter: heads of other tasks, and a buffer of older folders.
UNREAD = (
    "cls.", "lm_head.", "discriminator_predictions.", "generator_predictions.", "generator_lm_head.",
    "embeddings.position_ids", "model.pooler.", "vocab_", "decoder.", "model.pooler_norm.",
)  # fmt: skip


def as_a_decoders(stored: Sequence[str]) -> dict[str, str] | None:
    """The names that recipes have, with the files'; None if these are no encoder's."""
    start = next((each for each in _STARTS for table in _TABLES if each + table in stored), None)
    if start is None:
        return None
    numbers = [int(found[1]) for name in stored if (found := _LAYER.match(name.removeprefix(start)))]
    last = max(numbers, default=-1)
    return {_renamed(name.removeprefix(start), last): name for name in stored}


def _renamed(name: str, last: int) -> str:
    for theirs, ours in _OLD_ENDS.items():
        if name.endswith(theirs):
            name = name.removesuffix(theirs) + ours
    for theirs, ours in _OF_MODEL.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    found = _LAYER.match(name)
    if found is None:
        return name
    layer, part = int(found[1]), name[found.end() :]
    theirs = next((each for each in _OF_LAYER if part.startswith(each)), "")
    ours, rest = _OF_LAYER.get(theirs, ""), part.removeprefix(theirs)
    if ours == _AFTER_MLP:
        return f"model.norm.{rest}" if layer == last else f"model.layers.{layer + 1}.input_layernorm.{rest}"
    return f"model.layers.{layer}.{ours}{rest}"
