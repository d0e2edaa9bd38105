"""SGLang's GenerateRequest to our sampling parameters, and the pieces of its answer to GenerateResponse messages.

Knows the protocol's conventions: proto3 has no unset numbers, so a field that a client leaves out arrives as 0 and
means SGLang's default. All checks of values are those of `SamplingParams`; this file refuses what only this protocol
has. Never knows the engine or a call's context; service.py calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from smg_grpc_proto import sglang_scheduler_pb2 as pb

from jaxsgl.config.features import BOOTSTRAP_PORT
from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.generation import RequestOptions
from jaxsgl.frontend.legs import rendezvous
from jaxsgl.messages.replies import TokenLogprob
from jaxsgl.requests.grammar import Grammar
from jaxsgl.requests.outputs import StatesSpec, TokenStates, hidden_states
from jaxsgl.requests.request import FinishReason, Rendezvous, SamplingParams, check_counts
from jaxsgl.text.sample import End, Piece

# Field -> what to do instead. Ignoring one of them would give an answer that the client did not ask for.
_UNSUPPORTED_OF_REQUEST = {
    "custom_logit_processor": "it would run code of the client's; use logit_bias",
    "input_embeds": "send tokenized.input_ids",
}
_MAX_ID_DIGITS = 10
_GRAMMARS: dict[str, Callable[[str], Grammar]] = {  # by the field of the protocol
    "regex": Grammar.regex,
    "json_schema": Grammar.json_schema,
    "ebnf_grammar": Grammar.ebnf,
    "structural_tag": Grammar.structural_tag,
}
_UNSUPPORTED_OF_SAMPLING = {
    "custom_params": "they belong to custom logit processors, which are not run",
}


@dataclass(frozen=True)
class GenerateOptions:
    """What a GenerateRequest asks for, checked as far as that is possible without the model.

    Attributes:
      sampling: for the engine.
      stream: send chunks as tokens come; otherwise each sample is one answer, sent at its end.
      chunk_tokens: tokens in each chunk of a sample, except the first and the last.
      logprob_start: first prompt position whose log-probability is wanted, or None if no position's is.
      prefill_only: max_new_tokens is 0. The engine then samples one token, which is not sent.
      of_request: its adapter, and where its prefill and decode legs meet.
      rank: the replica that must serve it, or None if any may.
    """

    sampling: SamplingParams
    stream: bool
    chunk_tokens: int
    logprob_start: int | None
    prefill_only: bool
    of_request: RequestOptions
    rank: int | None = None


def options_of(request: pb.GenerateRequest) -> GenerateOptions:
    """Converts a request. Raises `InvalidRequest` with a message that names the field."""
    params = request.sampling_params
    _refuse_unsupported(request, _UNSUPPORTED_OF_REQUEST)
    _refuse_unsupported(params, _UNSUPPORTED_OF_SAMPLING)
    chunk_tokens = params.stream_interval if params.HasField("stream_interval") else 1
    if chunk_tokens < 1:
        raise InvalidRequest(f"stream_interval is {chunk_tokens}, but must be 1 and more")
    logprob_start = _logprob_start(request)
    prefill_only = params.HasField("max_new_tokens") and params.max_new_tokens == 0
    if params.HasField("max_new_tokens") and params.min_new_tokens > params.max_new_tokens:
        raise InvalidRequest(
            f"min_new_tokens is {params.min_new_tokens}, but max_new_tokens is {params.max_new_tokens}: raise it"
        )
    return GenerateOptions(
        _sampling(request, prefill_only, scores_prompt=logprob_start is not None),
        request.stream,
        chunk_tokens,
        logprob_start,
        prefill_only,
        RequestOptions(adapter=request.lora_id, room=_room(request)),
        request.data_parallel_rank if request.HasField("data_parallel_rank") else None,
    )


def _room(request: pb.GenerateRequest) -> Rendezvous | None:
    """Returns where the legs meet, if a gateway says so. It says 0 where it knows no port: SGLang's default."""
    given = request.disaggregated_params
    if not given.ByteSize():
        return None
    return rendezvous(given.bootstrap_host, given.bootstrap_port or BOOTSTRAP_PORT, given.bootstrap_room)


