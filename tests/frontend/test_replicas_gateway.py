"""The real gateway over one server of two replicas, as one worker and as a worker per rank (--dp-aware)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from http_calls import connect
from server_process import ServerProcess
from test_workers import metrics

from tests.end_to_end.gateway import running_gateway, wait_for

pytestmark = pytest.mark.foreign


@pytest.fixture(scope="module")
def server(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(
        tmp_path_factory.mktemp("replicas"), model_folder, "--dp-size", "2", "--served-model-name", "tiny"
    )
    server.wait_until_ready()
    yield server
    server.end()


@pytest.mark.parametrize(("flags", "targets"), [((), 1), (("--dp-aware",), 2)], ids=["one_worker", "a_worker_per_rank"])
def test_a_gateway_serves_with_both_replicas(
    server: ServerProcess, tmp_path: Path, flags: tuple[str, ...], targets: int
) -> None:
    def counts() -> list[float]:
        with connect(server) as http:
            seen = metrics(http)
        return [seen[f"jaxsgl:replica_prompt_tokens_total.{rank}"] for rank in (0, 1)]

    before = counts()
    with running_gateway(tmp_path, [server.address], flags) as gateway:
        wait_for(lambda: len(gateway.healthy()) == targets, "healthy targets")
        for group in range(8):
            prompt = [10 + group] * 40
            body = {"model": "tiny", "input_ids": prompt, "sampling_params": {"max_new_tokens": 3}}
            answer = httpx.post(f"{gateway.url}/generate", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.json()[0]["output_ids"] == prompt[:3]
    assert all(now > then for now, then in zip(counts(), before, strict=True)), "both replicas work"
