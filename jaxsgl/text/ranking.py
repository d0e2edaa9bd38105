"""How well one text answers another: the prompts that a model is asked, and scores made of what they yield.

    a model that generates      Qwen3-Reranker's prompt; the share of "yes" among "yes" and "no" after it
    a head of one label         both texts, as the tokenizer joins them; the head's score
    a model for embeddings      both texts by themselves; the cosine of the angle between their embeddings

A chat template with the roles query and document makes the prompts of the first two, as in sentence-transformers and
vLLM; the instruction is a system's turn before them.

The fixed parts of Qwen3-Reranker's prompt are tokenized by themselves, so that all prompts of a query begin with the
same ids and share what the prefix cache has of them (https://huggingface.co/Qwen/Qwen3-Reranker-0.6B). Never knows
requests or protocols: the front end and `LLM` run the prompts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.outputs import Pooled, Pooling, PoolingSpec, class_scores, embedding_of
from jaxsgl.requests.request import check_prompt_len
from jaxsgl.text.prompts import TextPrompt, check_bytes, cut_text, encode_text
from jaxsgl.text.tokenizer import TemplateOptions, Tokenizer, Truncation, num_bytes_of

Pair: TypeAlias = tuple[str, str]  # a query and a document
Prompter: TypeAlias = Callable[[Pair], list[int]]

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_ROLES = ("query", "document")
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
    """How `pairs` are scored by the model: from 0 to 1, of embeddings from -1 to 1, without activation by any number.

    `instruction` says what queries ask for, to models that are told; `truncation` cuts prompts that are too long, in
    their documents where these share a prompt with the query. Raises `InvalidRequest`.
    """
    if instruction:
        check_bytes("instruction", num_bytes_of(instruction), tokenizer, context_length)
    if spec.labels:
        return _by_classifier(tokenizer, spec, pairs, instruction, context_length, truncation)
    if spec.answer_ids or (spec.token_logits and not spec.made_for_it):
        return _by_answer(tokenizer, spec, pairs, instruction, context_length, truncation)
    return _by_angle(tokenizer, spec, pairs, context_length, truncation)


def num_chars_of(pairs: Sequence[Pair], instruction: str | None) -> int:
    """About how many characters `ranking_of` tokenizes: what a model is told stands in each prompt."""
    told = len(_BEFORE) + len(instruction or INSTRUCTION) + len(_BEHIND)
    return sum(told + len(query) + len(document) for query, document in pairs)


def _prompts(prompt: Prompter, pairs: Sequence[Pair], context_length: int) -> list[list[int]]:
    """The prompt of each pair. Raises `InvalidRequest` at the first that is too long.

    A long query or instruction would be tokenized for each of a thousand documents before it is refused.
    """
    prompts: list[list[int]] = []
    for pair in pairs:
        prompts.append(prompt(pair))
        check_prompt_len(len(prompts[-1]), context_length, 0)
    return prompts


def _by_answer(
    tokenizer: Tokenizer,
    spec: PoolingSpec,
    pairs: Sequence[Pair],
    instruction: str | None,
    context_length: int,
    truncation: Truncation | None,
) -> Ranking:
    answers = spec.answer_ids or tuple(_one_token(tokenizer, text) for text in ("yes", "no"))
    prompt = _by_template(tokenizer, spec, instruction, context_length, truncation)
    if prompt is None:
        _check_answers(tokenizer, answers)
        prompt = _as_qwen(tokenizer, instruction, context_length, truncation)
    prompts = _prompts(prompt, pairs, context_length)

    def values(yields: Sequence[Pooled]) -> list[float]:
        if spec.activation == "none":
            return [pooled.logits[0] - pooled.logits[1] for pooled in yields]
        return [class_scores(pooled.logits, "softmax")[0] for pooled in yields]

    return Ranking(prompts, Pooling(answers), values)


def _as_qwen(
    tokenizer: Tokenizer, instruction: str | None, context_length: int, truncation: Truncation | None
) -> Prompter:
    """Makes Qwen3-Reranker's prompts."""
    before, behind = tokenizer.encode(_BEFORE, False), tokenizer.encode(_BEHIND, False)

    def prompt(pair: Pair) -> list[int]:
        query, document = _fitting(pair, tokenizer, context_length, truncation)
        head = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>:"
        ids = [*before, *tokenizer.encode(f"{head} {document}", False), *behind]
        if truncation is None or len(ids) <= truncation.num_tokens:
            return ids
        return truncation.of(ids, len(before) + len(tokenizer.encode(head, False)), len(behind))

    return prompt


