from __future__ import annotations

import asyncio
import contextlib
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxsgl.errors import EngineUnavailable
from jaxsgl.ipc import MAX_SOCKET_PATH, Endpoints, EngineLine, EngineMailbox
from jaxsgl.messages import Abort, EngineFailed, FromEngine, Refusal, RefusalKind, Replies, Reply, Shutdown, ToEngine
from jaxsgl.request import FinishReason, Request, SamplingParams

pytestmark = pytest.mark.unit

REQUEST = Request("r", [1, 2, 3], SamplingParams(temperature=0.7, seed=3, stop_token_ids=(4,)))


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
                received += mailbox.receive(block=True)
            assert received == sent
            assert mailbox.receive(block=False) == []
            replies = [[Reply("r", (step,))] for step in range(3000)]
            replies.append(
                [Reply("r", (), FinishReason.ABORT, 2, Refusal(RefusalKind.INVALID, "no")), Reply("s", (1,))]
            )
            for step in replies:
                mailbox.send(Replies(step))
            await until(lambda: len(heard) == 1 + len(replies))
            assert heard == [Replies([]), *map(Replies, replies)]

    asyncio.run(scenario())


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


def test_sockets_are_private_and_removable(endpoints: Endpoints) -> None:
    assert stat.S_IMODE(Path(endpoints.folder).stat().st_mode) == 0o700
    endpoints.remove()
    assert not Path(endpoints.folder).exists()
    endpoints.remove()


def test_a_long_temporary_path_does_not_make_sockets_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * MAX_SOCKET_PATH)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    endpoints = Endpoints.create()
    assert len(endpoints.from_engine.removeprefix("ipc://")) <= MAX_SOCKET_PATH
    assert not list(long.iterdir())
    endpoints.remove()
