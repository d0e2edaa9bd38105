"""From SGLang's GenerateRequest to our sampling parameters, and what of it can't be served. Pure functions.

proto3 has no unset numbers: a field that a client leaves out arrives as 0, and means SGLang's default then. All checks
of values are those of `SamplingParams`; this file adds what only this protocol has. generate.py calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smg_grpc_proto import sglang_scheduler_pb2 as pb

from jaxsgl.errors import InvalidRequest
from jaxsgl.request import SamplingParams

# Field -> what to do instead. A request that sets one of them would get an answer that it did not ask for.
_UNSUPPORTED_OF_REQUEST = {
    "mm_inputs": "only text models are served",
    "disaggregated_params": "prefill and decode run in the same worker: route the request to one worker",
    "custom_logit_processor": "it would run code of the client's; use logit_bias",
    "input_embeds": "send tokenized.input_ids",
    "lora_id": "no LoRA adapters are loaded",
    "token_ids_logprob": "use top_logprobs_num",
    "return_hidden_states": "hidden states are not returned",
}
_MAX_ID_DIGITS = 10
_NO_GRAMMAR = "output can't be held to a grammar"
_UNSUPPORTED_OF_SAMPLING = {
    "regex": _NO_GRAMMAR,
    "json_schema": _NO_GRAMMAR,
    "ebnf_grammar": _NO_GRAMMAR,
    "structural_tag": _NO_GRAMMAR,
    "custom_params": "they belong to custom logit processors, which are not run",
}


@dataclass(frozen=True)
class Wish:
    """What a GenerateRequest asks for, checked as far as the model needn't be known.

    Attributes:
      sampling: for the engine.
      stream: chunks as tokens come; else one answer per sample at its end.
      chunk_tokens: tokens per chunk of a sample, but the first and the last.
      logprob_start: first prompt position whose log-probability is wanted, None: none.
      prefill_only: max_new_tokens is 0. The engine samples one token, which is not shown.
    """

    sampling: SamplingParams
    stream: bool
    chunk_tokens: int
    logprob_start: int | None
    prefill_only: bool


def wish_of(request: pb.GenerateRequest) -> Wish:
    """Raises `InvalidRequest` with words that name the field."""
    params = request.sampling_params
    _refuse_unsupported(request, _UNSUPPORTED_OF_REQUEST)
    _refuse_unsupported(params, _UNSUPPORTED_OF_SAMPLING)
    if request.data_parallel_rank != 0:
        raise InvalidRequest(
            f"data_parallel_rank is {request.data_parallel_rank}, but this worker has rank 0 alone: leave it out"
        )
    chunk_tokens = params.stream_interval if params.HasField("stream_interval") else 1
    if chunk_tokens < 1:
        raise InvalidRequest(f"stream_interval is {chunk_tokens}, but must be 1 and more")
    logprob_start = _logprob_start(request)
    prefill_only = params.HasField("max_new_tokens") and params.max_new_tokens == 0
    if prefill_only and params.min_new_tokens:
        raise InvalidRequest(f"min_new_tokens is {params.min_new_tokens}, but max_new_tokens is 0: raise it")
    return Wish(
        _sampling(request, prefill_only, scores_prompt=logprob_start is not None),
        request.stream,
        chunk_tokens,
        logprob_start,
        prefill_only,
    )


def _refuse_unsupported(message: Any, unsupported: dict[str, str]) -> None:
    """A field counts as used if it holds something: gateways also send messages that are empty."""
    for field, value in message.ListFields():
        if field.name in unsupported and (field.message_type is None or field.is_repeated or value.ByteSize()):
            raise InvalidRequest(f"{field.name} is not supported ({unsupported[field.name]}): leave it out")


def _logprob_start(request: pb.GenerateRequest) -> int | None:
    """-1 is SGLang's word for none of the prompt; 0, also when the field is left out, is all of it."""
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
        prompt_logprobs=top if scores_prompt else None,
        n=params.n or 1,
    )


def _logit_bias(by_text: Any) -> dict[int, float]:
    """The protocol's keys are token ids written as texts."""
    bias: dict[int, float] = {}
    for key, value in by_text.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_ID_DIGITS):
            raise InvalidRequest(f"logit_bias has the key {key[:50]!r}, but keys must be token ids, as '42'")
        bias[int(key)] = value
    return bias