def _by_template(
    tokenizer: Tokenizer, spec: PoolingSpec, instruction: str | None, context_length: int, truncation: Truncation | None
) -> Prompter | None:
    """Makes prompts with the chat template; None if it has no roles for the texts of a pair."""
    options = TemplateOptions(add_generation_prompt=spec.begins_answer)
    content_of = _content_of(tokenizer, options)
    if content_of is None:
        return None
    told = [{"role": "system", "content": content_of(instruction)}] if instruction else []

    def prompt(pair: Pair) -> list[int]:
        pair = _fitting(pair, tokenizer, context_length, truncation)
        turns = [{"role": role, "content": content_of(text)} for role, text in zip(_ROLES, pair, strict=True)]
        text = tokenizer.render_chat([*told, *turns], options)
        ids = tokenizer.encode_rendered(text)
        if truncation is None or len(ids) <= truncation.num_tokens:
            return ids
        head, found, tail = text.rpartition(pair[1].strip() or "\0")
        if not found:
            raise InvalidRequest(
                "the model's chat template changes documents, which can't be cut then: leave truncate_prompt_tokens out"
            )
        return truncation.of(ids, *(len(tokenizer.encode_rendered(part)) if part else 0 for part in (head, tail)))

    return prompt


def _content_of(tokenizer: Tokenizer, options: TemplateOptions) -> Callable[[str], Any] | None:
    """How a chat template takes the texts of a pair: as they are or as a list of parts; None if it knows no pairs.

    A template that names the roles is asked to write a pair, since one that drops texts raises nothing.
    """
    template = tokenizer.chat_template or ""
    if not all(f"'{role}'" in template or f'"{role}"' in template for role in _ROLES):
        return None
    for content_of in (_as_text, _as_parts):
        turns = [{"role": role, "content": content_of(f"my {role}")} for role in _ROLES]
        with contextlib.suppress(InvalidRequest):
            text = tokenizer.render_chat(turns, options)
            if all(f"my {role}" in text for role in _ROLES):
                return content_of
    return None


def _as_text(text: str) -> str:
    return text


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _fitting(pair: Pair, tokenizer: Tokenizer, context_length: int, truncation: Truncation | None) -> Pair:
    """The pair, without what is to be cut of a long document. Raises `InvalidRequest` if it can't fit."""
    query, document = pair
    if truncation is not None:
        check_bytes("query", num_bytes_of(query), tokenizer, context_length)
        return query, cut_text(document, tokenizer, context_length, truncation)
    check_bytes("pair of texts", sum(map(num_bytes_of, pair)), tokenizer, context_length)
    return pair


def _check_answers(tokenizer: Tokenizer, answers: Sequence[int]) -> None:
    """Raises `InvalidRequest` if Qwen3-Reranker's prompt, which says "yes" or "no", asks for other answers."""
    _one_token(tokenizer, "<|im_start|>")
    if list(answers) != [_one_token(tokenizer, text) for text in ("yes", "no")]:
        raise InvalidRequest(
            f'the model answers with the tokens {" and ".join(map(str, answers))}, not with "yes" and "no", and its '
            "chat template has no roles query and document: start the server with --chat-template and one that has"
        )


def _by_classifier(
    tokenizer: Tokenizer,
    spec: PoolingSpec,
    pairs: Sequence[Pair],
    instruction: str | None,
    context_length: int,
    truncation: Truncation | None,
) -> Ranking:
    if len(spec.labels) != 1:
        raise InvalidRequest(f"the model scores {len(spec.labels)} classes, which don't rank texts: use /classify")
    prompt = _by_template(tokenizer, spec, instruction, context_length, truncation)
    if prompt is None:
        prompt = _joined(tokenizer, context_length, truncation)
    prompts = _prompts(prompt, pairs, context_length)
    return Ranking(
        prompts, Pooling(), lambda yields: [class_scores(pooled.logits, spec.activation)[0] for pooled in yields]
    )


def _joined(tokenizer: Tokenizer, context_length: int, truncation: Truncation | None) -> Prompter:
    """Joins the texts of a pair as the tokenizer does."""

    def prompt(pair: Pair) -> list[int]:
        return tokenizer.encode_pair(*_fitting(pair, tokenizer, context_length, truncation), truncation)

    return prompt


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
