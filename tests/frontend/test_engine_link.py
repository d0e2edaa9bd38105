from __future__ import annotations

import asyncio

import pytest
from played_link import PlayedLink

from jaxsgl.errors import EngineUnavailable
from jaxsgl.frontend.generation import Generation
from jaxsgl.frontend.metrics import Metrics, Timing
from jaxsgl.messages import Abort, Load, Replies, Reply
from jaxsgl.request import FinishReason, Request, SamplingParams
from jaxsgl.text.detokenizer import NoText

pytestmark = pytest.mark.unit

REQUEST = Request("r", [5], SamplingParams())


def test_a_reply_after_the_failure_revives_nothing() -> None:
    link = PlayedLink()
    link.accept()
    with link.open(REQUEST) as stream:
        link.fail("the engine died")
        link.receive(Replies([Reply(stream.engine_id, (7,))]))
        with pytest.raises(EngineUnavailable, match="the engine died"):
            asyncio.run(stream.next())
    assert link.sent[1:] == [Abort(stream.engine_id)], "what has failed is aborted once"


def test_an_answer_that_was_complete_when_the_engine_died_stays_complete() -> None:
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


def test_a_sample_that_nobody_wants_any_more_is_aborted_alone_and_once() -> None:
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
