"""Start, end and death of the two processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from fake_engine_process import LIMITS, Script
from grpc_health.v1 import health_pb2, health_pb2_grpc
from server_process import PATIENCE_S, ROOT, ServerProcess, ids_request, is_alive, wait_for

from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.server import ServerConfig
from jaxsgl.frontend.engines import owned
from jaxsgl.frontend.engines.owned import OwnedEngine
from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.frontend.server import ClosedPorts, Server
from jaxsgl.ipc import Endpoints
from jaxsgl.logs import LogStyle
from jaxsgl.messages.replies import EngineFailed, EngineInfo, EngineReady

Start = Callable[..., ServerProcess]
INFO = EngineInfo("m", "FakeForCausalLM", "float32", LIMITS, (1,), 16, 8, "xla", "cpu", 1, 1, 0)


def ending(call: grpc.Call) -> tuple[grpc.StatusCode, str]:
    """Reads a stream until it fails; returns the status and the message."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value.code(), caught.value.details()


def assert_nothing_is_left(server: ServerProcess, engine_pid: int) -> None:
    wait_for(lambda: not is_alive(engine_pid), "end of the engine process")
    wait_for(lambda: not list(server.temporary.iterdir()), "removal of the sockets' folder")


def test_killing_the_engine_ends_every_call_within_two_seconds_and_health_says_so(start_server: Start) -> None:
    server = start_server()
    server.wait_until_ready()
    engine_pid = server.engine_pid
    with server.stub() as stub, grpc.insecure_channel(server.address) as channel:
        waiting = stub.Generate(ids_request(Script.HANG, stream=False))
        streams = [stub.Generate(ids_request(Script.FOREVER)) for _ in range(20)]
        for stream in streams:
            next(stream)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        killed_s = time.monotonic()
        os.kill(engine_pid, signal.SIGKILL)
        endings = [ending(call) for call in [*streams, waiting]]
        assert time.monotonic() - killed_s < 2.0
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert {code for code, _ in endings} == {grpc.StatusCode.UNAVAILABLE}
    assert {words for _, words in endings} == {
        f"the engine process {engine_pid} was killed by signal 9, SIGKILL (out of memory?)"
    }
    assert server.wait_for_exit() == 1
    assert "killed by signal 9, SIGKILL" in server.log
    assert "Traceback" not in server.log
    assert_nothing_is_left(server, engine_pid)


def test_an_engine_that_fails_says_why(start_server: Start) -> None:
    server = start_server()
    server.wait_until_ready()
    with server.stub() as stub:
        code, words = ending(stub.Generate(ids_request(Script.FAIL)))
    assert (code, words) == (grpc.StatusCode.UNAVAILABLE, "the fake engine failed as told")
    assert server.wait_for_exit() == 1
    assert "the fake engine failed as told" in server.log
    assert "ended with exit status 1" in server.log


