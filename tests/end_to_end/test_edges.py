"""By night: 20,000 requests with fields at the edges of their types to a real server of the bundled model."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import grpc
import httpx
import pytest

from tests import edges
from tests.end_to_end.apis import PATIENCE_S
from tests.end_to_end.servers import RunningServer, check_log, running_server
from tests.grids import NIGHTLY

FLAGS = (
    "--max-running-requests", "32", "--decode-buckets", "4,32", "--extend-buckets", "64", "--context-length", "48",
    "--chunked-prefill-size", "64", "--max-total-tokens", "2048", "--page-size", "4", "--check-every-step",
)  # fmt: skip
SETS = 4_000
AT_ONCE = 24


async def send_all(server: RunningServer, seed: int, num_sets: int) -> Counter[object]:
    """Sends random sets; returns how often each status came. Fails at the first that should not come."""
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with (
        httpx.AsyncClient(base_url=f"http://{server.http_address}", timeout=PATIENCE_S, limits=limits) as http,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        openapi = (await http.get("/openapi.json")).json()
        statuses: Counter[object] = Counter()
        for _ in range(0, num_sets, 1000):
            sets = [edges.random_set(rng, openapi) for _ in range(1000)]
            statuses += await edges.statuses_of(http, channel, sets, AT_ONCE)
        return statuses


@pytest.mark.timeout(3600)
@pytest.mark.skipif(not NIGHTLY, reason="takes minutes; tests/frontend/test_edges.py sends fewer, by day")
def test_thousands_of_random_sets_leave_the_server_up(tmp_path: Path) -> None:
    with running_server(tmp_path, FLAGS) as server:
        statuses = asyncio.run(send_all(server, 20_000, SETS))
        metrics = httpx.get(f"http://{server.http_address}/metrics").text
        good = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        answer = httpx.post(f"http://{server.http_address}/generate", json=good, timeout=PATIENCE_S).json()
        assert len(answer["output_ids"]) == 3
        assert "jaxsgl:failed_requests_total" in metrics
        assert not [line for line in metrics.splitlines() if "failed_requests_total{" in line and line[-4:] != " 0.0"]
        check_log(server)
    assert sum(statuses.values()) == SETS
    print(dict(statuses))
