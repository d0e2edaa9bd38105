"""Streams of our own and of SGLang's gRPC service, many on a connection. Messages stay bytes until the run is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from smg_grpc_proto import sglang_scheduler_pb2 as sglang_pb

from bench.frontend.plan import Plan
from bench.frontend.received import Chunk, Received, WrongStream
from jaxsgl.frontend.proto import jaxsgl_pb2 as pb

OWN = "/jaxsgl.v1.Jaxsgl/Generate"
SGLANG = "/sglang.grpc.scheduler.SglangScheduler/Generate"
NUM_CONNECTIONS = 8


async def run(method: str, plan: Plan, address: str, received: list[Received], on_token: Callable[[], None]) -> None:
    """Fills `received`, one per stream; `on_token` is called when there are tokens, again and again."""
    own_connection = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, own_connection) for _ in range(NUM_CONNECTIONS)]
    calls = [channel.unary_stream(method) for channel in channels]
    request_of = own_request if method == OWN else sglang_request

    async def stream(number: int) -> None:
        of_stream = received[number]
        async for message in calls[number % NUM_CONNECTIONS](request_of(plan, number).SerializeToString()):
            of_stream.add(message)
            on_token()

    try:
        await asyncio.gather(*map(stream, range(plan.num_streams)))
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


def own_request(plan: Plan, number: int) -> Any:
    """A request of our service; the prompt's first id is the stream's number."""
    sampling = pb.SamplingParams(max_tokens=plan.num_tokens, temperature=0, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[number, 1, 2, 3]), sampling=sampling, stream=True)


def sglang_request(plan: Plan, number: int) -> Any:
    """The same for SGLang's service, as a gateway sends it."""
    return sglang_pb.GenerateRequest(
        request_id=f"bench-{number}",
        tokenized=sglang_pb.TokenizedInput(input_ids=[number, 1, 2, 3]),
        sampling_params=sglang_pb.SamplingParams(
            temperature=0, top_p=1, top_k=-1, repetition_penalty=1, n=1, max_new_tokens=plan.num_tokens, ignore_eos=True
        ),
        logprob_start_len=-1,
        stream=True,
    )


def parse_own(received: Received) -> list[Chunk]:
    """The replies of our service. Raises `WrongStream` if the last one doesn't end the stream."""
    replies = [(time_s, pb.GenerateReply.FromString(data)) for time_s, data in received.parts]
    if not replies or replies[-1][1].finish_reason != pb.FINISH_REASON_LENGTH:
        raise WrongStream(f"no end after {len(replies)} replies")
    return [Chunk(time_s, reply.text, reply.token_ids) for time_s, reply in replies]


def parse_sglang(received: Received) -> list[Chunk]:
    """The chunks of SGLang's service. Raises `WrongStream` if no `complete` ends the stream."""
    replies = [(time_s, sglang_pb.GenerateResponse.FromString(data)) for time_s, data in received.parts]
    if not replies or replies[-1][1].complete.finish_reason != "length":
        raise WrongStream(f"no end after {len(replies)} replies")
    return [Chunk(time_s, None, reply.chunk.token_ids) for time_s, reply in replies]