def test_an_engine_that_has_failed_but_does_not_end_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its server may have other replicas, and lives on."""
    monkeypatch.setattr(owned, "STOP_S", 0.05)
    hangs = (sys.executable, "-c", "import time; time.sleep(600)")

    async def scenario() -> None:
        link = OwnedEngine(EngineConfig(), LogStyle("info", "text"), hangs)
        await link.start()
        link.receive(EngineReady(INFO))
        link.receive(EngineFailed("the engine failed: why"))
        async with asyncio.timeout(PATIENCE_S):
            while "was killed by signal 9" not in caplog.text:
                await asyncio.sleep(0.01)
        await link.stop()

    asyncio.run(scenario())
    assert "has failed, but has not ended: killing it" in caplog.text
    assert "out of memory?" not in caplog.text, "we have killed it"


def test_a_drain_waits_until_answers_are_read() -> None:
    class Answering(ClosedPorts):
        num_looks = 0

        @property
        def is_answering(self) -> bool:
            self.num_looks += 1
            return self.num_looks < 4

    async def num_looks() -> int:
        server, ports = Server(ServerConfig(EngineConfig(), port=0, grpc_port=0, drain_s=PATIENCE_S)), Answering()
        server._ports = ports
        await server.drain()
        await server.close()
        return ports.num_looks

    assert asyncio.run(num_looks()) == 4


def test_a_signal_ends_everything_with_status_0(start_server: Start) -> None:
    """SIGTERM; the tests of drains send SIGINT, too."""
    server = start_server()
    server.wait_until_ready()
    engine_pid = server.engine_pid
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_for_exit() == 0
    assert "Traceback" not in server.log
    assert_nothing_is_left(server, engine_pid)


def test_a_signal_lets_short_calls_finish_and_ends_long_ones(start_server: Start) -> None:
    server = start_server("--drain-s", "3")
    server.wait_until_ready()
    with server.stub() as stub:
        short = stub.Generate(ids_request(Script.FOREVER, max_tokens=60))
        long = stub.Generate(ids_request(Script.HANG))
        next(short)
        server.interrupt()
        server.wait_for_log("stopping: ")
        code, words = ending(stub.Generate(ids_request(5)))
        assert code == grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in words
        assert list(short)[-1].finish_reason == pb.FINISH_REASON_LENGTH
        code, words = ending(long)
        assert code == grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in words
    assert server.wait_for_exit() == 0


def generate(server: ServerProcess, *ids: int, **sampling: int) -> contextlib.AbstractContextManager[httpx.Response]:
    """A stream over HTTP."""
    body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
    return httpx.stream("POST", f"http://{server.http_address}/generate", json=body, timeout=PATIENCE_S)


def test_a_signal_lets_http_streams_finish_while_new_requests_are_sent_away(start_server: Start) -> None:
    server = start_server("--drain-s", "600")
    server.wait_until_ready()
    with httpx.Client(base_url=f"http://{server.http_address}") as idle:
        assert idle.get("/health").status_code == 200  # the connection stays open
        with generate(server, Script.FOREVER, max_new_tokens=60) as short:
            lines = short.iter_lines()
            next(lines)
            with generate(server, Script.PAUSE, max_new_tokens=60) as long:
                paused = long.iter_lines()  # without it the call would be left here
                next(paused)
                server.process.send_signal(signal.SIGTERM)
                server.wait_for_log("stopping: ")
                assert idle.get("/health").status_code == 503
                answer = httpx.post(f"http://{server.http_address}/generate", json={"input_ids": [5]})
                assert answer.status_code == 503
                assert "shutting down" in answer.text
                with grpc.insecure_channel(server.address) as channel:
                    health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
                assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
                *_, last, done = filter(None, lines)
            assert '"length"' in last
            assert done == "data: [DONE]"
        assert server.wait_for_exit() == 0  # `long` was left by its client
    assert "Traceback" not in server.log


def test_http_streams_that_take_too_long_end_with_a_reason(start_server: Start) -> None:
    server = start_server("--drain-s", "0.2")
    server.wait_until_ready()
    with generate(server, Script.PAUSE, max_new_tokens=60) as long:
        lines = long.iter_lines()
        next(lines)
        server.interrupt()
        assert "shutting down" in "".join(lines)
    assert server.wait_for_exit() == 0
    assert "Traceback" not in server.log


def test_a_thread_that_loads_the_tokenizer_of_a_revision_does_not_delay_the_end(tmp_path: Path) -> None:
    code = (
        "import sys, time, jaxsgl.frontend.server as server, jaxsgl.serve\n"
        "server.load_tokenizer = lambda *names: (print(*names, flush=True), time.sleep(1000))\n"
        "sys.argv[1:] = ['--model', sys.argv[2], '--revision', 'v1', '--grpc-port', '0', '--port', '0']\n"
        "jaxsgl.serve.run([sys.executable, '-c', 'raise SystemExit(7)'])\n"
    )
    command = [sys.executable, "-c", code, "--", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "ended with exit status 7" in ended.stderr
    assert ended.stdout.split() == [str(tmp_path), "v1", "False", "None"]


def test_a_server_ends_with_the_process_that_runs_the_tests(start_server: Start) -> None:
    server = start_server()
    server.wait_until_ready()
    assert server.process.stdin is not None
    server.process.stdin.close()  # as the end of this process would
    assert server.wait_for_exit() == 1


def test_a_second_signal_ends_at_once(start_server: Start) -> None:
    server = start_server()
    server.wait_until_ready()
    engine_pid = server.engine_pid
    with server.stub() as stub:
        call = stub.Generate(ids_request(Script.FOREVER, max_tokens=LIMITS.pool_tokens - 1))
        hanging = stub.Generate(ids_request(Script.HANG))
        next(call)
        server.interrupt()
        server.wait_for_log("stopping: ")
        server.interrupt()
        assert server.wait_for_exit(2.0) == 128 + signal.SIGINT
        assert ending(hanging)[0] == grpc.StatusCode.UNAVAILABLE
    assert_nothing_is_left(server, engine_pid)


@pytest.fixture(scope="module")
def ids_only(ids_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of a model without a tokenizer, for the tests that leave it alive."""
    server = ServerProcess(tmp_path_factory.mktemp("server"), ids_folder)
    server.wait_until_ready()
    yield server
    server.end()


def test_ctrl_c_in_a_terminal_reaches_the_server_only(ids_only: ServerProcess) -> None:
    server, engine_pid = ids_only, ids_only.engine_pid
    assert os.getpgid(engine_pid) != os.getpgid(server.process.pid)
    os.kill(engine_pid, signal.SIGINT)
    os.kill(engine_pid, signal.SIGTERM)
    with server.stub() as stub:
        (reply,) = stub.Generate(ids_request(5, stream=False, max_tokens=3))
    assert list(reply.token_ids) == [5, 5, 5]


