"""The backend for jaxsgl's own `Generate` over gRPC: token ids in, text and ids out.

The prefix cache is flushed through SGLang's service, which runs on the same port.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto import sglang_scheduler_pb2_grpc as sglang_grpc
from smg_grpc_proto.generated import common_pb2

from jaxsgl.bench.backend import FLUSH_WAIT_S, Answer, BackendError, Served, Turn
from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc

NUM_CONNECTIONS = 8
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each channel
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]
ENDS = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)


class GrpcBackend:
    """A `Backend`; must be made inside the event loop.

    Args:
      address: host:port.
      api_key: sent as a bearer token.
      ignore_eos: whether outputs go on after EOS tokens.
      tls: checks the server's certificate; None for a server without TLS.
    """

    def __init__(
        self, address: str, api_key: str | None, ignore_eos: bool, tls: grpc.ChannelCredentials | None = None
    ) -> None:
        self._channels = [_channel(address, tls) for _ in range(NUM_CONNECTIONS)]
        self._stubs = itertools.cycle([pb_grpc.JaxsglStub(channel) for channel in self._channels])
        self._metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._ignore_eos = ignore_eos

    async def describe(self) -> Served:
        """Asks GetModelInfo."""
        stub: Any = next(self._stubs)
        try:
            info = await stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise BackendError(f"no model is known: {_told(error)}") from None
        return Served(info.model_path, info.vocab_size)

    async def generate(self, turn: Turn, answer: Answer) -> None:
        """As `Backend` says."""
        sampling = pb.SamplingParams(max_tokens=turn.output_len, temperature=0.0, ignore_eos=self._ignore_eos)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=turn.prompt_ids()), sampling=sampling, stream=True)
        stub: Any = next(self._stubs)
        ids, complete = answer.output_ids, False
        answer.sent_s = answer.end_s = time.monotonic()
        try:
            async for reply in stub.Generate(request, metadata=self._metadata):
                now_s = time.monotonic()
                ids += reply.token_ids
                answer.add(now_s, reply.text, len(ids))
                if reply.finish_reason:
                    complete = reply.finish_reason in ENDS
                    usage = reply.usage
                    answer.count(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        except grpc.aio.AioRpcError as error:
            answer.error = _told(error)
        answer.finish(complete)

    async def flush_cache(self) -> None:
        """As `Backend` says."""
        stub = sglang_grpc.SglangSchedulerStub(self._channels[0])
        try:
            told = await stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=FLUSH_WAIT_S), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise BackendError(f"the cache was not flushed: {_told(error)}") from None
        if not told.success:
            raise BackendError(f"the cache was not flushed: {told.message}")

    async def close(self) -> None:
        """As `Backend` says."""
        for channel in self._channels:
            await channel.close()


def grpc_tls(ca: str | None) -> grpc.ChannelCredentials:
    """Trusts the certificate in the file `ca`, or the authorities of the system. Raises `OSError`."""
    return grpc.ssl_channel_credentials(None if ca is None else Path(ca).read_bytes())


def _channel(address: str, tls: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(address, OPTIONS)
    return grpc.aio.secure_channel(address, tls, OPTIONS)


def _told(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