def _refuse_unsupported(message: Any, unsupported: dict[str, str]) -> None:
    """Raises `InvalidRequest` for a field of `unsupported` that holds something; gateways also send empty messages."""
    for field, value in message.ListFields():
        if field.name in unsupported and (field.message_type is None or field.is_repeated or value.ByteSize()):
            raise InvalidRequest(f"{field.name} is not supported ({unsupported[field.name]}): leave it out")


def _logprob_start(request: pb.GenerateRequest) -> int | None:
    """Returns the first position of the prompt to score. -1 means none of it; 0, also if left out, all of it."""
    start, prompt_len = request.logprob_start_len, len(request.tokenized.input_ids)
    if not request.return_logprob or start == -1:
        return None
    if not 0 <= start <= prompt_len:
        raise InvalidRequest(
            f"logprob_start_len is {start}, but must be -1 (none of the prompt), or 0 to {prompt_len}, its length"
        )
    return start if start < prompt_len else None


def _sampling(request: pb.GenerateRequest, prefill_only: bool, scores_prompt: bool) -> SamplingParams:
    params = request.sampling_params
    check_counts(params.stop_token_ids, params.stop, params.logit_bias)
    max_tokens = params.max_new_tokens if params.HasField("max_new_tokens") else None
    top = request.top_logprobs_num
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p or 1.0,
        top_k=params.top_k or -1,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        logit_bias=_logit_bias(params.logit_bias),
        max_tokens=1 if prefill_only else max_tokens,
        min_tokens=params.min_new_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        stop=tuple(params.stop),
        include_stop_str_in_output=params.no_stop_trim,
        ignore_eos=params.ignore_eos,
        logprobs=top if request.return_logprob else None,
        logprob_token_ids=tuple(request.token_ids_logprob) if request.return_logprob else (),
        prompt_logprobs=top if scores_prompt else None,
        n=params.n or 1,
        grammar=_grammar(params),
        return_hidden_states=request.return_hidden_states,
    )


def _grammar(params: pb.SamplingParams) -> Grammar | None:
    field = params.WhichOneof("constraint")
    return None if field is None else _GRAMMARS[field](getattr(params, field))


def _logit_bias(by_text: Any) -> dict[int, float]:
    """Converts the protocol's keys, which are token ids written as text."""
    bias: dict[int, float] = {}
    for key, value in by_text.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_ID_DIGITS):
            raise InvalidRequest(f"logit_bias has the key {key[:50]!r}, but keys must be token ids, as '42'")
        bias[int(key)] = value
    return bias


