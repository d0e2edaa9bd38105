"""Families whose tokens see their whole prompt: they make embeddings and scores, and generate nothing."""

from __future__ import annotations

from dataclasses import replace

from jaxsgl.models.encoder import NUM_BUCKETS
from jaxsgl.models.family import EncoderFamily, Family

_OF_BERT = EncoderFamily("first", restarts="everywhere", has_types=True)
_BERT = Family(
    encoder=_OF_BERT,
    norm_eps_key="layer_norm_eps",
    centred=True,
    norm_bias=True,
    gated=False,
    qkv_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
    turned_layers="none",
    rows_before_positions=0,
    required={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
    defaults={
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "tie_word_embeddings": True,
    },
    ignored=frozenset(
        {
            "directionality",
            "output_past",
            "pooler_fc_size",
            "pooler_num_attention_heads",
            "pooler_num_fc_layers",
            "pooler_size_per_head",
            "pooler_type",
            "summary_activation",
            "summary_first_dropout",
            "summary_last_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        }
    ),
)
# Positions begin after that of the padding token, which is 1 in all published models.
_OF_ROBERTA = replace(_OF_BERT, counts_rows_before=True)
_ROBERTA = replace(_BERT, encoder=_OF_ROBERTA, rows_before_positions=2)
# GTE 1.5, as the code in its folders has it.
_GTE = replace(
    _BERT,
    gated=True,
    mlp_bias=False,
    down_bias=True,
    turned_layers="all",
    rows_before_positions=None,
    required={"position_embedding_type": "rope", "layer_norm_type": "layer_norm", "pack_qkv": True},
    defaults={
        **_BERT.defaults,
        "max_position_embeddings": 2048,
        "type_vocab_size": 1,
        "rope_theta": 10_000.0,
    },
    ignored=frozenset({"unpad_inputs", "use_memory_efficient_attention"}),
)

ENCODERS: dict[str, Family] = {
    "BertModel": _BERT,
    "ElectraModel": replace(
        _BERT,
        encoder=replace(_OF_BERT, classifier="gelu"),
        required={**_BERT.required, "embedding_size": "hidden_size"},
    ),
    "MPNetModel": replace(
        _ROBERTA,
        encoder=replace(_OF_ROBERTA, has_types=False, has_biases=True),
        required={"relative_attention_num_buckets": NUM_BUCKETS},
    ),
    "NewModel": _GTE,
    # The same in transformers.
    "GteModel": replace(_GTE, defaults={**_GTE.defaults, "max_position_embeddings": 8192, "rope_theta": 160_000.0}),
    "RobertaModel": _ROBERTA,
    "CamembertModel": _ROBERTA,
    "XLMRobertaModel": _ROBERTA,
    "DistilBertModel": replace(
        _BERT,
        encoder=EncoderFamily("first", restarts="everywhere", classifier="relu"),
        keys={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
        },
        required={"sinusoidal_pos_embds": False},
        defaults={"layer_norm_eps": 1e-12, "activation": "gelu", "tie_word_embeddings": True},
        ignored=frozenset({"dropout", "qa_dropout", "seq_classif_dropout", "tie_weights_"}),
    ),
    "NomicBertModel": replace(
        _BERT,
        gated=True,
        qkv_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        turned_layers="all",
        rows_before_positions=None,
        # Words of the code in its folders, next to those of transformers.
        keys={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "layer_norm_eps": "layer_norm_epsilon",
            "rope_theta": "rotary_emb_base",
        },
        required={"activation_function": "swiglu", "rotary_emb_fraction": 1.0},
        defaults={
            **_BERT.defaults,
            "hidden_act": "silu",
            "max_position_embeddings": 2048,
            "rope_theta": 1000.0,
        },
        ignored=_BERT.ignored
        | {
            "dense_seq_output",
            "fused_bias_fc",
            "fused_dropout_add_ln",
            "max_trained_positions",
            "n_positions",
            "pad_vocab_size_multiple",
            "scale_attn_weights",
            "use_xentropy",
        },
    ),
    "ModernBertModel": Family(
        encoder=EncoderFamily("first", restarts="first", classifier="normed gelu", pooling_key="classifier_pooling"),
        norm_eps_key="norm_eps",
        centred=True,
        mlp_bias=False,
        activation_key="hidden_activation",
        windows="always",
        full_every=3,
        full_first=True,
        sliding_theta="local_rope_theta",
        keys={"sliding_window": "local_attention", "rope_theta": "global_rope_theta"},
        required={
            "attention_bias": False,
            "mlp_bias": False,
            "norm_bias": False,
            "classifier_bias": False,
            "classifier_activation": "gelu",
            "position_embedding_type": "absolute",  # of its configuration's base; layers have ropes
        },
        defaults={
            "norm_eps": 1e-5,
            "hidden_activation": "gelu",
            "local_attention": 128,
            "local_rope_theta": 10_000.0,
            "global_rope_theta": 160_000.0,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
        ignored=frozenset(
            {
                "cls_token_id",
                "decoder_bias",
                "deterministic_flash_attn",
                "embedding_dropout",
                "initializer_cutoff_factor",
                "layer_norm_eps",
                "mlp_dropout",
                "reference_compile",
                "repad_logits_with_grad",
                "sparse_pred_ignore_index",
                "sparse_prediction",
                "sliding_window",
            }
        ),
    ),
    "EuroBertModel": Family(
        encoder=EncoderFamily("mean"),
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 250_000.0},
        ignored=frozenset({"clf_pooling", "classifier_pooling"}),
    ),
}
