from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from fake_engine_process import Script
from grpc_health.v1 import health_pb2, health_pb2_grpc
from played_link import PlayedLink
from server_process import ServerProcess, ids_request

from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import EngineUnavailable
from jaxsgl.frontend.engines.replicas import Replicas
from jaxsgl.frontend.engines.watchdog import TICKS, Watchdog, watch
from jaxsgl.mask_mark import MaskMark
from jaxsgl.messages.orders import Answer, Ping
from jaxsgl.messages.replies import Load, Replies, Totals
from jaxsgl.requests.request import Request, SamplingParams
from tests.grids import daily

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

REQUEST = Request("r", [5], SamplingParams())

Start = Callable[..., ServerProcess]


class Engine:
    """An engine that answers as the test says, under a watchdog."""

    def __init__(self, limit_s: float = 4.0, keep_alive: bool = False) -> None:
        self.link = PlayedLink()
        self.link.accept()
        self.watchdog = Watchdog(self.link, limit_s, keep_alive)

    def ticks(self, count: int) -> list[str | None]:
        return [self.watchdog.tick() for _ in range(count)]

    def answer(self) -> None:
        self.link.receive(Answer(0, True))

    def turn(self, load: Load) -> None:
        self.link.receive(Replies([], load))


def test_an_idle_engine_that_answers_is_well() -> None:
    engine = Engine()
    for _ in range(20):
        assert engine.ticks(1) == [None]
        engine.answer()
    assert all(isinstance(message, Ping) for message in engine.link.sent)


def test_silence_is_a_problem_until_it_ends() -> None:
    engine = Engine()
    assert engine.ticks(TICKS) == [None] * TICKS
    (problem,) = set(engine.ticks(10))
    assert problem == "the engine has given no sign of life for 4 s"
    engine.answer()
    assert engine.ticks(1) == [None]


def test_a_silent_engine_is_asked_once() -> None:
    engine = Engine()
    engine.ticks(30)
    assert len(engine.link.sent) == 1
    engine.answer()
    engine.ticks(30)
    assert len(engine.link.sent) == 2


def test_whatever_the_engine_says_is_a_sign_of_life() -> None:
    engine = Engine()
    for steps in range(20):
        engine.turn(Load(num_running=1, totals=Totals(steps=steps)))
        assert engine.ticks(1) == [None]


@pytest.mark.parametrize("work", [{"num_running": 1}, {"num_waiting": 1}])
def test_an_engine_that_answers_but_makes_no_step_is_a_problem(work: dict[str, Any]) -> None:
    engine = Engine()
    told = []
    for _ in range(TICKS + 1):
        engine.turn(Load(totals=Totals(steps=7), **work))
        told += engine.ticks(1)
    assert told == [None] * TICKS + ["the engine has made no step for 4 s, though requests run or wait"]
    engine.turn(Load(totals=Totals(steps=8), **work))
    assert engine.ticks(1) == [None]


def test_an_engine_without_work_need_not_step() -> None:
    engine = Engine()
    with engine.link.open(REQUEST):  # even if it has lost a request
        for _ in range(20):
            engine.turn(Load(totals=Totals(steps=7)))
            assert engine.ticks(1) == [None]


def test_an_engine_all_of_whose_requests_wait_for_others_need_not_step_but_must_speak() -> None:
    engine = Engine()
    for _ in range(20):
        engine.turn(Load(num_waiting=2, num_blocked=2, totals=Totals(steps=7)))
        assert engine.ticks(1) == [None]
    assert engine.ticks(TICKS)[-1] == "the engine has given no sign of life for 4 s"


def test_one_request_that_waits_for_nothing_else_is_owed_a_step() -> None:
    engine = Engine()
    told = []
    for _ in range(TICKS + 1):
        engine.turn(Load(num_waiting=3, num_blocked=2, totals=Totals(steps=7)))
        told += engine.ticks(1)
    assert told == [None] * TICKS + ["the engine has made no step for 4 s, though requests run or wait"]


def test_a_paused_engine_need_not_step() -> None:
    engine = Engine()
    for _ in range(20):
        engine.turn(Load(num_running=1, num_waiting=1, totals=Totals(steps=7), paused=True))
        assert engine.ticks(1) == [None]


def test_problems_are_reported_and_logged_once_and_refuse_requests_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(limit_s=0.02, keep_alive=True)
    told: asyncio.Queue[str | None]

    async def tell() -> None:
        told.put_nowait(engine.link.refusal)

    async def live() -> None:
        nonlocal told
        told = asyncio.Queue()
        running = asyncio.create_task(engine.watchdog.run(tell))
        assert await told.get() == "the engine has given no sign of life for 0.02 s"
        await asyncio.sleep(0.1)
        with pytest.raises(EngineUnavailable, match="no sign of life"), engine.link.open(REQUEST):
            pass
        engine.answer()
        assert await told.get() is None
        running.cancel()

    with caplog.at_level(logging.INFO, "jaxsgl"):
        asyncio.run(live())
    assert told.empty()
    error, stacks = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "no sign of life" in error
    assert stacks.startswith("stacks of the server process:\nthread ")
    assert "in live\n    await told.get()" in stacks or "in live\n    assert await told.get()" in stacks


