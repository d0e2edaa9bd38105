"""SGLang's Generate as gateways use it: chunks, completions, samples, log-probabilities, stops, cancellation."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from fake_engine_process import EOS_ID, LIMITS, Script
from server_process import ServerProcess
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as pb_grpc

from jaxsgl.frontend.tokenizer import Tokenizer

PROMPT = (5, 6, 7, 8)


@pytest.fixture
def sglang(server: ServerProcess) -> Iterator[pb_grpc.SglangSchedulerStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield pb_grpc.SglangSchedulerStub(channel)


def ask(*ids: int, stream: bool = True, request_id: str = "", **sampling: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=ids),
        sampling_params=pb.SamplingParams(**sampling),
        stream=stream,
    )


def refusal(stub: pb_grpc.SglangSchedulerStub, request: pb.GenerateRequest) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return str(caught.value.details())


def test_chunks_hold_increments_and_the_completion_holds_everything(sglang: pb_grpc.SglangSchedulerStub) -> None:
    *chunks, last = sglang.Generate(ask(*PROMPT, max_new_tokens=6, request_id="a"))
    so_far: list[int] = []
    for response in chunks:
        so_far += response.chunk.token_ids
        assert response.chunk.token_ids
        assert response.chunk.completion_tokens == len(so_far)
        assert (response.chunk.prompt_tokens, response.chunk.cached_tokens) == (4, 2)
    assert so_far == [5, 6, 7, 8, 5, 6]
    assert {response.request_id for response in [*chunks, last]} == {"a"}
    complete = last.complete
    assert list(complete.output_ids) == so_far
    assert (complete.finish_reason, complete.WhichOneof("matched_stop")) == ("length", None)
    assert (complete.prompt_tokens, complete.cached_tokens, complete.completion_tokens) == (4, 2, 6)
