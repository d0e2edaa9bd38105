"""Several front-end processes on one engine: what must look like one server, and what must stay apart."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import re
import signal
import sys
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from fake_engine_process import Script
from grpc_health.v1 import health_pb2, health_pb2_grpc
from http_calls import connect, generate_body, report
from prometheus_client.parser import text_string_to_metric_families as parse_text
from server_process import PATIENCE_S, ROOT, ServerProcess, is_alive, wait_for
from smg_grpc_proto import sglang_scheduler_pb2_grpc as sglang_grpc
from smg_grpc_proto.generated import common_pb2

from jaxsgl.config.engine import EngineConfig, Limits
from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import StartupError
from jaxsgl.frontend.server import live
from jaxsgl.frontend.workers.parent import MAX_DEATHS, WorkerProcess, Workers
from jaxsgl.messages.replies import EngineInfo, EngineReady, Load, Replies

Start = Callable[..., ServerProcess]
HERE = Path(__file__).parent
INFO = EngineInfo("m", "FakeForCausalLM", "float32", Limits(1000, 200, 160), (1,), 16, 8, "xla", "cpu", 1, 1, 0)
FAKE_ENGINE = (sys.executable, str(HERE / "fake_engine_process.py"))
TWO = ("--tokenizer-worker-num", "2")


def pids(server: ServerProcess) -> dict[str, int]:
    """The processes of a server, by the names that they have in its log."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    named = {}
    for pid in children:
        command = Path(f"/proc/{pid}/cmdline").read_text()
        named[f"worker {pid}" if "jaxsgl.frontend.workers.process" in command else "engine"] = int(pid)
    return named


@contextlib.contextmanager
def a_client_of_each(server: ServerProcess, each: int = 2) -> Iterator[dict[str, list[httpx.Client]]]:
    """`each` clients of every worker, by its name in the log; each client keeps to one connection."""
    found: dict[str, list[httpx.Client]] = {}
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            client = stack.enter_context(connect(server, limits=httpx.Limits(max_connections=1)))
            rid = uuid.uuid4().hex
            answer = client.post("/generate", json=generate_body(5, max_new_tokens=1) | {"rid": rid})
            assert answer.status_code == 200, answer.text
            (name,) = server.wait_for_log(rf"DEBUG +(worker \d): request '{rid}/").groups()
            found.setdefault(name, []).append(client)
            if len(found) == 2 and min(map(len, found.values())) >= each:
                break
        assert set(found) == {"worker 1", "worker 2"}
        yield found


