from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxsgl.config.engine import Limits
from jaxsgl.errors import EngineUnavailable
from jaxsgl.ipc import (
    LOCK,
    MAX_SOCKET_PATH,
    MESSAGES_A_TURN,
    Endpoints,
    EngineLine,
    EngineLines,
    EngineMailbox,
    _remove_left,
)
from jaxsgl.messages.orders import Abort, FromEngine, OpenLine, Shutdown, ToEngine, first_number
from jaxsgl.messages.replies import EngineFailed, EngineInfo, EngineReady, Load, Refusal, RefusalKind, Replies, Reply
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.shared_mailbox import SharedMailbox

pytestmark = pytest.mark.unit

REQUEST = Request("r", [1, 2, 3], SamplingParams(temperature=0.7, seed=3, stop_token_ids=(4,)))

INFO = EngineInfo(
    model_path="/models/a", architecture="FakeForCausalLM", dtype="float32",
    limits=Limits(vocab_size=100, context_length=100, pool_tokens=100), eos_token_ids=(1,), page_size=2,
    max_running_requests=8, attention_backend="xla", platform="cpu", kv_bytes=1, weight_bytes=1, warmup_s=0.1,
)  # fmt: skip


@pytest.fixture
def endpoints() -> Iterator[Endpoints]:
    endpoints = Endpoints.create()
    yield endpoints
    endpoints.remove()


@contextlib.contextmanager
def line_to(endpoints: Endpoints, heard: list[FromEngine]) -> Iterator[EngineLine]:
    line = EngineLine(endpoints)
    try:
        line.listen(heard.append)
        yield line
    finally:
        line.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def test_messages_arrive_whole_and_in_order_both_ways(endpoints: Endpoints) -> None:
    async def scenario() -> None:
        heard: list[FromEngine] = []
        with line_to(endpoints, heard) as line, contextlib.closing(EngineMailbox(endpoints)) as mailbox:
            mailbox.send(Replies([]))
            await until(lambda: len(heard) == 1)  # the processes are connected
            sent: list[ToEngine] = [REQUEST, Abort("r"), Shutdown()]
            for message in sent:
                line.send(message)
            received: list[ToEngine] = []
            while len(received) < len(sent):
                received += mailbox.receive(math.inf)
            assert received == sent
            assert mailbox.receive(0.0) == mailbox.receive(0.02) == [], "no longer than it is to wait"
            replies = [[Reply("r", (step,))] for step in range(3000)]
            replies.append(
                [Reply("r", (), FinishReason.ABORT, 2, Refusal(RefusalKind.INVALID, "no")), Reply("s", (1,))]
            )
            for step in replies:
                mailbox.send(Replies(step))
            await until(lambda: len(heard) == 1 + len(replies))
            assert heard == [Replies([]), *map(Replies, replies)]

    asyncio.run(scenario())


def test_a_message_that_can_not_be_read_is_dropped_and_all_others_arrive(
    endpoints: Endpoints, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        heard: list[FromEngine] = []
        with line_to(endpoints, heard) as line, contextlib.closing(EngineMailbox(endpoints)) as mailbox:
            mailbox.send(Replies([]))
            await until(lambda: len(heard) == 1)
            for message in (REQUEST, msgspec.structs.replace(REQUEST, priority=True), Abort("r")):
                line.send(message)
            received: list[ToEngine] = []
            while len(received) < 2:
                received += mailbox.receive(math.inf)
            assert received == [REQUEST, Abort("r")]

    asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records] == [
        "a message of the front end can't be read, and is dropped"
    ]


def test_the_final_message_arrives_although_the_engine_closes_at_once(endpoints: Endpoints) -> None:
    async def scenario() -> None:
        heard: list[FromEngine] = []
        with line_to(endpoints, heard):
            with contextlib.closing(EngineMailbox(endpoints)) as mailbox:
                mailbox.fail("why")
            await until(lambda: bool(heard))
            assert heard == [EngineFailed("why")]

    asyncio.run(scenario())


def test_sending_without_an_engine_is_an_error_not_a_wait(endpoints: Endpoints) -> None:
    async def scenario() -> None:
        with line_to(endpoints, []) as line, pytest.raises(EngineUnavailable, match="not connected"):
            line.send(REQUEST)

    asyncio.run(scenario())


