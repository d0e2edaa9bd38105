"""Malformed gRPC messages to every method of both services: all are answered, none with a server error."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from server_process import ServerProcess, ids_request

from tests.junk_grpc import ALLOWED, METHODS, PATIENCE_S, some_bytes, status

MESSAGES = 200  # for each method
THREADS = 8


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.full_name)
def test_every_message_is_answered_and_none_with_a_server_error(
    server: ServerProcess, method: MethodDescriptor
) -> None:
    rng = random.Random(method.full_name)
    messages = [some_bytes(rng, method) for _ in range(MESSAGES)]
    start = len(server.log)
    with grpc.insecure_channel(server.address) as channel, ThreadPoolExecutor(THREADS) as pool:
        statuses = list(pool.map(lambda data: status(channel, method, data), messages))
    assert not [(data, code) for data, code in zip(messages, statuses, strict=True) if code not in ALLOWED]
    assert "INVALID_ARGUMENT" in statuses
    assert "Traceback" not in server.log[start:]
    with server.stub() as stub:
        (reply,) = stub.Generate(ids_request(5, 6, 7, stream=False, max_tokens=4), timeout=PATIENCE_S)
        assert list(reply.token_ids) == [5, 6, 7, 5]
