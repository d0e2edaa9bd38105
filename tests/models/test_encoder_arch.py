"""What `ModelArch` reads of an encoder's folder besides its sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.start.sizing import choose_context_length
from jaxsgl.models import ModelArch, arch_from_folder
from jaxsgl.models.arch import serve_as

BERT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 512,
}  # fmt: skip


def read(folder: Path, architecture: str, longest: int = 10**30) -> ModelArch:
    (folder / "config.json").write_text(json.dumps(BERT | {"architectures": [architecture]}))
    added = {"3": {"content": "[SEP]"}}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "BertTokenizer",
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


def test_texts_are_as_long_as_sentence_transformers_takes_them_unless_the_flag_says_more(tmp_path: Path) -> None:
    """all-MiniLM has 512 positions, and embeds the first 256 tokens; in new folders the tokenizer says so."""
    for told, longest, found in ((None, 10**30, 512), (256, 512, 256), (1024, 512, 512), (None, 128, 128)):
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": told}))
        arch = read(tmp_path, "BertModel", longest)
        arch = serve_as(arch, is_embedding=False, enable_embeddings=False, matryoshka=False)
        assert choose_context_length(EngineConfig(), arch) == found
        assert choose_context_length(EngineConfig(context_length=500), arch) == 500
        assert choose_context_length(EngineConfig(), replace(arch, generates=True)) == 512
