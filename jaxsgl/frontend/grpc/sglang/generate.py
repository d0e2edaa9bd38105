"""The pieces of one call as SGLang's GenerateResponse messages: chunks while tokens come, a completion per sample.

Owns what of each sample has come so far, since a completion repeats all of it. Knows nothing of the engine;
service.py feeds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from smg_grpc_proto import sglang_scheduler_pb2 as pb

from jaxsgl.frontend.grpc.sglang.sampling import Wish
from jaxsgl.messages import TokenLogprob
from jaxsgl.request import FinishReason
from jaxsgl.text.sample import End, Piece


class Responses:
    """Turns pieces into responses, for one call."""

    def __init__(self, request_id: str, wish: Wish, prompt_ids: Sequence[int]) -> None:
        self._request_id = request_id
        self._wish = wish
        self._prompt_ids = prompt_ids
        self._samples = [_Sample() for _ in range(wish.sampling.n)]

    def of(self, piece: Piece) -> Iterator[pb.GenerateResponse]:
        """What is to be sent now that `piece` has come: nothing yet, a chunk, a completion, or both."""
        sample = self._samples[piece.index]
        if not self._wish.prefill_only:
            sample.ids += piece.token_ids
            sample.logprobs += piece.logprobs
        if piece.prompt_logprobs is not None:
            sample.prompt_logprobs = piece.prompt_logprobs
        num_new = len(sample.ids) - sample.num_sent
        if self._wish.stream and num_new and (piece.end or not sample.num_sent or num_new >= self._wish.chunk_tokens):
            yield self._chunk(sample, piece)
            sample.num_sent = len(sample.ids)
        if piece.end is not None:
            yield self._complete(sample, piece.end, piece.index)

    def _chunk(self, sample: _Sample, piece: Piece) -> pb.GenerateResponse:
        """Filled in place: a third of the time of keyword arguments, and this runs for every token."""
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
        )
        if self._wish.prefill_only and end.reason is not FinishReason.ABORT:
            complete.finish_reason = FinishReason.LENGTH.value
        elif isinstance(end.matched_stop, str):
            complete.matched_stop_str = end.matched_stop
        elif end.matched_stop is not None:
            complete.matched_token_id = end.matched_stop
        if sample.logprobs:
            complete.output_logprobs.CopyFrom(self._output_logprobs(sample.ids, sample.logprobs))
        if sample.prompt_logprobs is not None:
            complete.input_logprobs.CopyFrom(self._input_logprobs(sample.prompt_logprobs))
        return pb.GenerateResponse(request_id=self._request_id, complete=complete)

    def _output_logprobs(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> pb.OutputLogProbs:
        return pb.OutputLogProbs(
            token_logprobs=[of_token.logprob for of_token in logprobs],
            token_ids=ids,
            top_logprobs=map(_top, logprobs) if self._wish.sampling.logprobs else (),
        )

    def _input_logprobs(self, of_prompt: Sequence[TokenLogprob]) -> pb.InputLogProbs:
        """Of the positions from `logprob_start` on. Nothing stands before token 0, so its entry has no value."""
        start = self._wish.logprob_start or 0
        known = of_prompt[max(start - 1, 0) :]
        values = [pb.InputTokenLogProb(value=of_token.logprob) for of_token in known]
        tops = [_top(of_token) for of_token in known]
        if start == 0:
            values.insert(0, pb.InputTokenLogProb())
            tops.insert(0, pb.TopLogProbs())
        return pb.InputLogProbs(
            token_logprobs=values,
            token_ids=self._prompt_ids[start:],
            top_logprobs=tops if self._wish.sampling.prompt_logprobs else (),
        )


class _Sample:
    """What has come of one sample; `num_sent` tokens of it went out in chunks."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: tuple[TokenLogprob, ...] | None = None
        self.num_sent = 0


def _top(of_token: TokenLogprob) -> pb.TopLogProbs:
    return pb.TopLogProbs(
        values=[logprob for _, logprob in of_token.top], token_ids=[token_id for token_id, _ in of_token.top]
    )
