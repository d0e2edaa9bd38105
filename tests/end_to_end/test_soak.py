"""A long run of mixed load on the real engine: memory, files and threads of both processes stay as they are."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc
from tests.end_to_end.servers import RunningServer, check_log, running_server
from tests.grids import NIGHTLY
from tests.junk_http import exchange, junk_request

SOAK_S = float(os.environ.get("JAXSGL_TEST_SOAK_S", "3600"))
CLIENTS = 8
LOOKS = 60
MAX_GROWTH_MIB = 16.0  # of a process from the second fifth of the run to the last
FLAGS = (
    *("--max-running-requests", "8", "--decode-buckets", "8", "--extend-buckets", "128", "--chunked-prefill-size"),
    *("128", "--max-total-tokens", "4096", "--log-level", "info"),
    *("--served-model-name", "m"),
)


@dataclass(frozen=True)
class Look:
    """What one process uses at a time."""

    mib: float
    files: int
    threads: int


def look_at(pid: int) -> Look:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Look(int(status["VmRSS"].split()[0]) / 1024, files, int(status["Threads"]))


class Client:
    """Sends one request after the other, of all kinds; leaves some of them."""

    def __init__(self, server: RunningServer, seed: int) -> None:
        self._rng = random.Random(seed)
        self._address = server.http_address
        self._grpc = server.address
        self.num_done = 0

    async def run(self, end_s: float) -> None:
        limits = httpx.Limits(max_connections=2)
        url = f"http://{self._address}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=120.0, limits=limits) as self._http,
            grpc.aio.insecure_channel(self._grpc) as channel,
        ):
            self._channel = channel
            kinds: list[Callable[[], Awaitable[None]]] = [
                self._whole, self._stream, self._chat, self._leave,
                self._leave_grpc, self._call, self._junk, self._probe,
            ]  # fmt: skip
            while time.monotonic() < end_s:
                await self._rng.choice(kinds)()
                self.num_done += 1

    def _ids(self) -> list[int]:
        """A prompt that often begins as others do."""
        start = [7] * self._rng.choice([0, 16, 64])
        return start + [self._rng.randrange(3, 900) for _ in range(self._rng.randint(1, 60))]

    def _body(self, stream: bool) -> dict[str, object]:
        sampling = {"max_new_tokens": self._rng.randint(1, 40), "temperature": self._rng.choice([0, 1.0])}
        return {"input_ids": self._ids(), "sampling_params": sampling, "stream": stream}

    async def _whole(self) -> None:
        assert (await self._http.post("/generate", json=self._body(False))).status_code == 200

    async def _stream(self) -> None:
        assert "[DONE]" in (await self._http.post("/generate", json=self._body(True))).text

    async def _chat(self) -> None:
        message = {"role": "user", "content": f"Question {self._rng.random()}?"}
        body = {"model": "m", "messages": [message], "max_tokens": 10, "n": 2, "logprobs": True}
        assert (await self._http.post("/v1/chat/completions", json=body)).status_code == 200

    async def _leave(self) -> None:
        async with self._http.stream("POST", "/generate", json=self._body(True)) as answer:
            async for _ in answer.aiter_lines():
                break

    async def _leave_grpc(self) -> None:
        call = self._start_call()
        await asyncio.sleep(self._rng.random() * 0.05)
        call.cancel()

    async def _call(self) -> None:
        assert [reply async for reply in self._start_call()]

    def _start_call(self) -> grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateReply]:
        sampling = pb.SamplingParams(max_tokens=self._rng.randint(1, 40))
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=self._ids()), stream=True, sampling=sampling)
        return pb_grpc.JaxsglStub(self._channel).Generate(request)

    async def _junk(self) -> None:
        with contextlib.suppress(ConnectionError):
            await exchange(self._address, junk_request(self._rng), leave=self._rng.random() < 0.5)

    async def _probe(self) -> None:
        assert (await self._http.get("/health_generate")).status_code == 200
        assert (await self._http.get("/metrics")).status_code == 200
        async with grpc.aio.insecure_channel(self._grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())


@pytest.mark.skipif(not NIGHTLY, reason="takes an hour, or JAXSGL_TEST_SOAK_S seconds")
@pytest.mark.timeout(SOAK_S + 900)
def test_memory_stays_flat_under_mixed_load(tmp_path: Path) -> None:
    with running_server(tmp_path, FLAGS) as server:
        pids = {"front end": server.process.pid, "engine": server.engine_pid}
        looks: dict[str, list[Look]] = {name: [] for name in pids}

        async def scenario() -> int:
            end_s = time.monotonic() + SOAK_S
            clients = [Client(server, seed) for seed in range(CLIENTS)]
            running = asyncio.gather(*(client.run(end_s) for client in clients))
            while not running.done() and time.monotonic() < end_s:
                await asyncio.wait([running], timeout=SOAK_S / LOOKS)
                for name, pid in pids.items():
                    looks[name].append(look_at(pid))
            await running
            return sum(client.num_done for client in clients)

        num_done = asyncio.run(scenario())
        metrics = httpx.get(f"http://{server.http_address}/metrics").text
        check_log(server)

    grown = {name: (_mean_of(of, 1, "mib"), _mean_of(of, 4, "mib")) for name, of in looks.items()}
    print(f"{num_done} requests in {SOAK_S:.0f} s; MiB in the second and the last fifth: {grown}")
    for name, (before, after) in grown.items():
        assert after - before < MAX_GROWTH_MIB, (name, [round(look.mib, 1) for look in looks[name]])
        for what in ("files", "threads"):
            assert _mean_of(looks[name], 4, what) - _mean_of(looks[name], 1, what) < 8, (name, what)
    for counter in ("jaxsgl:leaks_total", "jaxsgl:recompiles_total"):
        (line,) = (line for line in metrics.splitlines() if line.startswith(f"{counter}{{"))
        assert float(line.split()[-1]) == 0


def _mean_of(looks: list[Look], fifth: int, what: str) -> float:
    """The mean in that fifth of the run, 0 to 4."""
    size = len(looks) // 5
    return statistics.mean(getattr(look, what) for look in looks[fifth * size : (fifth + 1) * size])
