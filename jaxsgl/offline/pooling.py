"""The part of `LLM` that gives vectors and scores instead of tokens; llm.py has the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from jaxsgl.errors import InvalidRequest
from jaxsgl.offline.run import Encoded, Offline, Prompt, UseTqdm, as_list, encode_each, per_prompt
from jaxsgl.requests.outputs import (
    Floats,
    Pooled,
    Pooling,
    PoolingSpec,
    check_dimensions,
    class_scores,
    embedding_of,
)
from jaxsgl.requests.request import POOLING_SAMPLING, Request, room_of_prompt
from jaxsgl.text.ranking import ranking_of
from jaxsgl.text.sample import Piece, join
from jaxsgl.text.tokenizer import Truncation


@dataclass(frozen=True)
class Embedding:
    """The vector of one prompt.

    Attributes:
      embedding: `[D]` float32.
      prompt_tokens, cached_tokens: see `Completion`.
    """

    embedding: Floats
    prompt_tokens: int
    cached_tokens: int


class PoolingLLM(Offline):
    """Embeddings and scores; needs `is_embedding` or `enable_embeddings`, or a model made for it."""

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str | Sequence[str] = "",
        adapter: str | Sequence[str] = "",
        use_tqdm: UseTqdm = True,
    ) -> list[Embedding]:
        """The embedding of each prompt; needs `is_embedding` or `enable_embeddings`, or a model made for it.

        Args:
          prompts: one prompt or many.
          dimensions: numbers of an embedding, of models whose embeddings may be cut.
          truncate_prompt_tokens: how many of the first tokens of longer prompts are kept; -1: what the context holds.
          cache_salt, adapter, use_tqdm: see `generate`.

        Raises `InvalidRequest`.
        """
        check_dimensions(self._spec, dimensions)
        encoded = self._encode_all(prompts, truncate_prompt_tokens)
        return self._embeddings(encoded, self._spec, dimensions, cache_salt, adapter, use_tqdm)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str | Sequence[str] = "",
        adapter: str | Sequence[str] = "",
        use_tqdm: UseTqdm = True,
    ) -> list[Embedding]:
        """The pooled hidden state of each prompt as it is, neither cut nor normalized; otherwise like `embed`."""
        spec = replace(self._spec, normalize=False)
        encoded = self._encode_all(prompts, truncate_prompt_tokens)
        return self._embeddings(encoded, spec, spec.dimension, cache_salt, adapter, use_tqdm)

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        adapter: str = "",
        use_tqdm: UseTqdm = True,
    ) -> list[float]:
        """How well each document answers the query, or that of its own if there are several; text/ranking.py says how.

        `instruction` says what queries ask for, to models that are told; `truncate_prompt_tokens` cuts prompts as in
        `embed`, where query and document share one the document; `adapter` is that of all texts. Needs what `embed`
        needs.
        """
        queries, texts = ([given] if isinstance(given, str) else list(given) for given in (query, documents))
        if len(queries) not in (1, len(texts)):
            raise InvalidRequest(
                f"{len(queries)} queries for {len(texts)} documents: give one for all, or one for each"
            )
        pairs = list(zip(queries if len(queries) > 1 else queries * len(texts), texts, strict=True))
        truncation, limits = self._truncation(truncate_prompt_tokens), self.engine.capacity.limits
        ranking = ranking_of(self.tokenizer, self._spec, pairs, instruction, limits.context_length, truncation)
        prompts: list[Encoded] = [(ids, ()) for ids in ranking.prompts]
        return ranking.values([pooled for pooled, _ in self._pool(prompts, ranking.pooling, "", adapter, use_tqdm)])

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str | Sequence[str] = "",
        adapter: str | Sequence[str] = "",
        use_tqdm: UseTqdm = True,
    ) -> list[list[float]]:
        """The scores of a classification head's classes for each prompt, in the order of the model's labels."""
        spec = self._spec
        if not spec.labels:
            raise InvalidRequest("the model has no classification head: ask for embeddings or scores")
        encoded = self._encode_all(prompts, truncate_prompt_tokens)
        pooled = self._pool(encoded, Pooling(), cache_salt, adapter, use_tqdm)
        return [class_scores(one.logits, spec.activation) for one, _ in pooled]

    def _truncation(self, num_tokens: int | None) -> Truncation | None:
        """How prompts are cut to `num_tokens`, or to what there is room for with -1. Raises `InvalidRequest`."""
        if num_tokens is None:
            return None
        room = room_of_prompt(num_tokens, self.engine.capacity.limits)
        return Truncation(room if num_tokens == -1 else num_tokens, first=True)

    def _encode_all(self, prompts: Prompt | Sequence[Prompt], truncate_prompt_tokens: int | None) -> list[Encoded]:
        truncation = self._truncation(truncate_prompt_tokens)
        return encode_each(lambda prompt: self._encode(prompt, truncation), as_list(prompts))

    def _embeddings(
        self,
        prompts: list[Encoded],
        spec: PoolingSpec,
        dimensions: int | None,
        cache_salt: str | Sequence[str],
        adapter: str | Sequence[str],
        use_tqdm: UseTqdm,
    ) -> list[Embedding]:
        return [
            Embedding(embedding_of(pooled, spec, dimensions), end.end.prompt_tokens, end.end.cached_tokens)
            for pooled, end in self._pool(prompts, Pooling(), cache_salt, adapter, use_tqdm)
            if end.end is not None
        ]

    def _pool(
        self,
        prompts: list[Encoded],
        pooling: Pooling,
        cache_salt: str | Sequence[str],
        adapter: str | Sequence[str],
        use_tqdm: UseTqdm,
    ) -> list[tuple[Pooled, Piece]]:
        """What each prompt yields, and its end."""
        salts = per_prompt("salts", cache_salt, str, len(prompts))
        adapters = self._adapters(adapter, len(prompts))
        requests = [
            Request(str(i), ids, POOLING_SAMPLING, cache_salt=salt, media=media, pooling=pooling, adapter=name)
            for i, ((ids, media), salt, name) in enumerate(zip(prompts, salts, adapters, strict=True))
        ]
        mailbox = self._serve(requests, use_tqdm)
        ends = (join(of_sample) for of_sample in mailbox.pieces.values())
        return [(mailbox.pooled[str(i)], end) for i, end in enumerate(ends)]

    @property
    def _spec(self) -> PoolingSpec:
        spec = self.engine.capacity.pooling
        if spec is None:
            raise InvalidRequest("no embeddings are computed: make the LLM with is_embedding or enable_embeddings")
        return spec
