"""How well one text answers another: the prompts that a model is asked, and scores made of what they yield.

    a model that generates      Qwen3-Reranker's prompt; the share of "yes" among "yes" and "no" after it
    a head of one label         both texts, as the tokenizer joins them; the head's score
    a model for embeddings      both texts by themselves; the cosine of the angle between their embeddings

The fixed parts of Qwen3-Reranker's prompt are tokenized by themselves, so that all prompts of a query begin with the
same ids and share what the prefix cache has of them (https://huggingface.co/Qwen/Qwen3-Reranker-0.6B). Never knows
requests or protocols: the front end and `LLM` run the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.outputs import Pooled, Pooling, PoolingSpec, class_scores, embedding_of
from jaxsgl.text.prompts import TextPrompt, check_bytes, encode_text
from jaxsgl.text.tokenizer import Tokenizer, Truncation, num_bytes_of

Pair: TypeAlias = tuple[str, str]  # a query and a document

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Ranking(NamedTuple):
    """What is to be asked.

    Attributes:
      prompts: token ids of each.
      pooling: what all of them ask for.
      values: makes the score of each pair of what the prompts yield, in their order.
    """

    prompts: list[list[int]]
    pooling: Pooling
    values: Callable[[Sequence[Pooled]], list[float]]


def ranking_of(
    tokenizer: Tokenizer,
    spec: PoolingSpec,
    pairs: Sequence[Pair],
    instruction: str | None = None,
    context_length: int = 1 << 30,
    truncation: Truncation | None = None,
) -> Ranking:
    """How `pairs` are scored by the model: from 0 to 1, of embeddings from -1 to 1.

    `instruction` says what queries ask for, to models that are told; `truncation` cuts prompts that are too long, in
    their documents where these share a prompt with the query. Raises `InvalidRequest`.
    """
    if spec.labels:
        return _by_classifier(tokenizer, spec, pairs, context_length, truncation)
    if spec.answer_ids or (spec.token_logits and not spec.made_for_it):
        return _by_answer(tokenizer, spec, pairs, instruction, context_length, truncation)
    return _by_angle(tokenizer, spec, pairs, context_length, truncation)


def _by_answer(
    tokenizer: Tokenizer,
    spec: PoolingSpec,
    pairs: Sequence[Pair],
    instruction: str | None,
    context_length: int,
    truncation: Truncation | None,
) -> Ranking:
    answers = spec.answer_ids or tuple(_one_token(tokenizer, text) for text in ("yes", "no"))
    _one_token(tokenizer, "<|im_start|>")
    before, behind = tokenizer.encode(_BEFORE, False), tokenizer.encode(_BEHIND, False)

    def prompt(query: str, document: str) -> list[int]:
        head = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>:"
        ids = [*before, *encode_text(TextPrompt(f"{head} {document}", False), tokenizer, context_length), *behind]
        if truncation is None or len(ids) <= truncation.num_tokens:
            return ids
        return truncation.of(ids, len(before) + len(tokenizer.encode(head, False)), len(behind))

    prompts = [prompt(*pair) for pair in pairs]
    return Ranking(
        prompts, Pooling(answers), lambda yields: [class_scores(pooled.logits, "softmax")[0] for pooled in yields]
    )


def _by_classifier(
    tokenizer: Tokenizer,
    spec: PoolingSpec,
    pairs: Sequence[Pair],
    context_length: int,
    truncation: Truncation | None,
) -> Ranking:
    if len(spec.labels) != 1:
        raise InvalidRequest(f"the model scores {len(spec.labels)} classes, which don't rank texts: use /classify")
    for pair in pairs:
        check_bytes("pair of texts", sum(map(num_bytes_of, pair)), tokenizer, context_length)
    prompts = [tokenizer.encode_pair(*pair, truncation) for pair in pairs]
    return Ranking(
        prompts, Pooling(), lambda yields: [class_scores(pooled.logits, spec.activation)[0] for pooled in yields]
    )


def _by_angle(
    tokenizer: Tokenizer,
    spec: PoolingSpec,
    pairs: Sequence[Pair],
    context_length: int,
    truncation: Truncation | None,
) -> Ranking:
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))  # a query is embedded once
    prompts = [encode_text(TextPrompt(text, truncation=truncation), tokenizer, context_length) for text in texts]

    def values(yields: Sequence[Pooled]) -> list[float]:
        vectors = {text: embedding_of(pooled, spec) for text, pooled in zip(texts, yields, strict=True)}
        return [_cosine(vectors[one], vectors[other]) for one, other in pairs]

    return Ranking(prompts, Pooling(), values)


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    lengths = max(float(np.linalg.norm(one)) * float(np.linalg.norm(other)), 1e-12)
    return float(np.dot(one.astype(np.float64), other.astype(np.float64)) / lengths)


def _one_token(tokenizer: Tokenizer, text: str) -> int:
    ids = tokenizer.encode(text, False)
    if len(ids) != 1:
        raise InvalidRequest(
            f"the model's tokenizer has no token {text!r}, so it can't be asked to rank: serve a reranker or a model "
            "for embeddings"
        )
    return ids[0]
