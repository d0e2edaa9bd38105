"""What `ModelArch` reads of an encoder's folder besides its sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.layer_state import layer_states
from jaxsgl.engine.start.memory import Memory
from jaxsgl.engine.start.sizing import choose_context_length, plan_capacity
from jaxsgl.errors import CheckpointError
from jaxsgl.models import ModelArch, arch_from_folder
from jaxsgl.models.arch import serve_as

BERT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
# nomic-embed-text-v1.5's, in the words of its folder's own code.
NOMIC = {
    "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "activation_function": "swiglu",
    "attn_pdrop": 0.0, "causal": False, "dense_seq_output": True, "fused_bias_fc": True,
    "fused_dropout_add_ln": True, "layer_norm_epsilon": 1e-12, "max_trained_positions": 2048, "mlp_fc1_bias": False,
    "mlp_fc2_bias": False, "n_embd": 768, "n_head": 12, "n_inner": 3072, "n_layer": 12, "n_positions": 8192,
    "pad_vocab_size_multiple": 64, "parallel_block": False, "parallel_block_tied_norm": False, "prenorm": False,
    "qkv_proj_bias": False, "reorder_and_upcast_attn": False, "resid_pdrop": 0.0, "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None, "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True,
    "summary_activation": None, "summary_first_dropout": 0.0, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "torch_dtype": "float32", "type_vocab_size": 2,
    "use_flash_attn": True, "use_rms_norm": False, "use_xentropy": True, "vocab_size": 30528,
}  # fmt: skip
IN_TRANSFORMERS_WORDS = {
    "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "intermediate_size": 3072,
    "layer_norm_eps": 1e-12, "max_position_embeddings": 2048, "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 1000.0, "rope_type": "default"},
}  # fmt: skip


def read(folder: Path, architecture: str, longest: int = 10**30, tokenizer: str = "BertTokenizer") -> ModelArch:
    (folder / "config.json").write_text(json.dumps(BERT | {"architectures": [architecture]}))
    added = {"3": {"content": "[SEP]"}}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": tokenizer,
                "sep_token": "[SEP]",
                "added_tokens_decoder": added,
                "model_max_length": longest,
            }
        )
    )
    return arch_from_folder(folder)


def test_tokens_after_a_separator_are_of_the_second_type_where_pairs_are_taken_alone(tmp_path: Path) -> None:
    """A title and an abstract, which SPECTER embeds with [SEP] between them, are one text."""
    for architecture, after in (("BertForSequenceClassification", 3), ("BertModel", None), ("BertForMaskedLM", None)):
        encoder = read(tmp_path, architecture).encoder
        assert encoder is not None and encoder.second_after == after


@pytest.mark.parametrize(
    ("architecture", "tokenizer", "after"),
    [("Electra", "ElectraTokenizer", 3), ("Bert", "PreTrainedTokenizerFast", None), ("MPNet", "MPNetTokenizer", None)],
)
def test_tokenizers_that_tell_types_are_those_of_bert_and_electra(
    architecture: str, tokenizer: str, after: int | None, tmp_path: Path
) -> None:
    encoder = read(tmp_path, f"{architecture}ForSequenceClassification", tokenizer=tokenizer).encoder
    assert encoder is not None and encoder.second_after == after


def test_texts_are_as_long_as_sentence_transformers_takes_them_unless_the_flag_says_more(tmp_path: Path) -> None:
    """all-MiniLM has 512 positions, and embeds the first 256 tokens; in new folders the tokenizer says so."""
    for told, longest, found in ((None, 10**30, 512), (256, 512, 256), (1024, 512, 512), (None, 128, 128)):
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": told}))
        arch = read(tmp_path, "BertModel", longest)
        arch = serve_as(arch, is_embedding=False, enable_embeddings=False, matryoshka=False)
        assert choose_context_length(EngineConfig(), arch) == found
        assert choose_context_length(EngineConfig(context_length=500), arch) == 500
        assert choose_context_length(EngineConfig(), replace(arch, generates=True)) == 512


def test_nomic_bert_is_the_same_in_the_words_of_its_own_code_in_those_of_transformers_and_in_both(
    tmp_path: Path,
) -> None:
    own_words = frozenset(NOMIC) - {"architectures", "model_type", "torch_dtype", "type_vocab_size", "vocab_size"}
    of_transformers = {key: value for key, value in NOMIC.items() if key not in own_words} | IN_TRANSFORMERS_WORDS
    read = []
    for values in (NOMIC, of_transformers, NOMIC | IN_TRANSFORMERS_WORDS):
        (tmp_path / "config.json").write_text(json.dumps(values))
        read.append(arch_from_folder(tmp_path))
    assert read[0] == read[1] == read[2]
    assert (read[0].hidden_size, read[0].num_layers, read[0].max_context) == (768, 12, 2048)
    assert read[0].ropes[0].theta == 1000.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "gelu"}, 'activation_function is "gelu"'),
        ({"rotary_emb_fraction": 0.5}, "rotary_emb_fraction is 0.5"),
        ({"prenorm": True}, "prenorm is true"),
        ({"rotary_scaling_factor": 2.0}, "rotary_scaling_factor is 2.0"),
        ({"hidden_size": 512}, "hidden_size is 512"),
    ],
)
def test_nomic_bert_of_another_form_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NOMIC | change))
    with pytest.raises(CheckpointError, match=message):
        arch_from_folder(tmp_path)


def test_steps_hold_more_prompts_than_one_of_the_longest(tmp_path: Path) -> None:
    arch = serve_as(read(tmp_path, "BertModel"), is_embedding=False, enable_embeddings=False, matryoshka=False)
    for chunk, found in ((2048, 2048), (8192, 4 * 512), (64, 512)):
        config = EngineConfig(chunked_prefill_size=chunk, max_running_requests=4)
        states = layer_states(arch, 16, jnp.dtype(jnp.float32))
        assert plan_capacity(config, arch, states, Memory("cpu", 1 << 40, 1 << 40)).max_extend_tokens == found