def test_several_front_ends_each_get_their_own_replies_in_order(endpoints: Endpoints) -> None:
    async def scenario() -> None:
        heard: dict[int, list[FromEngine]] = {0: [], 1: [], 2: []}
        with contextlib.ExitStack() as stack:
            lines = {line: stack.enter_context(line_to(endpoints.at(line), heard[line])) for line in heard}
            for line in (1, 2):
                lines[0].send(OpenLine(line))  # sent before the engine is there
            lines_of_engine = stack.enter_context(contextlib.closing(EngineLines(endpoints.at(0))))
            mailbox = SharedMailbox(lines_of_engine, clock=lambda: 0.0)
            mailbox.announce(INFO)
            ids = {line: f"r{line}/{first_number(line)}" for line in (1, 2)}
            async with asyncio.timeout(60):
                while mailbox.num_running < 2:
                    mailbox.receive(0.0)
                    await asyncio.sleep(0.01)
                    for line in (1, 2):
                        if heard[line]:  # the engine is ready, and has opened this line
                            assert heard[line] == [EngineReady(INFO)]
                            heard[line].clear()
                            lines[line].send(Request(ids[line], [5], SamplingParams()))
            steps = [[Reply(ids[line], (step,)) for line in (2, 1)] for step in range(500)]
            for step in steps:
                mailbox.send(Replies(step))
            for line in (1, 2):
                await until(lambda line=line: len(heard[line]) == len(steps))  # type: ignore[misc]
                assert heard[line] == [Replies([Reply(ids[line], (step,))]) for step in range(500)]

    asyncio.run(scenario())


def test_sockets_are_private_and_removable(endpoints: Endpoints) -> None:
    assert stat.S_IMODE(Path(endpoints.folder).stat().st_mode) == 0o700
    endpoints.remove()
    assert not Path(endpoints.folder).exists()
    endpoints.remove()


def test_folders_that_lost_their_holder_are_cleared_and_no_others(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    tmp_path = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own path is too long for sockets
    request.addfinalizer(lambda: shutil.rmtree(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, held, new, elsewhere = (tmp_path / name for name in ("jaxsgl-left", "jaxsgl-held", "jaxsgl-new", "elsewhere"))
    for folder in (left, held, elsewhere):
        folder.mkdir()
        os.close(Endpoints(str(folder)).hold())
    new.mkdir()  # its server has not locked it yet
    (tmp_path / "jaxsgl-link").symlink_to(elsewhere)
    lock = Endpoints(str(held)).hold()
    endpoints = Endpoints.create()
    os.close(lock)
    found = {folder.name for folder in tmp_path.iterdir()}
    assert found == {"jaxsgl-held", "jaxsgl-new", "jaxsgl-link", "elsewhere", Path(endpoints.folder).name}


def test_a_folder_is_locked_as_soon_as_it_has_its_lock(endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a server that starts at the same moment takes it for that of a dead one."""
    locks = fcntl.flock

    def flock(file: Any, how: int) -> None:
        monkeypatch.undo()
        _remove_left([Path(endpoints.folder).parent])  # as another server does
        locks(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = endpoints.hold()
    assert Path(endpoints.folder, LOCK).exists()
    os.close(lock)


def test_who_waits_for_replies_gets_a_turn_between_many(endpoints: Endpoints) -> None:
    num_messages = 3 * MESSAGES_A_TURN

    async def scenario() -> None:
        heard: list[FromEngine] = []
        with contextlib.closing(EngineLine(endpoints)) as line, contextlib.closing(EngineMailbox(endpoints)) as mailbox:
            for _ in range(num_messages):
                mailbox.send(Replies([], Load()))
            await asyncio.sleep(0.5)  # for them to arrive
            line.listen(heard.append)
            assert len(heard) <= MESSAGES_A_TURN
            await until(lambda: len(heard) == num_messages)

    asyncio.run(scenario())


def test_a_long_temporary_path_does_not_make_sockets_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * MAX_SOCKET_PATH)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    endpoints = Endpoints.create()
    assert len(endpoints.from_engine.removeprefix("ipc://")) <= MAX_SOCKET_PATH
    assert not list(long.iterdir())
    endpoints.remove()
