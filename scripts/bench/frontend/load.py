"""The load: a process that opens all streams of a plan, keeps what it receives, checks it, and prints figures as JSON.

    python -m bench.frontend.load PLAN PROTOCOL ADDRESS SERVER_PID

OpenAI's completions come over HTTP, one connection per stream, read by hand: a client library would cost more than the
server. Our own and SGLang's gRPC service share a few connections. Messages stay bytes until the run is over.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeAlias

import grpc
from smg_grpc_proto import sglang_scheduler_pb2 as sglang_pb

from bench.frontend.plan import MODEL, Chunk, Expected, Plan, Received, WrongStream, written
from bench.processes import children, cpu_s
from jaxsgl.frontend.proto import jaxsgl_pb2 as pb

END = b"0\r\n\r\n"  # the end of a chunked body


class _Stream(asyncio.Protocol):
    def __init__(self, request: bytes, add: Callable[[bytes], None]) -> None:
        self._request = request
        self._add = add
        self._tail = b""
        self._transport: asyncio.BaseTransport | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._add(data)
        self._tail = (self._tail + data)[-len(END) :]
        if self._tail == END and self._transport is not None:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def run_http(plan: Plan, address: str, received: list[Received], on_token: Callable[[], None]) -> None:
    """Sends all requests and fills `received`, one per stream; calls `on_token` for every message with tokens."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()

    def adder(of_stream: Received) -> Callable[[bytes], None]:
        def add(data: bytes) -> None:
            of_stream.add(data)
            if b"data:" in data:
                on_token()

        return add

    async def stream(number: int) -> None:
        request = _http_request(plan, number, address)
        _, protocol = await loop.create_connection(lambda: _Stream(request, adder(received[number])), host, int(port))
        await protocol.ended

    await asyncio.gather(*map(stream, range(plan.num_streams)))


def parse_http(received: Received) -> list[Chunk]:
    """The events of a stream. Raises `WrongStream` if the answer is not a complete stream."""
    data = b"".join(part for _, part in received.parts)
    head, _, _ = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200") or not data.endswith(END):
        raise WrongStream(f"no complete answer: {data[:500]!r}")
    chunks: list[Chunk] = []
    last = ""
    for time_s, event in _events(received, len(head) + 4):
        last = event
        if event != "[DONE]":
            choices = json.loads(event)["choices"]
            chunks.append(Chunk(time_s, choices[0]["text"] if choices else "", None))
    if last != "[DONE]":
        raise WrongStream(f"the stream ends with {last!r} instead of [DONE]")
    return chunks


def _events(received: Received, head: int) -> list[tuple[float, str]]:
    """(seconds, data) of the server-sent events. Removes the chunked coding, wherever the network cut the bytes."""
    events: list[tuple[float, str]] = []
    wire = bytearray()
    body = bytearray()
    skip = head
    for time_s, part in received.parts:
        taken = min(skip, len(part))
        skip -= taken
        wire += part[taken:]
        while (line_end := wire.find(b"\r\n")) >= 0:
            size = int(wire[:line_end], 16)
            if len(wire) < line_end + 2 + size + 2:
                break
            body += wire[line_end + 2 : line_end + 2 + size]
            del wire[: line_end + 2 + size + 2]
        while (end := body.find(b"\n\n")) >= 0:
            events.append((time_s, body[:end].decode().removeprefix("data: ")))
            del body[: end + 2]
    return events


def _http_request(plan: Plan, number: int, address: str) -> bytes:
    asked = {
        "model": MODEL,
        "prompt": [number, 1, 2, 3],
        "max_tokens": plan.num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


OWN = "/jaxsgl.v1.Jaxsgl/Generate"
SGLANG = "/sglang.grpc.scheduler.SglangScheduler/Generate"


async def run_grpc(
    method: str, plan: Plan, address: str, received: list[Received], on_token: Callable[[], None]
) -> None:
    """Sends all requests and fills `received`, one per stream; calls `on_token` for every message with tokens."""
    own_connection = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, own_connection) for _ in range(plan.num_connections)]
    calls = [channel.unary_stream(method) for channel in channels]
    request_of = own_request if method == OWN else sglang_request

    async def stream(number: int) -> None:
        of_stream = received[number]
        async for message in calls[number % plan.num_connections](request_of(plan, number).SerializeToString()):
            of_stream.add(message)
            on_token()

    try:
        await asyncio.gather(*map(stream, range(plan.num_streams)))
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


