"""Answers /v1/score, /v1/rerank and /classify, in the forms of vLLM (Jina's and Cohere's) and of SGLang.

    /v1/score     text_1 and text_2, or queries and documents: a score of each pair (vLLM)
                  query, items and label_token_ids: for each item the shares of these tokens after it (SGLang)
    /v1/rerank    a query and documents: the documents, best first (Jina, Cohere, vLLM)
    /classify     the classes of a classification head (vLLM)

routes.py calls the functions here; frontend/pooling.py does the work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import Field
from starlette.responses import Response

from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.adapters import adapter_of
from jaxsgl.frontend.generation import FrontEnd, ServedModel
from jaxsgl.frontend.http.bodies import (
    MAX_INT,
    MAX_TEXTS,
    Body,
    CacheSalt,
    LoraPath,
    Priority,
    TokenIds,
    Truncated,
    one_error,
    options_of,
    refuse_others,
    truncation_of,
)
from jaxsgl.frontend.http.calls import check_num_choices
from jaxsgl.frontend.http.openai.completions import prompts_of
from jaxsgl.frontend.http.openai.embeddings import Pooled, answering, pooled_prompts, prompt_usage, usage_of
from jaxsgl.frontend.http.openai.replies import encode, json_response, new_head
from jaxsgl.frontend.http.openai.schemas import Prompts, Texts
from jaxsgl.frontend.pooling import PoolingAnswer, PoolingCall, pool, scores_of_pairs, spec_of
from jaxsgl.requests.outputs import MAX_LABELS, Pooling, PoolingSpec, class_scores
from jaxsgl.requests.request import check_prompt_len
from jaxsgl.text.prompts import IdsPrompt, Prompt, TextPrompt, check_bytes, cut_text
from jaxsgl.text.tokenizer import Truncation, num_bytes_of


class _Common(Truncated):
    """What the endpoints share, but for SGLang's form of /v1/score, which has `apply_softmax`."""

    model: str | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    extra_key: Annotated[CacheSalt, Field(description="SGLang's word for cache_salt")] | None = None
    lora_path: LoraPath | None = None
    use_activation: Annotated[bool, Field(description="false: scores are logits as the model yields them")] | None = (
        None
    )
    activation: Annotated[bool, Field(description="vLLM's older word for use_activation")] | None = None


class ScoreRequest(_Common):
    """Body of /v1/score, in vLLM's form or in SGLang's."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Annotated[Texts, Field(description="vLLM's newer word for text_1")] | None = None
    documents: Annotated[Texts, Field(description="vLLM's newer word for text_2")] | None = None
    data_1: Annotated[Texts, Field(description="vLLM's word for text_1 where it is more than text")] | None = None
    data_2: Annotated[Texts, Field(description="vLLM's word for text_2 where it is more than text")] | None = None
    instruction: str | None = None
    query: Annotated[str | TokenIds, one_error("must be a text or a list of token ids")] | None = None
    items: Annotated[Prompts, Field(description="with label_token_ids; or vLLM's word for text_2")] | None = None
    label_token_ids: (
        Annotated[TokenIds, Field(min_length=1, max_length=MAX_LABELS, description="SGLang's form")] | None
    ) = None
    apply_softmax: bool | None = None
    item_first: bool | None = None


class Document(Body):
    """A document in Cohere's form."""

    text: str


Documents = Annotated[
    list[Annotated[str | Document, one_error('must be a text, or {"text": ...}')]],
    Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True),
]


# Cohere's, which would change scores.
RANKED_OTHERWISE = frozenset({"max_chunks_per_doc", "max_tokens_per_doc", "rank_fields"})


class RerankRequest(_Common):
    """Body of /v1/rerank."""

    query: str
    documents: Documents
    top_n: Annotated[int, Field(ge=0, le=MAX_INT, description="0: all")] | None = None
    return_documents: bool | None = None
    instruction: Annotated[str, Field(description="what a query asks for, of rerankers that are told")] | None = None
    instruct: Annotated[str, Field(description="SGLang's word for instruction")] | None = None


class ClassifyRequest(_Common, Pooled):
    """Body of /classify."""


