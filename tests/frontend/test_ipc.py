from __future__ import annotations

import asyncio
import stat
import tempfile
from pathlib import Path

import pytest

from jaxsgl.errors import EngineUnavailable
from jaxsgl.ipc import MAX_SOCKET_PATH, EngineLine, EngineMailbox, Endpoints
from jaxsgl.messages import Abort, FromEngine, Replies, Reply, Shutdown
from jaxsgl.request import FinishReason, Request, SamplingParams

REQUEST = Request("r", [1, 2, 3], SamplingParams(temperature=0.7, seed=3, stop_token_ids=(4,)))


@pytest.fixture
def endpoints() -> Endpoints:
    return Endpoints.create()


def test_messages_arrive_whole_and_in_order_both_ways(endpoints: Endpoints) -> None:
    async def scenario() -> None:
        line, mailbox, heard = EngineLine(endpoints), EngineMailbox(endpoints), []
        line.listen(heard.append)
        mailbox.send([])  # connected once this has arrived
        async with asyncio.timeout(30):
            while not heard:
                await asyncio.sleep(0.01)
        sent = [REQUEST, Abort("r"), Shutdown()]
        for message in sent:
            line.send(message)
        received: list[object] = []
        while len(received) < len(sent):
            received += mailbox.receive(block=True)
        assert received == sent
        assert mailbox.receive(block=False) == []
        replies = [[Reply("r", (step,))] for step in range(3000)] + [[Reply("r", (), FinishReason.ABORT, 2, "no")]]
        for step in replies:
            mailbox.send(step)
        async with asyncio.timeout(30):
            while len(heard) < 1 + len(replies):
                await asyncio.sleep(0.01)
        expected: list[FromEngine] = [Replies([]), *map(Replies, replies)]
        assert heard == expected
        mailbox.close()
        line.close()

    asyncio.run(scenario())
    endpoints.remove()


def test_last_words_arrive_although_the_engine_closes_at_once(endpoints: Endpoints) -> None:
    async def scenario() -> None:
        line, heard = EngineLine(endpoints), []
        line.listen(heard.append)
        mailbox = EngineMailbox(endpoints)
        mailbox.fail("why", startup=True)
        await asyncio.to_thread(mailbox.close)
        async with asyncio.timeout(30):
            while not heard:
                await asyncio.sleep(0.01)
        assert heard[0].message == "why"
        line.close()

    asyncio.run(scenario())
    endpoints.remove()


def test_sending_to_nobody_is_an_error_not_a_wait(endpoints: Endpoints) -> None:
    async def scenario() -> None:
        line = EngineLine(endpoints)
        with pytest.raises(EngineUnavailable, match="not connected"):
            line.send(REQUEST)
        line.close()

    asyncio.run(scenario())
    endpoints.remove()


def test_sockets_are_private_and_removable(endpoints: Endpoints) -> None:
    assert stat.S_IMODE(Path(endpoints.folder).stat().st_mode) == 0o700
    endpoints.remove()
    assert not Path(endpoints.folder).exists()
    endpoints.remove()


def test_a_long_temporary_path_does_not_make_sockets_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * MAX_SOCKET_PATH)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    endpoints = Endpoints.create()
    assert len(endpoints.from_engine.removeprefix("ipc://")) <= MAX_SOCKET_PATH
    assert not list(long.iterdir())
    endpoints.remove()