@contextlib.contextmanager
def stream(client: httpx.Client, rid: str, *ids: int, **sampling: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a stream that has begun."""
    body = generate_body(*ids, stream=True, **sampling) | {"rid": rid}
    with client.stream("POST", "/generate", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        events = (json.loads(line) for line in lines if line != "[DONE]")
        first = next(events)

        def all_events() -> Iterator[dict[str, Any]]:
            yield first
            yield from events

        yield all_events()


def metrics(client: httpx.Client) -> dict[str, float]:
    families = parse_text(client.get("/metrics").text)
    return {
        ".".join([sample.name, *(value for name, value in sample.labels.items() if name != "model_name")]): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def server(ids_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server of two workers, for the tests that leave it alive."""
    server = ServerProcess(tmp_path_factory.mktemp("workers"), ids_folder, *TWO)
    server.wait_until_ready()
    yield server
    server.end()


@pytest.fixture(scope="module")
def clients(server: ServerProcess) -> Iterator[dict[str, list[httpx.Client]]]:
    with a_client_of_each(server) as clients:
        yield clients


@pytest.fixture
def one(clients: dict[str, list[httpx.Client]]) -> list[httpx.Client]:
    return clients["worker 1"]


@pytest.fixture
def other(clients: dict[str, list[httpx.Client]]) -> list[httpx.Client]:
    return clients["worker 2"]


def test_streams_of_both_workers_run_in_one_engine(one: list[httpx.Client], other: list[httpx.Client]) -> None:
    with (
        stream(one[0], "s1", 5, 6, max_new_tokens=40) as first,
        stream(other[0], "s2", 7, 8, max_new_tokens=40) as second,
    ):
        outputs = [[event["output_ids"] for event in events][-1] for events in (first, second)]
    assert outputs == [[5, 6] * 20, [7, 8] * 20]
    with stream(one[0], "s3", Script.FOREVER), stream(other[0], "s4", Script.FOREVER):
        wait_for(lambda: report(other[1])[0] == 2, "second stream in the engine")
    wait_for(lambda: report(one[1])[0] == 0, "end of the aborted streams")


def test_what_there_is_once_is_logged_once(server: ServerProcess, one: list[httpx.Client]) -> None:
    assert len(re.findall("listening on", server.log)) == len(re.findall("ready: ", server.log)) == 1
    assert len(pids(server)) == 3


@pytest.mark.parametrize("how", [{}, {"prefix": True}, {"abort_all": True}])
def test_a_request_is_aborted_at_any_worker(
    one: list[httpx.Client], other: list[httpx.Client], how: dict[str, bool]
) -> None:
    with stream(one[0], "abort-me", Script.FOREVER) as events:
        rid = "abort" if how else "abort-me"
        assert other[0].post("/abort_request", json={"rid": rid} | how).json() == {"num_aborted": 1}
        *_, last = events
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert other[0].post("/abort_request", json={"rid": rid} | how).json() == {"num_aborted": 0}


def test_an_id_that_runs_at_another_worker_is_refused(one: list[httpx.Client], other: list[httpx.Client]) -> None:
    with stream(one[0], "twice", Script.FOREVER):
        for client in (one[1], other[0]):
            answer = client.post("/generate", json=generate_body(5) | {"rid": "twice"})
            assert answer.status_code == 400
            assert "twice is the id of a running request" in answer.text


def test_every_worker_tells_the_metrics_of_all(
    server: ServerProcess, one: list[httpx.Client], other: list[httpx.Client]
) -> None:
    before = metrics(one[0])
    for client, times in ((one[0], 2), (other[0], 3)):
        for _ in range(times):
            assert client.post("/generate", json=generate_body(5, max_new_tokens=4)).status_code == 200
    assert other[0].post("/generate", json=generate_body(Script.REFUSE)).status_code == 400
    totals = [metrics(client) for client in (one[0], other[0], one[0])]
    for name, more in {
        "sglang:num_requests_total": 5,
        "vllm:request_success_total.length": 5,
        "jaxsgl:request_errors_total.InvalidRequest": 1,
        "sglang:e2e_request_latency_seconds_count": 5,
        "sglang:e2e_request_latency_seconds_bucket.+Inf": 5,
        "vllm:request_generation_tokens_sum": 20,
    }.items():
        assert [total[name] - before.get(name, 0) for total in totals] == [more] * 3, name
    cpu_s = [total["process_cpu_seconds_total"] for total in totals]
    assert cpu_s == sorted(cpu_s)
    assert totals[0]["process_resident_memory_bytes"] > 3 * 50e6, "the parent and both workers"


def test_orders_and_states_span_the_workers(one: list[httpx.Client], other: list[httpx.Client]) -> None:
    def state(client: httpx.Client) -> dict[str, Any]:
        return dict(client.get("/get_server_info").json()["internal_states"][0])

    with stream(one[0], "held", Script.FOREVER):
        assert other[0].post("/pause_generation", json={"mode": "retract"}).status_code == 200
        wait_for(
            lambda: all(state(client)["paused"] for client in (one[1], other[0])), "both workers know of the pause"
        )
        assert one[1].post("/continue_generation").status_code == 200
        wait_for(lambda: not any(state(client)["paused"] for client in (one[1], other[0])), "both know of its end")
        assert other[0].post("/flush_cache").status_code == 400, "a request of another worker runs"
    assert other[0].post("/flush_cache", params={"timeout": 30}).status_code == 200
    assert [client.get("/health").status_code for client in (one[0], other[0])] == [200, 200]


def test_cache_events_reach_subscribers_at_every_worker(server: ServerProcess, one: list[httpx.Client]) -> None:
    own_connection = [("grpc.use_local_subchannel_pool", 1)]
    first_numbers = set()
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            channel = stack.enter_context(grpc.insecure_channel(server.address, options=own_connection))
            stub = sglang_grpc.SglangSchedulerStub(channel)
            call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
            events = (batch for batch in call if batch.events)
            snapshot = next(events)
            assert [event.WhichOneof("data") for event in snapshot.events] == ["cleared", "stored"]
            assert one[0].post("/flush_cache", params={"timeout": 30}).status_code == 200
            assert [event.WhichOneof("data") for event in next(events).events] == ["cleared"]
            first_numbers.add(snapshot.sequence_number >> 52)
            if len(first_numbers) == 2:
                break
            call.cancel()
    assert len(first_numbers) == 2, "no number of one worker's is one of the other's"


def test_the_death_of_the_engine_ends_the_calls_of_all_workers(
    server: ServerProcess, clients: dict[str, list[httpx.Client]]
) -> None:
    """The last test of this server."""
    processes = pids(server)
    with contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(stream(of_worker[0], name, Script.FOREVER)) for name, of_worker in clients.items()
        ]
        os.kill(processes["engine"], signal.SIGKILL)
        for events in streams:
            *_, last = events
            assert f"process {processes['engine']} was killed by signal 9" in last["error"]["message"]
    assert server.wait_for_exit() == 1
    assert "Traceback" not in server.log
    wait_for(lambda: not any(map(is_alive, processes.values())), "end of all processes")
    wait_for(lambda: not list(server.temporary.iterdir()), "removal of the sockets' folder")