def _call(front_end: FrontEnd, body: _Common, prefix: str) -> PoolingCall:
    """What all prompts of a body have in common. Raises `NotFound` unless its model is served, and `InvalidRequest`."""
    adapter = adapter_of(front_end, body.model, body.lora_path)
    return PoolingCall(new_head(prefix, "list", "").id, options_of(body, [adapter]))


def _truncation(front_end: FrontEnd, body: _Common) -> Truncation | None:
    return truncation_of(body, front_end.generator.model.info.limits)


def _spec(front_end: FrontEnd, body: _Common) -> PoolingSpec:
    """How the model pools, and makes scores of logits or, for this body, leaves them as they are."""
    return spec_of(front_end.generator, body.use_activation is not False and body.activation is not False)


async def answer_rerank(front_end: FrontEnd, body: RerankRequest) -> Response:
    """Returns the documents, best first; equally good ones in their order."""
    refuse_others(body, RANKED_OTHERWISE)
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    call = _call(front_end, body, "rerank")
    pairs = [(body.query, text) for text in texts]
    instruction = body.instruction or body.instruct
    truncation = _truncation(front_end, body)
    spec = _spec(front_end, body)
    scores = await scores_of_pairs(front_end.generator, spec, pairs, call, instruction, truncation)
    order = sorted(range(len(texts)), key=lambda index: -scores.values[index])[: body.top_n or None]
    results: list[dict[str, Any]] = []
    for index in order:
        result: dict[str, Any] = {"index": index, "relevance_score": scores.values[index]}
        if body.return_documents is not False:
            result["document"] = {"text": texts[index]}
        results.append(result)
    usage = prompt_usage(scores.prompt_tokens, scores.cached_tokens)
    return json_response(
        encode({"id": call.request_id, "model": answering(front_end, call), "usage": usage, "results": results})
    )


async def answer_score(front_end: FrontEnd, body: ScoreRequest) -> Response:
    """Returns a score of each pair, or in SGLang's form the shares of label tokens of each item."""
    call = _call(front_end, body, "score")
    if body.label_token_ids is not None:
        return await _answer_labels(front_end, body, call)
    pairs = _pairs(body)
    check_num_choices(len(pairs), 1)
    truncation = _truncation(front_end, body)
    spec = _spec(front_end, body)
    scores = await scores_of_pairs(front_end.generator, spec, pairs, call, body.instruction, truncation)
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores.values)]
    usage = prompt_usage(scores.prompt_tokens, scores.cached_tokens)
    return json_response(encode({**_head(front_end, call), "data": data, "usage": usage}))


def _pairs(body: ScoreRequest) -> list[tuple[str, str]]:
    """The pairs: one text with each of the others, or as many of both."""
    first = _given(body.text_1, body.queries, body.data_1)
    second = _given(body.text_2, body.documents, body.data_2, body.items)
    if first is None or second is None:
        raise InvalidRequest(
            "the request needs text_1 and text_2 (or queries and documents), or SGLang's query, items and "
            "label_token_ids"
        )
    firsts, seconds = _texts(first), _texts(second)
    if len(firsts) == 1:
        return [(firsts[0], other) for other in seconds]
    if len(firsts) != len(seconds):
        raise InvalidRequest(
            f"there are {len(firsts)} first texts and {len(seconds)} second ones: send one first text, or as many"
        )
    return list(zip(firsts, seconds, strict=True))


_Texts: TypeAlias = str | list[str] | list[int] | list[list[int]]


def _given(*names: _Texts | None) -> _Texts | None:
    """What one side of the pairs holds, by whichever of its names."""
    return next((value for value in names if value is not None), None)


def _texts(given: _Texts) -> list[str]:
    texts = [text for text in ([given] if isinstance(given, str) else given) if isinstance(text, str)]
    if len(texts) < len(given) and not isinstance(given, str):
        raise InvalidRequest("items are token ids, but pairs are made of texts: send texts, or label_token_ids")
    return texts


