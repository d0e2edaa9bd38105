"""Malformed gRPC calls to every method of both services."""

from __future__ import annotations

import random

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from smg_grpc_proto import sglang_scheduler_pb2 as sglang_pb

from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from tests.junk_messages import junk_bytes, junk_message, request_class, spoil

SERVICES = (pb.DESCRIPTOR.services_by_name["Jaxsgl"], sglang_pb.DESCRIPTOR.services_by_name["SglangScheduler"])
METHODS = [method for service in SERVICES for method in service.methods]
# The statuses that may answer a message: not INTERNAL, UNKNOWN or DATA_LOSS; nor UNAVAILABLE or DEADLINE_EXCEEDED.
# PERMISSION_DENIED: a server without --profile-dir records no profiles.
ALLOWED = {
    "OK", "INVALID_ARGUMENT", "UNIMPLEMENTED", "NOT_FOUND", "OUT_OF_RANGE", "RESOURCE_EXHAUSTED", "PERMISSION_DENIED",
}  # fmt: skip
PATIENCE_S = 120.0


def sensible(method: MethodDescriptor) -> Message:
    """A good message, so that spoiled ones fail late."""
    if method.full_name == "jaxsgl.v1.Jaxsgl.Generate":
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), sampling=pb.SamplingParams(max_tokens=4))
    if method.full_name == "sglang.grpc.scheduler.SglangScheduler.Generate":
        return sglang_pb.GenerateRequest(
            tokenized=sglang_pb.TokenizedInput(input_ids=[5, 6]),
            sampling_params=sglang_pb.SamplingParams(max_new_tokens=4),
        )
    return request_class(method)()


def some_bytes(rng: random.Random, method: MethodDescriptor) -> bytes:
    """Any message; or a good one with one or two fields spoiled; or no message at all."""
    kind = request_class(method)
    message = junk_message(rng, kind, rng.choice([0.05, 0.2, 0.7]))
    if rng.random() < 0.5 and kind.DESCRIPTOR.fields:
        message = sensible(method)
        for _ in range(rng.randint(1, 2)):
            spoil(rng, message)
    return junk_bytes(rng, message) if rng.random() < 0.2 else message.SerializeToString()


def status(channel: grpc.Channel, method: MethodDescriptor, data: bytes) -> str:
    """The status that a call ends with."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    try:
        if not method.server_streaming:
            channel.unary_unary(path)(data, timeout=PATIENCE_S)
        else:
            call = channel.unary_stream(path)(data, timeout=PATIENCE_S)
            for _ in call:
                if method.name == "SubscribeKvEvents":  # it has no end
                    call.cancel()
                    return "OK"
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"
