from __future__ import annotations

import asyncio
from typing import Any

import pytest
from played_link import PlayedLink

from jaxsgl.config.engine import Limits
from jaxsgl.errors import EngineUnavailable, Overloaded, StartupError
from jaxsgl.frontend.generation import Generation
from jaxsgl.frontend.metrics.measurements import Metrics, Timing
from jaxsgl.messages.orders import Abort, Answer, Ping, Withdraw
from jaxsgl.messages.replies import EngineFailed, EngineInfo, EngineReady, Load, Replies, Reply
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from jaxsgl.text.detokenizer import NoText

pytestmark = pytest.mark.unit

REQUEST = Request("r", [5], SamplingParams())
INFO = EngineInfo(
    model_path="/models/a", architecture="FakeForCausalLM", dtype="float32",
    limits=Limits(vocab_size=100, context_length=100, pool_tokens=100), eos_token_ids=(1,), page_size=2,
    max_running_requests=8, attention_backend="xla", platform="cpu", kv_bytes=1, weight_bytes=1, warmup_s=0.1,
)  # fmt: skip


def test_a_dead_engine_fails_every_open_call_and_refuses_new_ones_for_good() -> None:
    async def scenario() -> None:
        link = PlayedLink()
        link.receive(EngineReady(INFO))
        assert await link.ready() == INFO
        link.accept()
        with link.open(REQUEST) as first, link.open(Request("s", [5], SamplingParams())) as second:
            reading = [asyncio.ensure_future(stream.next()) for stream in (first, second)]
            asking: asyncio.Future[Answer] = asyncio.ensure_future(link.ask(Ping, timeout_s=60))
            await asyncio.sleep(0)
            link.receive(EngineFailed("the engine failed: why"))
            assert await link.death() == "the engine failed: why"
            calls: list[asyncio.Future[Any]] = [*reading, asking]
            for call in calls:
                with pytest.raises(EngineUnavailable, match="the engine failed: why"):
                    await call
        link.accept()
        assert link.refusal == "the engine failed: why"
        with pytest.raises(EngineUnavailable, match="why"), link.open(REQUEST):
            pass

    asyncio.run(scenario())


def test_a_command_whose_caller_has_stopped_waiting_is_withdrawn() -> None:
    async def scenario() -> None:
        link = PlayedLink()
        with pytest.raises(EngineUnavailable, match="still starting"):
            await link.ask(Ping, timeout_s=60)
        link.receive(EngineReady(INFO))
        asking = asyncio.ensure_future(link.ask(Ping, timeout_s=60))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
        with pytest.raises(EngineUnavailable, match="no sign of life"):
            await link.ask(Ping, timeout_s=0.001)
        assert link.sent == [Ping(0), Withdraw(0), Ping(1), Withdraw(1)]

    asyncio.run(scenario())


def test_an_engine_that_fails_before_it_is_ready_fails_the_start() -> None:
    async def scenario() -> None:
        link = PlayedLink()
        waiting = asyncio.ensure_future(link.ready())
        await asyncio.sleep(0)
        link.receive(EngineFailed("no such model"))
        with pytest.raises(StartupError, match="no such model"):
            await waiting

    asyncio.run(scenario())


def test_a_reply_after_the_engines_death_changes_nothing() -> None:
    link = PlayedLink()
    link.accept()
    with link.open(REQUEST) as stream:
        link.fail("the engine died")
        link.receive(Replies([Reply(stream.engine_id, (7,))]))
        with pytest.raises(EngineUnavailable, match="the engine died"):
            asyncio.run(stream.next())
    assert link.sent[1:] == [Abort(stream.engine_id)], "what has failed is aborted once"


def test_an_answer_complete_before_the_engines_death_stays_complete() -> None:
    link = PlayedLink()
    link.accept()
    with link.open(REQUEST) as stream:
        link.receive(Replies([Reply(stream.engine_id, (7,)), Reply(stream.engine_id, (8,), FinishReason.LENGTH)]))
        link.fail("the engine died")
        timing = Timing(Metrics(Load), 1)
        (piece,) = asyncio.run(Generation(REQUEST, stream, NoText, timing).whole())
    assert piece.token_ids == [7, 8]
    assert piece.end is not None
    assert piece.end.reason is FinishReason.LENGTH


def test_a_client_that_reads_gets_all_replies_however_many_come_at_once() -> None:
    async def scenario() -> None:
        link = PlayedLink(max_unread=3)
        link.accept()
        with link.open(REQUEST) as stream:
            burst = Replies([Reply(stream.engine_id, (7,)) for _ in range(9)], Load())
            reading = asyncio.ensure_future(stream.next())
            await asyncio.sleep(0)
            link.receive(burst)
            assert len(await reading) == 9
            link.receive(burst)  # nobody waits for these
            with pytest.raises(Overloaded, match="left 3 replies unread"):
                await stream.next()

    asyncio.run(scenario())


def test_an_unwanted_sample_is_aborted_alone_and_once() -> None:
    link = PlayedLink()
    link.accept()
    with link.open(Request("r", [5], SamplingParams(n=3))) as stream:
        link.receive(Replies([Reply(stream.engine_id, (7,), FinishReason.LENGTH, index=2)]))
        for index in (1, 1, 2):  # twice, and one that has ended by itself
            stream.end_sample(index)
        link.receive(Replies([Reply(stream.engine_id, (), FinishReason.ABORT, index=1)]))
        assert [reply.index for reply in asyncio.run(stream.next())] == [2]
        assert not stream.ended
        stream.end_sample(0)
        assert stream.ended
    assert link.sent[1:] == [Abort(stream.engine_id, 1), Abort(stream.engine_id, 0)]
