"""What an encoder is besides a decoder: each token sees its whole prompt, and no tokens are generated.

BERT and its descendants are the same layers otherwise. Where they normalize sums of the residual stream, what a norm
makes is the stream from there on: a norm is then one before the next block (`Encoder.restarts`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from jaxsgl.json_file import read_object
from jaxsgl.models.end_tokens import TOKENIZER_CONFIG, token_of_tokenizer

# After which norms the residual stream goes on from what they made: none, that of the embeddings, or every one.
Restarts: TypeAlias = Literal["nowhere", "first", "everywhere"]
# What a classification head has before its last product: a matrix with a bias and a tanh or ReLU, or one without a
# bias, a GELU and a LayerNorm.
Classifier: TypeAlias = Literal["tanh", "relu", "normed gelu"]


@dataclass(frozen=True)
class Encoder:
    """How the layers of an encoder differ from a decoder's.

    Attributes:
      restarts: see `Restarts`.
      num_types: rows of the table of token types, which is added to embeddings; 0 without such a table.
      second_after: the token after whose first place in a prompt tokens are of the second type; None: all are of the
        first.
      classifier: see `Classifier`.
    """

    restarts: Restarts = "nowhere"
    num_types: int = 0
    second_after: int | None = None
    classifier: Classifier = "tanh"


def read_second_after(folder: Path, vocab_size: int) -> int | None:
    """`Encoder.second_after` of a model of pairs with two types: the token between texts, if the tokenizer tells types.

    As in transformers, BERT's own tokenizers do, and others if `model_input_names` says so.
    """
    path = folder / TOKENIZER_CONFIG
    config = read_object(path) if path.is_file() else {}
    names = config.get("model_input_names")
    told = names if isinstance(names, list) else []
    tells_types = "token_type_ids" in told or (not told and "Bert" in str(config.get("tokenizer_class")))
    return token_of_tokenizer("sep_token", folder, vocab_size, default="[SEP]") if tells_types else None