def wait_for_refusal(client: httpx.Client) -> None:
    """Until its worker drains."""
    wait_for(lambda: client.get("/health").status_code == 503, "refusal")


def test_a_worker_that_is_killed_takes_nothing_but_its_own_calls_along(start_server: Start) -> None:
    server = start_server(*TWO, "--drain-s", "600")
    server.wait_until_ready()
    with a_client_of_each(server) as clients:
        one, other = clients["worker 1"], clients["worker 2"]
        pid = int(server.wait_for_log(r"worker 1 is process (\d+)").group(1))
        before = metrics(other[1])
        with stream(other[0], "unharmed", Script.FOREVER, max_new_tokens=150) as unharmed:
            with pytest.raises(httpx.RemoteProtocolError), stream(one[0], "lost", Script.FOREVER) as lost:
                os.kill(pid, signal.SIGKILL)
                list(lost)
            server.wait_for_log(f"worker 1, process {pid}, was killed by signal 9.* starting another")
            wait_for(lambda: report(other[1])[0] == 1, "abort of the dead worker's request")
            *_, last = unharmed
        assert last["meta_info"]["finish_reason"]["type"] == "length"
        assert len(last["output_ids"]) == 150
    wait_for(lambda: len(re.findall("worker 1 is process", server.log)) == 2, "another worker 1")
    with a_client_of_each(server) as clients:
        one, other = clients["worker 1"], clients["worker 2"]
        after = metrics(one[0])
        finished = [name for name in before if name.startswith("vllm:request_success_total")]
        assert all(after[name] >= before[name] for name in (*finished, "process_cpu_seconds_total"))
        drain_both(server, one, other)


