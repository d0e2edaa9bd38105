"""What `ModelArch` reads of an encoder's folder besides its sizes."""

from __future__ import annotations

import json
from pathlib import Path

from jaxsgl.models import arch_from_folder

BERT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 512,
}  # fmt: skip


def read(folder: Path, architecture: str) -> ModelArch:
    (folder / "config.json").write_text(json.dumps(BERT | {"architectures": [architecture]}))
    added = {"3": {"content": "[SEP]"}}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "sep_token": "[SEP]", "added_tokens_decoder": added})
    )
    return arch_from_folder(folder)


def test_tokens_after_a_separator_are_of_the_second_type_where_pairs_are_taken_alone(tmp_path: Path) -> None:
    """A title and an abstract, which SPECTER embeds with [SEP] between them, are one text."""
    for architecture, after in (("BertForSequenceClassification", 3), ("BertModel", None), ("BertForMaskedLM", None)):
        encoder = read(tmp_path, architecture).encoder
        assert encoder is not None and encoder.second_after == after