def test_an_engine_that_stays_stuck_ends_the_server_unless_it_is_to_be_kept() -> None:
    async def outcome(engine: Engine) -> str:
        engine.watchdog.dump_s = 0.0
        async with asyncio.timeout(1.0):
            return await engine.watchdog.run(nothing)

    async def nothing() -> None:
        pass

    reason = asyncio.run(outcome(Engine(limit_s=0.02)))
    assert reason == "the engine has given no sign of life for 0.1 s"
    with pytest.raises(TimeoutError):
        asyncio.run(outcome(Engine(limit_s=0.02, keep_alive=True)))


def test_the_engine_that_dies_last_says_why_the_server_ends() -> None:
    links = [PlayedLink() for _ in range(3)]

    async def outcome() -> str:
        async def nothing() -> None:
            pass

        watching = asyncio.create_task(watch(Replicas(links), ServerConfig(EngineConfig()), nothing))
        for rank in (2, 0, 1):
            await asyncio.sleep(0.01)
            links[rank].died(f"engine {rank} died")
        return await watching

    assert asyncio.run(outcome()) == "engine 1 died"


def test_a_server_whose_engine_hangs_shows_both_processes_and_ends(start_server: Start) -> None:
    server = start_server("--watchdog-s", "0.4")
    server.wait_until_ready()
    with server.stub() as stub:
        call = stub.Generate(ids_request(Script.STICK))
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "no sign of life" in caught.value.details()
    assert server.wait_for_exit() == 1
    assert "fake_engine_process.py" in server.log and "in handle" in server.log, "the engine's stack"
    assert "stacks of the server process" in server.log and "in run" in server.log


@pytest.mark.parametrize(("how", "workers"), daily([("dies", 2), ("dies", 1), ("hangs", 1)], every=2))
def test_the_request_whose_mask_ended_the_engine_is_not_to_be_sent_again_and_all_others_are(
    start_server: Start, how: str, workers: int
) -> None:
    """A server that hangs elsewhere is given five times the limit."""
    script = Script.DIE_IN_MASK if how == "dies" else Script.STICK_IN_MASK
    server = start_server("--watchdog-s", "8" if how == "dies" else "3", "--tokenizer-worker-num", str(workers))
    server.wait_until_ready()
    with server.stub() as stub, httpx.Client(base_url=f"http://{server.http_address}", timeout=60.0) as http:
        others = [stub.Generate(ids_request(Script.PAUSE, max_tokens=50)) for _ in range(3)]
        for other in others:
            next(other)
        culprit = http.post("/generate", json={"input_ids": [script], "sampling_params": {"max_new_tokens": 2}})
        assert culprit.status_code == 422 and "don't repeat it" in culprit.text, culprit.text
        assert "retry-after" not in culprit.headers
        for other in others:
            with pytest.raises(grpc.RpcError) as caught:
                list(other)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert server.wait_for_exit() == 1
    assert "while it worked on the grammar of request" in server.log


def test_an_engine_is_given_up_after_ten_seconds_in_one_mask(tmp_path: Path) -> None:
    engine = Engine(limit_s=20.0)
    engine.link._mark = mark = MaskMark(tmp_path / "mark")
    for _ in range(10):
        mark.begin("a")
        assert engine.ticks(1) == [None], "each time it is another mask"
        engine.answer()
    assert engine.ticks(2) == [None, "the engine has been busy with one token of a grammar for 10 s"]
    mark.end()
    assert engine.ticks(1) == [None]


def test_a_shutdown_is_reported_rather_than_a_stuck_engine() -> None:
    engine = Engine()
    assert engine.link.refusal is None
    engine.link.stuck = "stuck"
    assert engine.link.refusal == "stuck"
    engine.link.refuse("shutting down")
    assert engine.link.refusal == "shutting down"


def test_health_follows_a_stuck_engine_and_its_recovery(start_server: Start) -> None:
    server = start_server("--watchdog-s", "2", "--keep-stuck-server")
    server.wait_until_ready()
    with grpc.insecure_channel(server.address) as channel, server.stub() as stub:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == SERVING
        os.kill(server.engine_pid, signal.SIGSTOP)
        assert next(watch).status == NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub.Generate(ids_request(5)).next()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "no sign of life for 2 s" in caught.value.details()
        os.kill(server.engine_pid, signal.SIGCONT)
        assert next(watch).status == SERVING
        (reply,) = stub.Generate(ids_request(5, stream=False, max_tokens=1))
        assert list(reply.token_ids) == [5]


def test_an_engine_that_stands_still_forever_does_not_delay_the_exit(start_server: Start) -> None:
    server = start_server("--watchdog-s", "1", "--drain-s", "0.5")
    server.wait_until_ready()
    with server.stub() as stub:
        call = stub.Generate(ids_request(Script.STICK))
        server.wait_for_log("(no sign of life|no step) for 1 s")
        server.interrupt()
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert server.wait_for_exit() == 0