def drain_both(server: ServerProcess, one: list[httpx.Client], other: list[httpx.Client]) -> None:
    """SIGTERM lets the streams of both workers finish; health says so meanwhile, and everything ends with status 0."""
    processes = pids(server)
    with grpc.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        with (
            stream(one[0], "d1", Script.FOREVER, max_new_tokens=100) as first,
            stream(other[0], "d2", Script.FOREVER, max_new_tokens=100) as second,
        ):
            server.process.send_signal(signal.SIGTERM)
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            for client in (one[1], other[1]):
                wait_for_refusal(client)
            for events in (first, second):
                *_, last = events
                assert last["meta_info"]["finish_reason"]["type"] == "length"
    assert server.wait_for_exit() == 0
    assert "Traceback" not in server.log
    assert not any(map(is_alive, processes.values()))
    assert not list(server.temporary.iterdir())


def test_a_drain_answers_new_connections_at_once_though_a_worker_has_ended(start_server: Start) -> None:
    server = start_server(*TWO, "--drain-s", "600")
    server.wait_until_ready()
    with a_client_of_each(server) as clients, stream(clients["worker 1"][0], "d", Script.PAUSE):
        server.process.send_signal(signal.SIGTERM)
        server.wait_for_log("worker 2: stopped")
        for _ in range(12):
            with connect(server) as new:
                assert new.get("/health", timeout=10).status_code == 503


def test_a_worker_that_dies_is_replaced_while_a_replica_stands_still(start_server: Start) -> None:
    server = start_server(*TWO, "--dp-size", "2", "--watchdog-s", "600")
    server.wait_until_ready()
    with connect(server) as client, pytest.raises(httpx.TimeoutException):
        client.post("/generate", json=generate_body(Script.STICK) | {"data_parallel_rank": 1}, timeout=1.0)
    (pid,) = server.wait_for_log(r"worker 2 is process (\d+)").groups()
    os.kill(int(pid), signal.SIGKILL)
    server.wait_for_log("worker 2: reasoning is read(.|\n)*worker 2: reasoning is read")
    with a_client_of_each(server, 1) as clients:
        late, *_ = clients["worker 2"]
        refused = late.post("/generate", json=generate_body(5) | {"data_parallel_rank": 1})
        assert refused.status_code == 503 and "still starting" in refused.text


def test_workers_follow_their_parent_while_they_drain(start_server: Start) -> None:
    """So they aren't killed as hung, show the metrics of all, and learn of the engine's death."""
    watchdog_s = 3.0
    server = start_server(*TWO, "--drain-s", "600", "--watchdog-s", str(watchdog_s), "--keep-stuck-server")
    server.wait_until_ready()
    engine = pids(server)["engine"]
    with a_client_of_each(server) as clients, contextlib.ExitStack() as stack:
        streams = [stack.enter_context(stream(of_worker[0], name, Script.PAUSE)) for name, of_worker in clients.items()]
        server.process.send_signal(signal.SIGTERM)
        asked = [of_worker[1] for of_worker in clients.values()]
        for client in asked:
            wait_for_refusal(client)
        until_s = time.monotonic() + 1.5 * watchdog_s
        while time.monotonic() < until_s:
            assert [client.get("/metrics").status_code for client in asked] == [200, 200]
            time.sleep(0.1)
        os.kill(engine, signal.SIGKILL)
        for events in streams:
            *_, last = events
            assert f"process {engine} was killed by signal 9" in last["error"]["message"]
    server.wait_for_exit()
    assert "has not answered" not in server.log and "Traceback" not in server.log


def parent(**config: Any) -> Workers:
    return Workers(ServerConfig(EngineConfig(), port=0, grpc_port=0, tokenizer_worker_num=2, **config), FAKE_ENGINE)


def test_a_worker_that_does_not_answer_while_it_drains_is_given_its_time() -> None:
    class Hung(WorkerProcess):
        num_kills = 0

        def kill(self) -> None:
            self.num_kills += 1

    async def scenario() -> None:
        server, worker = parent(watchdog_s=0.04), Hung(1, 1)
        worker.ready.set()
        server._workers.append(worker)
        watching = asyncio.create_task(server._watch_workers())
        async with asyncio.timeout(PATIENCE_S):
            while not worker.num_kills:
                await asyncio.sleep(0.01)
        await server.drain()
        num_kills = worker.num_kills
        await asyncio.sleep(0.2)
        assert worker.num_kills == num_kills and not watching.done()
        watching.cancel()

    asyncio.run(scenario())


