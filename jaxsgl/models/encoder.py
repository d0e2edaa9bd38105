"""What an encoder is besides a decoder: each token sees its whole prompt, and no tokens are generated.

BERT and its descendants are the same layers otherwise. Where they normalize sums of the residual stream, what a norm
makes is the stream from there on: a norm is then one before the next block (`Encoder.restarts`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from jaxsgl.json_file import read_object
from jaxsgl.models.end_tokens import TOKENIZER_CONFIG, token_of_tokenizer

# After which norms the residual stream goes on from what they made: none, that of the embeddings, or every one.
Restarts: TypeAlias = Literal["nowhere", "first", "everywhere"]
# What a classification head has before its last product: a matrix with a bias and a tanh, ReLU or GELU, or one without
# a bias, a GELU and a LayerNorm.
Classifier: TypeAlias = Literal["tanh", "relu", "gelu", "normed gelu"]


@dataclass(frozen=True)
class Encoder:
    """How the layers of an encoder differ from a decoder's.

    Attributes:
      restarts: see `Restarts`.
      num_types: rows of the table of token types, which is added to embeddings; 0 without such a table.
      second_after: the token after whose first place in a prompt tokens are of the second type; None: all are of the
        first.
      classifier: see `Classifier`.
      has_biases: heads have biases of scores by the distance of the key, the same in all layers (`distance_buckets`).
    """

    restarts: Restarts = "nowhere"
    num_types: int = 0
    second_after: int | None = None
    classifier: Classifier = "tanh"
    has_biases: bool = False


NUM_BUCKETS, FURTHEST = 32, 128  # of distances; which MPNet's code has, whatever config.json says


def distance_buckets() -> npt.NDArray[np.int32]:
    """`[2 FURTHEST + 1]` the bucket of each distance from -FURTHEST on to FURTHEST; those beyond are in the outermost.

    Half of them are for keys after the query. Of either half, half are for one distance each, the others grow with
    the logarithm. Source: T5 (arXiv 1910.10683), as MPNet (arXiv 2004.09297) has it.
    """
    distance = np.arange(-FURTHEST, FURTHEST + 1)
    half, exact = NUM_BUCKETS // 2, NUM_BUCKETS // 4
    steps = np.maximum(np.abs(distance), 1).astype(np.float32)
    share = np.log(steps / np.float32(exact)) / np.float32(math.log(FURTHEST / exact))
    grown = np.minimum(exact + (share * np.float32(half - exact)).astype(np.int32), half - 1)
    of_half = np.where(np.abs(distance) < exact, np.abs(distance), grown)
    return (np.where(distance > 0, half, 0) + of_half).astype(np.int32)


def read_second_after(folder: Path, vocab_size: int) -> int | None:
    """`Encoder.second_after` of a model of pairs with two types: the token between texts, if the tokenizer tells types.

    As in transformers, the tokenizers of BERT and ELECTRA do, and others if `model_input_names` says so.
    """
    path = folder / TOKENIZER_CONFIG
    config = read_object(path) if path.is_file() else {}
    names = config.get("model_input_names")
    told = names if isinstance(names, list) else []
    own_kind = str(config.get("tokenizer_class"))
    tells_types = "token_type_ids" in told or (not told and ("Bert" in own_kind or "Electra" in own_kind))
    return token_of_tokenizer("sep_token", folder, vocab_size, default="[SEP]") if tells_types else None