async def _answer_labels(front_end: FrontEnd, body: ScoreRequest, call: PoolingCall) -> Response:
    generator = front_end.generator
    spec_of(generator)
    if body.query is None or body.items is None or body.label_token_ids is None:
        raise InvalidRequest("SGLang's form needs query, items and label_token_ids: send all of them")
    if body.items == []:
        raise InvalidRequest("items is an empty list: send at least one item")
    if not body.apply_softmax and not generator.model.info.limits.generates:
        raise InvalidRequest(
            "apply_softmax is false, which needs the whole vocabulary, but the server computes no logits of it: set it "
            "to true, or start the server with --enable-embeddings in place of --is-embedding"
        )
    truncation = _truncation(front_end, body)
    query = _fitting(generator.model, body.query, truncation)
    prompts = _with_query(body, query, prompts_of(body.items, True), truncation)
    answers = await pool(generator, prompts, call, Pooling(tuple(body.label_token_ids)))
    shares = [_shares(answer, bool(body.apply_softmax)) for answer in answers]
    answer = {"scores": shares, "model": answering(front_end, call), "object": "scoring", "usage": usage_of(answers)}
    return json_response(encode(answer))


def _fitting(model: ServedModel, query: str | list[int], truncation: Truncation | None) -> str | list[int]:
    """Returns the query, or the part of it that `truncation` may keep: it stands in the prompt of each item.

    Raises `InvalidRequest` if it can't fit.
    """
    tokenizer, context_length = model.tokenizer, model.info.limits.context_length
    if isinstance(query, str):
        if truncation is not None:
            return cut_text(query, tokenizer, context_length, truncation)
        check_bytes("query", num_bytes_of(query), tokenizer, context_length)
        return query
    if truncation is not None:
        return truncation.of(query)
    check_prompt_len(len(query), context_length, 0)
    return query


def _with_query(
    body: ScoreRequest, query: str | list[int], items: Sequence[Prompt], truncation: Truncation | None
) -> list[Prompt]:
    """Returns each item after the query, or before it. Raises `InvalidRequest` if one is text and the other ids."""
    if isinstance(query, str):
        texts = [item.text for item in items if isinstance(item, TextPrompt)]
        if len(texts) < len(items):
            raise InvalidRequest("query is a text, but items are token ids: send both in one form")
        whole = (text + query if body.item_first else query + text for text in texts)
        return [TextPrompt(text, truncation=truncation) for text in whole]
    lists = [list(item.ids) for item in items if isinstance(item, IdsPrompt)]
    if len(lists) < len(items):
        raise InvalidRequest("query is a list of token ids, but items are texts: send both in one form")
    return [IdsPrompt([*ids, *query] if body.item_first else [*query, *ids], truncation=truncation) for ids in lists]


def _shares(answer: PoolingAnswer, among_labels: bool) -> list[float]:
    """Probabilities of the labels: among them, or among all tokens."""
    pooled = answer.pooled
    if among_labels or pooled.log_total is None:
        return class_scores(pooled.logits, "softmax")
    return [math.exp(logit - pooled.log_total) for logit in pooled.logits]


async def answer_classify(front_end: FrontEnd, body: ClassifyRequest) -> Response:
    """Returns the probabilities of a classification head's classes for each input."""
    call = _call(front_end, body, "classify")
    spec = _spec(front_end, body)
    if not spec.labels:
        raise InvalidRequest("the model has no classification head: ask for embeddings, scores or ranks")
    prompts = pooled_prompts(front_end, body, _truncation(front_end, body))
    answers = await pool(front_end.generator, prompts, call)
    data = []
    for index, answer in enumerate(answers):
        probs = class_scores(answer.pooled.logits, spec.activation)
        best = max(range(len(probs)), key=probs.__getitem__)
        data.append({"index": index, "label": spec.labels[best], "probs": probs, "num_classes": len(probs)})
    return json_response(encode({**_head(front_end, call), "data": data, "usage": usage_of(answers)}))


def _head(front_end: FrontEnd, call: PoolingCall) -> dict[str, Any]:
    model = answering(front_end, call)
    return {"id": call.request_id, "object": "list", "created": int(time.time()), "model": model}