def test_the_status_line_shows_the_use_of_all_pools(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        server = parent()
        (link,) = server.engine.links
        link.receive(EngineReady(INFO))
        link.receive(Replies([], Load(num_running=1, used_tokens=40)))
        server._status.write()

    with caplog.at_level(logging.INFO, "jaxsgl"):
        asyncio.run(scenario())
    assert "KV pool 25%" in caplog.text


async def patience() -> None:
    await asyncio.sleep(PATIENCE_S)


def lives(
    monkeypatch: pytest.MonkeyPatch, does: str, stop: Callable[[], Coroutine[Any, Any, None]] = patience, **config: Any
) -> int:
    """Runs a server with workers that are no good, until `stop` returns; returns its exit status."""
    monkeypatch.setenv("WORKER_DOES", does)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("jaxsgl.frontend.workers.parent.END_S", 0.1)  # they don't listen

    async def scenario() -> int:
        flags = ServerConfig(EngineConfig(), port=0, grpc_port=0, tokenizer_worker_num=2, **config)
        server = Workers(flags, FAKE_ENGINE, [sys.executable, "-S", str(HERE / "dying_worker.py")])
        async with asyncio.timeout(PATIENCE_S):
            return await live(server, stop())

    return asyncio.run(scenario())


def test_workers_that_are_not_ready_do_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def started() -> None:
        while "worker 2 is process" not in caplog.text:
            await asyncio.sleep(0.01)

    caplog.set_level(logging.INFO)
    start_s = time.monotonic()
    assert lives(monkeypatch, "never be ready", started, drain_s=PATIENCE_S) == 0
    assert time.monotonic() - start_s < PATIENCE_S / 2


@pytest.mark.parametrize(
    ("does", "words"),
    [("fail", "^no such tokenizer$"), ("die at start", r"^worker \d, process \d+, ended with exit status 3$")],
)
def test_a_worker_that_cannot_start_fails_the_start(monkeypatch: pytest.MonkeyPatch, does: str, words: str) -> None:
    with pytest.raises(StartupError, match=words):
        lives(monkeypatch, does)


def test_a_worker_that_cannot_start_again_is_tried_again_while_another_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("jaxsgl.frontend.workers.parent.RETRY_S", 0.05)
    starts, times = WorkerProcess.start, itertools.count()

    async def start(worker: WorkerProcess, *args: Any) -> None:
        if worker.is_late and next(times) == 1:
            raise OSError("Resource temporarily unavailable")
        await starts(worker, *args)

    monkeypatch.setattr(WorkerProcess, "start", start)

    async def enough() -> None:
        while sum("no such tokenizer: starting another" in text for text in caplog.messages) <= MAX_DEATHS:
            await asyncio.sleep(0.01)

    caplog.set_level(logging.INFO)
    assert lives(monkeypatch, "fail late", enough, watchdog_s=4.0) == 0
    assert "worker 1 can't be started: Resource temporarily unavailable: starting another in 0 s" in caplog.messages


def test_workers_that_die_again_and_again_end_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert lives(monkeypatch, "die", watchdog_s=0.4) == 1
    deaths = [text for text in caplog.messages if "ended with exit status 3" in text]
    assert ["starting another" in text for text in deaths[: MAX_DEATHS + 1]] == [True] * MAX_DEATHS + [False]
    assert deaths[MAX_DEATHS].endswith("ended with exit status 3: ending the server")


def test_a_worker_that_stands_still_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert lives(monkeypatch, "stand still", watchdog_s=0.1) == 1
    killed = [text for text in caplog.messages if "has not answered for" in text]
    assert len(killed) > MAX_DEATHS, "each is killed, and replaced as if it had died"
    assert any("was killed by signal 9" in text for text in caplog.messages)