def own_request(plan: Plan, number: int) -> Any:
    """A request to our service; the first id of the prompt is the number of the stream."""
    sampling = pb.SamplingParams(max_tokens=plan.num_tokens, temperature=0, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[number, 1, 2, 3]), sampling=sampling, stream=True)


def sglang_request(plan: Plan, number: int) -> Any:
    """The same request to SGLang's service, as a gateway sends it."""
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
    """The replies of our service. Raises `WrongStream` if the last one does not end the stream."""
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


Run: TypeAlias = Callable[[Plan, str, list[Received], Callable[[], None]], Coroutine[Any, Any, None]]
PROTOCOLS: dict[str, tuple[Run, Callable[[Received], list[Chunk]]]] = {
    "http": (run_http, parse_http),
    "grpc": (functools.partial(run_grpc, OWN), parse_own),
    "sglang": (functools.partial(run_grpc, SGLANG), parse_sglang),
}


class CpuWatch:
    """Measures the processor time of the server, the engine and this process from the first token on."""

    def __init__(self, server_pid: int) -> None:
        engine_pid, *workers = children(server_pid)  # in the order of their start
        self._pids = {"server": server_pid, "engine": engine_pid, "load": os.getpid()}
        self._pids |= {f"worker{number}": pid for number, pid in enumerate(workers, 1)}
        self._start: dict[str, float] = {}

    def start(self) -> None:
        """Starts the measurement; later calls do nothing."""
        if not self._start:
            self._start = self._now()

    def used(self) -> dict[str, float]:
        """Seconds by process; empty if no token arrived."""
        return {name: seconds - self._start[name] for name, seconds in self._now().items() if self._start}

    def _now(self) -> dict[str, float]:
        return {name: cpu_s(pid) for name, pid in self._pids.items()}


def measure(plan: Plan, protocol: str, address: str, server_pid: int) -> dict[str, Any]:
    """Runs the plan once; returns the figures. Raises `WrongStream`."""
    run, parse = PROTOCOLS[protocol]
    received = [Received() for _ in range(plan.num_streams)]
    cpu = CpuWatch(server_pid)
    gc.disable()  # it would walk through all messages kept so far, again and again
    asyncio.run(run(plan, address, received, cpu.start))
    used = cpu.used()
    gc.enable()
    expected = Expected(plan)
    streams = [expected.check(number, parse(of_stream)) for number, of_stream in enumerate(received)]
    workers = [seconds for name, seconds in used.items() if name.startswith("worker")]
    of_lines: list[int] = json.loads(plan.lines_path.read_text())
    return figures(plan, streams) | {
        "server_cpu_s": used["server"] + sum(workers),  # of several front-end processes together, the parent included
        "engine_cpu_s": used["engine"],
        "load_cpu_s": used["load"],
        "workers": [
            {"tokens": plan.num_tokens * streams, "cpu_s": seconds}
            for streams, seconds in zip(of_lines, workers, strict=True)
        ]
        if workers
        else [],
    }


def figures(plan: Plan, streams: Sequence[Sequence[tuple[float, int]]]) -> dict[str, Any]:
    """The figures of a run, from (seconds, tokens so far) for each chunk of each stream."""
    sent_s: list[float] = json.loads(written(plan.steps_path).read_text())
    end_s = max(stream[-1][0] for stream in streams)
    delays_ms, gaps_ms = [], []
    for stream in streams:
        count = 0
        for time_s, until in stream:
            delays_ms += [1e3 * (time_s - sent_s[step]) for step in range(count, until)]
            count = until
        times = [time_s for time_s, _ in stream]
        gaps_ms += [1e3 * (later - earlier) for earlier, later in itertools.pairwise(times)]
    num_tokens = plan.num_streams * plan.num_tokens
    return {
        "tokens": num_tokens,
        "seconds": end_s - sent_s[0],
        "engine_tokens_per_s": num_tokens / max(sent_s[-1] - sent_s[0] + plan.step_s, 1e-6),
        "tokens_per_s": num_tokens / (end_s - sent_s[0]),
        "chunks": sum(map(len, streams)),
        "delay_ms_p50": statistics.median(delays_ms),
        "delay_ms_p99": statistics.quantiles(delays_ms, n=100)[98],
        "gap_ms_p50": statistics.median(gaps_ms),
        "gap_ms_p99": statistics.quantiles(gaps_ms, n=100)[98],
    }


def main() -> None:
    """Runs the load process."""
    plan_path, protocol, address, server_pid = sys.argv[1:]
    print(json.dumps(measure(Plan.load(plan_path), protocol, address, int(server_pid))))


if __name__ == "__main__":
    main()