class Responses:
    """Turns pieces into responses, for one call: chunks while tokens come, then a completion for each sample.

    Owns what has come of each sample so far, since a completion repeats all of it. `states`: what the server returns of
    single tokens.
    """

    def __init__(
        self, request_id: str, options: GenerateOptions, prompt_ids: Sequence[int], states: StatesSpec | None = None
    ) -> None:
        self._states = states
        self._request_id = request_id
        self._options = options
        self._prompt_ids = prompt_ids
        self._samples = [_Sample() for _ in range(options.sampling.n)]

    def begun(self) -> pb.GenerateResponse:
        """An empty chunk. A gateway gives up on a prefill server that says nothing for 3 s, whatever it computes."""
        chunk = pb.GenerateStreamChunk(prompt_tokens=len(self._prompt_ids))
        return pb.GenerateResponse(request_id=self._request_id, chunk=chunk)

    def num_scores(self, piece: Piece) -> int:
        """Log-probabilities that `of(piece)` has to write."""
        sample = self._samples[piece.index]
        kept = len(sample.logprobs) * self._options.sampling.num_scores if piece.end is not None else 0
        return piece.num_scores + kept + sum(len(part.hidden) for part in sample.states) // 4

    def of(self, piece: Piece) -> Iterator[pb.GenerateResponse]:
        """Yields what is to be sent now that `piece` has come: nothing yet, a chunk, a completion, or both."""
        sample = self._samples[piece.index]
        if not self._options.prefill_only:
            sample.ids += piece.token_ids
            sample.logprobs += piece.logprobs
        sample.states += piece.states
        if piece.prompt_logprobs is not None:
            sample.prompt_logprobs = piece.prompt_logprobs
        num_new = len(sample.ids) - sample.num_sent
        if (
            self._options.stream
            and num_new
            and (piece.end or not sample.num_sent or num_new >= self._options.chunk_tokens)
        ):
            yield self._chunk(sample, piece)
            sample.num_sent = len(sample.ids)
        if piece.end is not None:
            yield self._complete(sample, piece.end, piece.index)

    def _chunk(self, sample: _Sample, piece: Piece) -> pb.GenerateResponse:
        """Fills the message in place: a third of the time of keyword arguments, and this runs for every token."""
        response = pb.GenerateResponse(request_id=self._request_id)
        chunk, start = response.chunk, sample.num_sent
        chunk.token_ids.extend(sample.ids[start:])
        chunk.prompt_tokens = len(self._prompt_ids)
        chunk.completion_tokens = len(sample.ids)
        chunk.cached_tokens = piece.cached_tokens
        chunk.index = piece.index
        if sample.logprobs:
            chunk.output_logprobs.CopyFrom(self._output_logprobs(sample.ids[start:], sample.logprobs[start:]))
        if sample.prompt_logprobs is not None and start == 0:
            chunk.input_logprobs.CopyFrom(self._input_logprobs(sample.prompt_logprobs))
        return response

    def _complete(self, sample: _Sample, end: End, index: int) -> pb.GenerateResponse:
        complete = pb.GenerateComplete(
            output_ids=sample.ids,
            finish_reason=end.reason.value,
            prompt_tokens=end.prompt_tokens,
            completion_tokens=len(sample.ids),
            cached_tokens=end.cached_tokens,
            index=index,
            spec_accepted_tokens=end.speculated.accepted_tokens,
            spec_draft_tokens=end.speculated.draft_tokens,
        )
        if self._options.prefill_only and end.reason is not FinishReason.ABORT:
            complete.finish_reason = FinishReason.LENGTH.value
        elif isinstance(end.matched_stop, str):
            complete.matched_stop_str = end.matched_stop
        elif end.matched_stop is not None:
            complete.matched_token_id = end.matched_stop
        if sample.logprobs:
            complete.output_logprobs.CopyFrom(self._output_logprobs(sample.ids, sample.logprobs))
        if sample.prompt_logprobs is not None:
            complete.input_logprobs.CopyFrom(self._input_logprobs(sample.prompt_logprobs))
        if self._states is not None and sample.states:
            for position, row in enumerate(hidden_states(sample.states, self._states)):
                complete.all_hidden_states.add(values=row.tolist(), layer=-1, position=position)
        return pb.GenerateResponse(request_id=self._request_id, complete=complete)

    def _output_logprobs(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> pb.OutputLogProbs:
        sampling = self._options.sampling
        named = sampling.logprob_token_ids
        return pb.OutputLogProbs(
            token_logprobs=[of_token.logprob for of_token in logprobs],
            token_ids=ids,
            top_logprobs=map(_top, logprobs) if sampling.logprobs else (),
            token_ids_logprobs=[pb.TopLogProbs(values=each.named, token_ids=named) for each in logprobs if named],
        )

    def _input_logprobs(self, of_prompt: Sequence[TokenLogprob]) -> pb.InputLogProbs:
        """Covers the positions from `logprob_start` on. Token 0 has nothing before it, so its entry has no value."""
        start = self._options.logprob_start or 0
        known = of_prompt[max(start - 1, 0) :]
        values = [pb.InputTokenLogProb(value=of_token.logprob) for of_token in known]
        tops = [_top(of_token) for of_token in known]
        if start == 0:
            values.insert(0, pb.InputTokenLogProb())
            tops.insert(0, pb.TopLogProbs())
        return pb.InputLogProbs(
            token_logprobs=values,
            token_ids=self._prompt_ids[start:],
            top_logprobs=tops if self._options.sampling.prompt_logprobs else (),
        )


class _Sample:
    """What has come of one sample; `num_sent` of its tokens went out in chunks."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: tuple[TokenLogprob, ...] | None = None
        self.states: list[TokenStates] = []
        self.num_sent = 0


def _top(of_token: TokenLogprob) -> pb.TopLogProbs:
    return pb.TopLogProbs(
        values=[logprob for _, logprob in of_token.top], token_ids=[token_id for token_id, _ in of_token.top]
    )
