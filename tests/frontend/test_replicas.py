"""Several engine processes behind one address (--dp-size): one server to its clients, and one death ends few calls."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine_process import Script
from http_calls import connect, generate_body, refusal
from server_process import ServerProcess, wait_for
from sglang_calls import ask as sglang_ask
from sglang_calls import sglang_stub
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import common_pb2
from test_workers import metrics

Start = Callable[..., ServerProcess]
TWO = ("--dp-size", "2")
END_S = 2.0  # for the calls of a replica that was killed


@pytest.fixture(scope="module")
def server(ids_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server of two replicas, for the tests that leave it alive."""
    server = ServerProcess(tmp_path_factory.mktemp("replicas"), ids_folder, *TWO)
    server.wait_until_ready()
    yield server
    server.end()


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with connect(server) as http:
        yield http


def at(rank: int, *ids: int, **sampling: Any) -> dict[str, Any]:
    return generate_body(*ids, **sampling) | {"data_parallel_rank": rank}


def loads(http: httpx.Client) -> list[int]:
    return [load["num_reqs"] for load in http.get("/get_load").json()]


def hold(server: ServerProcess, rank: int, rid: str, ends: dict[str, tuple[float, str]]) -> threading.Thread:
    """Starts a stream that never ends by itself; notes when it ended, and its last event."""

    def run() -> None:
        last = ""
        with connect(server) as http:
            body = at(rank, Script.PAUSE, stream=True) | {"rid": rid}
            with suppress(httpx.RemoteProtocolError), http.stream("POST", "/generate", json=body) as answer:
                for line in answer.iter_lines():
                    last = line or last
        ends[rid] = (time.monotonic(), last)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_orders_reach_all_replicas(server: ServerProcess, http: httpx.Client) -> None:
    ends: dict[str, tuple[float, str]] = {}
    calls = [hold(server, rank, f"s{rank}", ends) for rank in (0, 1)]
    wait_for(lambda: loads(http) == [1, 1], "load")
    assert refusal(http, "/flush_cache")["message"] == "the cache was not flushed: 1 requests wait or run"
    assert http.post("/abort_request", json={"rid": "s0"}).json() == {"num_aborted": 1}
    wait_for(lambda: loads(http) == [0, 1], "end")
    told = refusal(http, "/flush_cache")["message"]
    assert told == "the cache was not flushed: replica 1: 1 requests wait or run; it was done on replica 0"
    assert http.post("/abort_request", json={"abort_all": True}).json() == {"num_aborted": 1}
    wait_for(lambda: loads(http) == [0, 0], "end")
    for call in calls:
        call.join()
    assert http.post("/pause_generation").status_code == 200
    assert [state["paused"] for state in http.get("/server_info").json()["internal_states"]] == [True, True]
    assert http.post("/continue_generation").status_code == 200
    assert len(http.get("/internal_state").json()) == 2
    updated = http.post("/update_weights_from_disk", json={"model_path": "/weights/a", "weight_version": "9"})
    assert updated.json()["message"] == "the weights of /weights/a are served as version 9"
    assert http.post("/update_weights_from_disk", json={"model_path": "/none"}).json()["message"] == (
        "no weights in /none"
    )


def test_gateways_see_each_rank(server: ServerProcess) -> None:
    with sglang_stub(server) as stub:
        assert stub.GetServerInfo(pb.GetServerInfoRequest()).server_args["dp_size"] == 2
        all_loads = stub.GetLoads(pb.GetLoadsRequest())
        assert (all_loads.dp_rank_count, [load.dp_rank for load in all_loads.loads]) == (2, [0, 1])
        assert [load.dp_rank for load in stub.GetLoads(pb.GetLoadsRequest(dp_rank=1)).loads] == [1]
        call = stub.Generate(sglang_ask(Script.FOREVER, of_request={"data_parallel_rank": 1}))
        next(call)
        wait_for(
            lambda: [load.num_running_reqs for load in stub.GetLoads(pb.GetLoadsRequest()).loads] == [0, 1], "load"
        )
        call.cancel()
        events = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        snapshot = [next(events), next(events)]
        assert [(chunk.dp_rank, chunk.snapshot.index, chunk.snapshot.count) for chunk in snapshot] == [
            (0, 0, 2),
            (1, 1, 2),
        ]
        numbers = [chunk.sequence_number for chunk in snapshot]
        assert numbers[1] == numbers[0] + 1
        assert stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5)).success
        cleared = [batch for batch in (next(events) for _ in range(10)) if batch.events]
        assert sorted(batch.dp_rank for batch in cleared) == [0, 1]
        assert sorted(batch.sequence_number for batch in cleared) == [numbers[1] + 1, numbers[1] + 2]
        events.cancel()


@pytest.mark.parametrize("flags", [(), ("--tokenizer-worker-num", "2")], ids=["one_front_end", "two_front_ends"])
def test_a_replica_killed_under_load_ends_its_calls_alone(start_server: Start, flags: tuple[str, ...]) -> None:
    server = start_server(*TWO, *flags)
    pids = [int(server.wait_for_log(rf"engine {rank} is process (\d+)").group(1)) for rank in (0, 1)]
    server.wait_until_ready()
    ends: dict[str, tuple[float, str]] = {}
    calls = [hold(server, number % 2, f"held{number}", ends) for number in range(8)]
    with connect(server) as http:
        wait_for(lambda: loads(http) == [4, 4], "load")
        os.kill(pids[1], signal.SIGKILL)
        killed_s = time.monotonic()
        wait_for(lambda: len(ends) == 4, "ends of the calls")
        assert set(ends) == {"held1", "held3", "held5", "held7"}
        assert max(end_s for end_s, _ in ends.values()) - killed_s < END_S
        assert all("was killed by signal 9" in last for _, last in ends.values()), ends
        told = wait_for(lambda: http.get("/health").json().get("problems"), "problems in /health")
        assert http.get("/health").status_code == 200
        (problem,) = told
        assert problem.startswith(f"replica 1: the engine process {pids[1]} was killed")
        seen = metrics(http)
        assert (seen["jaxsgl:replica_up.0"], seen["jaxsgl:replica_up.1"]) == (1, 0)
        assert seen["sglang:num_running_reqs"] == 4
        for number in range(4):  # new ones are served
            answer = http.post("/generate", json=generate_body(20 + number, 30, max_new_tokens=3))
            assert answer.status_code == 200, answer.text
        assert loads(http) == [4, 0]
    if flags:  # a worker that starts now learns that a replica is dead
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        workers = [
            int(pid)
            for pid in children
            if "jaxsgl.frontend.workers.process" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: len(ends) == 8, "ends of all calls")
        with connect(server) as http:
            assert http.post("/generate", json=generate_body(5, max_new_tokens=3)).status_code == 200
            assert http.get("/health").json()["problems"] == [problem]
    os.kill(pids[0], signal.SIGKILL)
    assert server.wait_for_exit() == 1
    for call in calls:
        call.join(timeout=5)
    assert len(ends) == 8


def test_a_replica_that_hangs_is_ended_and_the_other_serves_on(start_server: Start) -> None:
    server = start_server(*TWO, "--watchdog-s", "0.4")
    server.wait_until_ready()
    with connect(server) as http:
        failed = http.post("/generate", json=at(1, Script.STICK))
        assert failed.status_code == 503 and "no sign of life" in failed.text
        wait_for(lambda: http.get("/health").json().get("problems"), "problems in /health")
        assert http.post("/generate", json=generate_body(7, max_new_tokens=3)).status_code == 200
        assert "fake_engine_process.py" in server.log, "the stacks of the replica"
