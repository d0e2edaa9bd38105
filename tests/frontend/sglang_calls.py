"""How tests speak SGLang's protocol with a server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from server_process import ServerProcess
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc as pb_grpc


@contextlib.contextmanager
def sglang_stub(server: ServerProcess) -> Iterator[pb_grpc.SglangSchedulerStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield pb_grpc.SglangSchedulerStub(channel)


def ask(
    *ids: int,
    stream: bool = True,
    request_id: str = "",
    of_request: dict[str, Any] | None = None,
    **sampling: Any,
) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=ids),
        sampling_params=pb.SamplingParams(**sampling),
        stream=stream,
        **(of_request or {}),
    )


def completions(stub: pb_grpc.SglangSchedulerStub, request: pb.GenerateRequest) -> list[pb.GenerateComplete]:
    """The completions of all samples, in their order."""
    answers = [answer.complete for answer in stub.Generate(request) if answer.WhichOneof("response") == "complete"]
    assert [answer.index for answer in sorted(answers, key=lambda answer: answer.index)] == list(range(len(answers)))
    return sorted(answers, key=lambda answer: answer.index)


def refusal(stub: pb_grpc.SglangSchedulerStub, request: pb.GenerateRequest) -> str:
    """The message of the INVALID_ARGUMENT that `request` must get."""
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value
    return str(caught.value.details())