def test_until_the_engine_is_ready_calls_are_unavailable(start_server: Start) -> None:
    server = start_server("--random-seed", str(Script.START_HANGS))
    with grpc.insecure_channel(server.address) as channel, server.stub() as stub:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "jaxsgl.v1.Jaxsgl"):
            status = health.Check(health_pb2.HealthCheckRequest(service=service), wait_for_ready=True).status
            assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        code, words = ending(stub.Generate(ids_request(5)))
        assert code == grpc.StatusCode.UNAVAILABLE
        assert "starting" in words
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetModelInfo(pb.GetModelInfoRequest())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    engine_pid = server.engine_pid
    server.interrupt()
    assert server.wait_for_exit() == 0
    assert_nothing_is_left(server, engine_pid)


def error_of(server: ServerProcess) -> str:
    """The one line by which a start that failed explains itself."""
    assert server.wait_for_exit() == 1
    assert "Traceback" not in server.log
    errors = [line for line in server.log.splitlines() if " INFO " not in line and " DEBUG " not in line]
    assert len(errors) == 1, server.log
    return errors[0]


def test_a_failing_start_is_one_clear_line(start_server: Start) -> None:
    server = start_server("--random-seed", str(Script.START_FAILS))
    assert error_of(server) == "error: --dtype is odd, but must be even"
    assert not list(server.temporary.iterdir())


def test_a_final_message_counts_although_it_arrives_after_the_death(start_server: Start) -> None:
    server = start_server("--random-seed", str(Script.START_SLOW_WORDS))
    assert error_of(server) == "error: --dtype is odd, but must be even"


def test_an_engine_that_dies_while_starting_is_one_clear_line(start_server: Start) -> None:
    error = error_of(start_server("--random-seed", str(Script.START_DIES)))
    assert error.startswith("error: the engine process ")
    assert error.endswith(" ended with exit status 7")


def test_two_servers_cannot_share_a_port(ids_only: ServerProcess, start_server: Start) -> None:
    address = ids_only.address
    error = error_of(start_server("--grpc-port", address.rpartition(":")[2]))
    assert address in error and "in use" in error


def test_an_unknown_address_is_one_clear_line(start_server: Start) -> None:
    assert "192.0.2.1" in error_of(start_server("--host", "192.0.2.1"))


def test_a_bad_flag_is_one_clear_line(start_server: Start) -> None:
    error = error_of(start_server("--page-size", "0"))
    assert error == "error: --page-size is 0, but must be auto, or 1 to 256"


def test_a_missing_model_folder_is_one_clear_line(start_server: Start) -> None:
    error = error_of(start_server(model="/nowhere/at/all"))
    assert error == "error: the model folder /nowhere/at/all does not exist"


def test_a_bad_model_folder_is_explained_by_the_engine_not_by_the_tokenizer(
    start_server: Start, tmp_path: Path
) -> None:
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{")
    (folder / "config.json").write_text('{"architectures": ["OddForCausalLM"], "model_type": "odd"}')
    error = error_of(start_server(model=str(folder), real_engine=True))
    assert "OddForCausalLM" in error
    assert "LlamaForCausalLM" in error


def test_a_model_without_a_tokenizer_takes_ids_only(ids_only: ServerProcess) -> None:
    with ids_only.stub() as stub:
        (reply,) = stub.Generate(ids_request(5, stream=False, max_tokens=2))
        assert (list(reply.token_ids), reply.text) == ([5, 5], "")
        code, words = ending(stub.Generate(pb.GenerateRequest(text="hello")))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "no tokenizer" in words
        assert not stub.GetModelInfo(pb.GetModelInfoRequest()).has_tokenizer


def test_the_front_end_never_imports_jax(model_folder: str) -> None:
    code = (
        "import sys, jaxsgl.serve, jaxsgl.client, jaxsgl.frontend.server\n"
        "assert not {'jax', 'transformers'} & set(sys.modules), 'before loading'\n"
        "jaxsgl.frontend.server.load_tokenizer(sys.argv[1]).encode_chat([])\n"
    ).replace(".encode_chat([])", ".encode('a')") + "assert 'jax' not in sys.modules, 'after loading'\n"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code, model_folder], env=environment, check=True, timeout=PATIENCE_S)


def test_a_stopped_engine_ends_with_its_killed_front_end_and_the_next_server_clears_their_sockets(
    start_server: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that hangs in C code runs no thread that could see the end, and neither does one that is stopped."""
    server = start_server()
    server.wait_until_ready()
    engine_pid = server.engine_pid
    os.kill(engine_pid, signal.SIGSTOP)
    server.process.kill()
    server.process.wait()
    wait_for(lambda: not is_alive(engine_pid), "end of the engine process")
    assert len(list(server.temporary.glob("jaxsgl-*"))) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(server.temporary))
    endpoints = Endpoints.create()
    assert [str(folder) for folder in server.temporary.iterdir()] == [endpoints.folder]
    lock = endpoints.hold()
    other = Endpoints.create()
    assert sorted(map(str, server.temporary.iterdir())) == sorted([endpoints.folder, other.folder])
    os.close(lock)
    endpoints.remove()
    other.remove()
