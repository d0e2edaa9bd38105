"""SGLang's two protocols, each an `Api`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as pb_grpc

from jaxsgl.requests.request import SamplingParams
from tests.end_to_end.apis import PATIENCE_S, Answer, OverHttp, Prompt, Sample, given, same_names

SGLANG_NAMES = same_names(
    "temperature", "top_k", "top_p", "min_p", "n", "stop", "ignore_eos", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "stop_token_ids",
    seed="sampling_seed", max_tokens="max_new_tokens", min_tokens="min_new_tokens",
    include_stop_str_in_output="no_stop_trim",
)  # fmt: skip


class SglangHttp(OverHttp):
    """/generate."""

    def ask(self, prompt: Prompt, params: SamplingParams, stream: bool) -> Answer:
        sampling = given(params, SGLANG_NAMES)
        if params.logit_bias:
            sampling["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
        body: dict[str, Any] = {"text" if isinstance(prompt, str) else "input_ids": prompt, "sampling_params": sampling}
        if params.logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": params.logprobs}
            body |= {} if params.prompt_logprobs is None else {"logprob_start_len": 0}
        deltas = [0] * params.n
        if stream:
            last: dict[int, dict[str, Any]] = {}
            for event in self.stream("/generate", body):
                index = event.get("index", 0)
                self._check_growth(last.get(index), event)
                deltas[index] += 1
                last[index] = event
            choices = [last[index] for index in range(params.n)]
        else:
            whole = self.post("/generate", body)
            choices = whole if params.n > 1 else [whole]
        (prompt_tokens,) = {choice["meta_info"]["prompt_tokens"] for choice in choices}
        samples = [self._sample(choice, count) for choice, count in zip(choices, deltas, strict=True)]
        output_tokens = sum(choice["meta_info"]["completion_tokens"] for choice in choices)
        return Answer(samples, prompt_tokens, output_tokens)

    @staticmethod
    def _check_growth(before: dict[str, Any] | None, now: dict[str, Any]) -> None:
        if before is not None:
            assert before["meta_info"]["finish_reason"] is None, "an event behind the end of its choice"
            assert now["text"].startswith(before["text"])
            assert now["output_ids"][: len(before["output_ids"])] == before["output_ids"]
            grown = len(now["output_ids"]) > len(before["output_ids"])
            assert grown or now["meta_info"]["finish_reason"], "an event without news"

    @staticmethod
    def _sample(choice: dict[str, Any], deltas: int) -> Sample:
        meta = choice["meta_info"]
        reason = meta["finish_reason"]
        own, ids = meta.get("output_token_logprobs", []), choice["output_ids"]
        assert not own or [entry[1] for entry in own] == ids
        sample = Sample(choice["text"], ids, reason["type"], reason.get("matched"), deltas=deltas)
        sample.logprobs = [entry[0] for entry in own]
        sample.top = [[entry[0] for entry in top] for top in meta.get("output_top_logprobs", [[]] * len(own))]
        of_prompt = meta.get("input_token_logprobs", [])
        if of_prompt:
            assert of_prompt[0][0] is None
            sample.prompt_logprobs = [entry[0] for entry in of_prompt[1:]]
            tops = meta.get("input_top_logprobs", [None] + [[]] * len(sample.prompt_logprobs))
            sample.prompt_top = [[entry[0] for entry in top] for top in tops[1:]]
        return sample


class SglangGrpc:
    """sglang.grpc.scheduler: ids only, no text and no seeds."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = pb_grpc.SglangSchedulerStub(channel)

    def ask(self, prompt: Prompt, params: SamplingParams, stream: bool) -> Answer:
        assert params.seed is None, "the protocol has no field for it"
        names = {ours: theirs for ours, theirs in SGLANG_NAMES.items() if ours not in ("seed", "temperature")}
        bias = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
        request = pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=prompt),
            sampling_params=pb.SamplingParams(temperature=params.temperature, logit_bias=bias, **given(params, names)),
            stream=stream,
            return_logprob=params.logprobs is not None,
            top_logprobs_num=params.logprobs or 0,
            logprob_start_len=-1 if params.prompt_logprobs is None else 0,
        )
        chunked = [Sample(ids=[]) for _ in range(params.n)]
        completed: dict[int, pb.GenerateComplete] = {}
        for response in self._stub.Generate(request, timeout=PATIENCE_S):
            if response.WhichOneof("response") == "complete":
                assert response.complete.index not in completed
                completed[response.complete.index] = response.complete
            else:
                assert stream
                assert response.chunk.index not in completed, "a chunk behind the completion"
                self._add(chunked[response.chunk.index], response.chunk)
        assert sorted(completed) == list(range(params.n))
        samples = [self._sample(completed[index]) for index in range(params.n)]
        for sample, of_chunks in zip(samples, chunked, strict=True) if stream else ():
            assert of_chunks.ids == sample.ids
            assert of_chunks.logprobs == sample.logprobs
            sample.deltas = of_chunks.deltas
        (prompt_tokens,) = {complete.prompt_tokens for complete in completed.values()}
        return Answer(samples, prompt_tokens, sum(complete.completion_tokens for complete in completed.values()))

    @staticmethod
    def _add(sample: Sample, chunk: pb.GenerateStreamChunk) -> None:
        assert chunk.token_ids, "an empty chunk"
        assert sample.ids is not None
        sample.ids += chunk.token_ids
        assert chunk.completion_tokens == len(sample.ids)
        assert not chunk.output_logprobs.token_logprobs or chunk.output_logprobs.token_ids == chunk.token_ids
        sample.logprobs += chunk.output_logprobs.token_logprobs
        sample.deltas += 1

    @staticmethod
    def _sample(complete: pb.GenerateComplete) -> Sample:
        sample = Sample(ids=list(complete.output_ids), reason=complete.finish_reason)
        kind = complete.WhichOneof("matched_stop")
        sample.matched = None if kind is None else getattr(complete, kind)
        scores, of_prompt = complete.output_logprobs, complete.input_logprobs
        sample.logprobs = list(scores.token_logprobs)
        sample.top = _tops(scores.top_logprobs, len(sample.logprobs))
        if of_prompt.token_logprobs:
            assert not of_prompt.token_logprobs[0].HasField("value")
            sample.prompt_logprobs = [entry.value for entry in of_prompt.token_logprobs[1:]]
            sample.prompt_top = _tops(of_prompt.top_logprobs[1:], len(sample.prompt_logprobs))
        return sample


def _tops(tops: Iterable[pb.TopLogProbs], count: int) -> list[list[float]]:
    return [list(top.values) for top in tops] or [[]] * count
