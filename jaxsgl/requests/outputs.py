"""What clients can get besides tokens: vectors and scores of a prompt, hidden states and experts of single tokens.

    hidden states of the prompt --pooled on the device--> hidden [D] --embedding_of--> an embedding
             |                                       `--> logits of some tokens or labels --class_scores--> scores
             '--as they are, with the chosen experts--> TokenStates of each reply

Owns these values, their checks and the arithmetic that follows on the host. Never knows files (`models/pooling.py`
reads a model's), protocols or devices. Front ends and `LLM` ask, the scheduler carries, the engine computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from jaxsgl.errors import InvalidRequest

MAX_LABELS = 16  # tokens whose logits one request may ask for
MAX_STATE_NUMBERS = 1 << 23  # of one request: 32 MB in memory, 160 MB as JSON

PoolingKind: TypeAlias = Literal["first", "last", "mean"]
Activation: TypeAlias = Literal["softmax", "sigmoid", "none"]
Floats: TypeAlias = npt.NDArray[np.float32]


class DenseModule(msgspec.Struct, frozen=True, array_like=True):
    """A matrix that reads pooled states, or what the one before it makes of them, with an activation after it."""

    num_inputs: int
    num_outputs: int
    has_bias: bool
    activation: Literal["none", "tanh"]


class PoolingSpec(msgspec.Struct, frozen=True):
    """How a model makes vectors and scores.

    Attributes:
      kind: what is pooled of the hidden states: that of the first or last token, or the mean of all.
      dimension: D, or the numbers that the last one of `dense` makes.
      dense: matrices between the pooled state and the embedding.
      normalize: embeddings have the length 1.
      matryoshka: embeddings may be cut: to any length, or to those of `dimensions` if there are some.
      labels: names of the classes of a classification head, in the order of its rows; (): it has none.
      activation: makes scores of the head's logits.
      made_for_it: the folder says how the model pools, or the model has no vocabulary head.
      token_logits: the model has a vocabulary head, so requests may ask for logits of tokens.
      answer_ids: the tokens of a reranker's answers, "yes" first; (): the folder doesn't say.
      begins_answer: prompts that the model's own template makes of a pair end where the assistant's turn begins.
      default_dimensions: numbers of an embedding where a request doesn't say; None: all.
      sees_whole: each token sees the whole prompt, which is computed in one step and shares no prefix.
      max_tokens: tokens of a prompt, if the folder says that it was made for fewer than its context holds.
    """

    kind: PoolingKind = "last"
    dimension: int = 0
    normalize: bool = True
    matryoshka: bool = False
    dimensions: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    activation: Activation = "softmax"
    made_for_it: bool = False
    token_logits: bool = True
    answer_ids: tuple[int, ...] = ()
    begins_answer: bool = False
    default_dimensions: int | None = None
    sees_whole: bool = False
    dense: tuple[DenseModule, ...] = ()
    max_tokens: int | None = None


LAST_TOKEN = PoolingSpec()


class Pooling(msgspec.Struct, frozen=True, array_like=True):
    """What a request asks for: the pooled hidden state, or the logits of `label_ids` after the prompt if any."""

    label_ids: tuple[int, ...] = ()


class Pooled(msgspec.Struct, frozen=True, array_like=True):
    """What a request for pooling yields.

    Attributes:
      hidden: float32 bytes `[D]`; empty if logits of tokens were asked for.
      logits: of `label_ids`, or of all labels of a classification head.
      log_total: the logarithm of the sum of exp(logit) over the vocabulary, where the server also generates.
    """

    hidden: bytes = b""
    logits: tuple[float, ...] = ()
    log_total: float | None = None


def check_pooling(pooling: Pooling, spec: PoolingSpec | None, vocab_size: int) -> None:
    """Raises `InvalidRequest` if a server that pools as `spec` says (None: not at all) can't do that."""
    if spec is None:
        raise InvalidRequest(
            "the server gives no embeddings or scores: start it with --enable-embeddings, or with --is-embedding for "
            "nothing else"
        )
    ids = pooling.label_ids
    if not ids:
        return
    if len(ids) > MAX_LABELS:
        raise InvalidRequest(f"{len(ids)} label tokens are given, but {MAX_LABELS} are the most: send fewer")
    if not spec.token_logits:
        raise InvalidRequest("the model has no vocabulary head, so tokens have no scores: ask for embeddings")
    bad = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
    if bad is not None:
        raise InvalidRequest(f"a label token is {bad}, but ids go from 0 to {vocab_size - 1}")


def check_dimensions(spec: PoolingSpec, dimensions: int | None) -> None:
    """Raises `InvalidRequest` unless embeddings may have `dimensions` numbers (None: all)."""
    if dimensions is None or dimensions == spec.dimension:
        return
    if not spec.matryoshka:
        raise InvalidRequest(
            f"dimensions is {dimensions}, but this model's embeddings have {spec.dimension} and can't be cut: leave it "
            "out, or start the server with --matryoshka if the model was trained for it"
        )
    if spec.dimensions and dimensions not in spec.dimensions:
        allowed = ", ".join(map(str, spec.dimensions))
        raise InvalidRequest(f"dimensions is {dimensions}, but the model was trained for {allowed}")
    if not 1 <= dimensions <= spec.dimension:
        raise InvalidRequest(f"dimensions is {dimensions}, but must be 1 to {spec.dimension}")


def embedding_of(pooled: Pooled, spec: PoolingSpec, dimensions: int | None = None) -> Floats:
    """The embedding `[dimensions]` float32: cut before it is normalized, so that it has the length 1 if any has."""
    hidden = np.frombuffer(pooled.hidden, np.float32)[: dimensions or spec.default_dimensions].astype(np.float64)
    if spec.normalize:
        hidden = hidden / max(float(np.linalg.norm(hidden)), 1e-12)
    return hidden.astype(np.float32)


def class_scores(logits: Sequence[float], activation: Activation) -> list[float]:
    """The scores of classes by their logits."""
    values = np.array(logits, np.float64)
    if activation == "softmax":
        shares = np.exp(values - values.max())
        values = shares / shares.sum()
    elif activation == "sigmoid":
        values = 1.0 / (1.0 + np.exp(-np.clip(values, -700.0, 700.0)))
    scores: list[float] = values.tolist()
    return scores


class StatesSpec(msgspec.Struct, frozen=True):
    """What the server returns.

    Attributes:
      hidden: whether it returns hidden states, `[tokens, hidden_size]`.
      experts: whether it returns the chosen experts, `[tokens, num_layers, top_k]`, with -1 in layers without.
    """

    hidden: bool
    experts: bool
    hidden_size: int
    num_layers: int
    top_k: int


class TokenStates(msgspec.Struct, frozen=True, array_like=True):
    """Of consecutive tokens; bytes of float32 and int32."""

    hidden: bytes = b""
    experts: bytes = b""


def hidden_states(parts: Sequence[TokenStates], spec: StatesSpec) -> npt.NDArray[np.float32]:
    """`[tokens, hidden_size]` of all parts."""
    return np.frombuffer(b"".join(part.hidden for part in parts), np.float32).reshape(-1, spec.hidden_size)


def routed_experts(parts: Sequence[TokenStates], spec: StatesSpec) -> npt.NDArray[np.int32]:
    """`[tokens, num_layers, top_k]` of all parts."""
    joined = np.frombuffer(b"".join(part.experts for part in parts), np.int32)
    return joined.reshape(-1, spec.num_layers, spec.top_k)
