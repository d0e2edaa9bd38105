"""Bodies of SGLang's /generate answers: text, ids and `meta_info` of each choice, all of it in each event of a stream.

Knows pieces and tokenizers, but no request body. generate.py uses it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from jaxsgl.config.engine import DEFAULT_WEIGHT_VERSION
from jaxsgl.frontend.http.openai.replies import MIN_LOGPROB, experts_text, name_of
from jaxsgl.messages.replies import TokenLogprob
from jaxsgl.requests.outputs import StatesSpec, TokenStates, hidden_states
from jaxsgl.requests.request import FinishReason, Request
from jaxsgl.text.sample import End, Piece, Speculated
from jaxsgl.text.tokenizer import Tokenizer

Scored: TypeAlias = tuple[float | None, int, str | None]  # log-probability, token id, its text if asked for
Tops: TypeAlias = list[list[Scored] | None]


class MetaInfo(msgspec.Struct):
    """Facts about one choice so far. `cached_tokens` and `e2e_latency` (seconds) are known at its end.

    So is what became of its drafts, on servers that speculate: steps that verified some, the tokens of such a step on
    average, the share of drafts in the output, such steps by how many of their drafts are there, and both numbers.
    """

    id: str
    prompt_tokens: int
    weight_version: str = DEFAULT_WEIGHT_VERSION
    finish_reason: dict[str, Any] | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    e2e_latency: float | UnsetType = UNSET
    input_token_logprobs: list[Scored] | UnsetType = UNSET
    output_token_logprobs: list[Scored] | UnsetType = UNSET
    input_top_logprobs: Tops | UnsetType = UNSET
    output_top_logprobs: Tops | UnsetType = UNSET
    hidden_states: list[Any] | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET
    spec_verify_ct: int | UnsetType = UNSET
    spec_accept_length: float | UnsetType = UNSET
    spec_accept_rate: float | UnsetType = UNSET
    spec_accept_histogram: list[int] | UnsetType = UNSET
    spec_accept_token_num: int | UnsetType = UNSET
    spec_draft_token_num: int | UnsetType = UNSET


class Choice(msgspec.Struct):
    """One sample so far; streams of several samples hold its `index`."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET


class Writer:
    """Collects one choice while its pieces arrive.

    Args:
      request: the request that it is a sample of.
      index: the choice's number; UNSET leaves it out of the answer.
      start_len: position of the first prompt token whose log-probability is wanted, or None.
      tokenizer: gives scored tokens their texts; None leaves them out.
      states: what the server returns of single tokens.
      speculates: whether the server does.

    Attributes:
      num_scores: log-probabilities so far, counted by a stream.
    """

    def __init__(
        self,
        request: Request,
        index: int | UnsetType,
        start_len: int | None,
        tokenizer: Tokenizer | None,
        states: StatesSpec | None = None,
        speculates: bool = False,
    ) -> None:
        self.num_scores = 0
        self._start_s = time.monotonic()
        self._prompt_ids = request.prompt_ids
        self._start_len = start_len
        self._tokenizer = tokenizer
        self._sampling = sampling = request.sampling
        self._states = states
        self._speculates = speculates
        meta = MetaInfo(request.request_id, len(request.prompt_ids))
        if sampling.logprobs is not None:
            meta.input_token_logprobs, meta.output_token_logprobs = [], []
            if sampling.logprobs > 0:
                meta.input_top_logprobs, meta.output_top_logprobs = [], []
        self._choice = Choice("", [], meta, index)

    def add(self, piece: Piece) -> Choice:
        """Adds `piece` and returns the choice so far."""
        choice, meta = self._choice, self._choice.meta_info
        choice.text += piece.text
        choice.output_ids += piece.token_ids
        meta.completion_tokens = len(choice.output_ids)
        meta.weight_version = piece.weight_version
        if meta.output_token_logprobs is not UNSET:
            meta.output_token_logprobs += self._own(piece.token_ids, piece.logprobs)
        if meta.output_top_logprobs is not UNSET:
            meta.output_top_logprobs += self._tops(piece.logprobs)
        if piece.prompt_logprobs is not None and self._start_len is not None:
            self._add_prompt(piece.prompt_logprobs, self._start_len)
        if piece.end is not None:
            meta.finish_reason = _finish_reason(piece.end)
            meta.cached_tokens = piece.end.cached_tokens
            meta.e2e_latency = time.monotonic() - self._start_s
            self._add_states(meta, piece.states)
            if self._speculates:
                _add_drafts(meta, piece.end.speculated)
        return choice

    def _add_states(self, meta: MetaInfo, states: Sequence[TokenStates]) -> None:
        """Adds what was computed for tokens, in SGLang's form: hidden states of the prompt, then of each token."""
        if self._states is None or not states:
            return
        if self._sampling.return_hidden_states:
            rows = hidden_states(states, self._states).tolist()
            meta.hidden_states = [rows[: len(self._prompt_ids)], *rows[len(self._prompt_ids) :]]
        if self._sampling.return_routed_experts:
            meta.routed_experts = experts_text(states, self._states)

    def _add_prompt(self, logprobs: Sequence[TokenLogprob], start_len: int) -> None:
        """Adds the prompt's log-probabilities; its first token has none, since no token comes before it."""
        meta, ids = self._choice.meta_info, self._prompt_ids
        own: list[Scored] = [(None, ids[0], self._text(ids[0])), *self._own(ids[1:], logprobs)]
        meta.input_token_logprobs = own[start_len:]
        if meta.input_top_logprobs is not UNSET:
            meta.input_top_logprobs = [None, *self._tops(logprobs)][start_len:]

    def _own(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[Scored]:
        return [self._scored(id, entry.logprob) for id, entry in zip(ids, logprobs, strict=True)]

    def _tops(self, logprobs: Sequence[TokenLogprob]) -> Tops:
        return [[self._scored(*top) for top in entry.top] for entry in logprobs]

    def _scored(self, token_id: int, logprob: float) -> Scored:
        return max(logprob, MIN_LOGPROB), token_id, self._text(token_id)

    def _text(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else name_of(self._tokenizer, token_id)


def _add_drafts(meta: MetaInfo, told: Speculated) -> None:
    meta.spec_verify_ct = told.num_steps
    meta.spec_accept_length = told.accept_length
    meta.spec_accept_rate = told.accept_rate
    meta.spec_accept_histogram = told.histogram
    meta.spec_accept_token_num = told.accepted_tokens
    meta.spec_draft_token_num = told.draft_tokens


def _finish_reason(end: End) -> dict[str, Any]:
    if end.reason is FinishReason.LENGTH:
        return {"type": "length", "length": end.completion_tokens}
    if end.reason is FinishReason.STOP:
        return {"type": "stop", "matched": end.matched_stop}
    return {"type": "abort", "message": "the request was aborted"}
