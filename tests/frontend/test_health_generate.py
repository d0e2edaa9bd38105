"""GET /health_generate: any token is a sign of life."""

from __future__ import annotations

import asyncio

from fake_engine_process import Script
from http_calls import connect, report
from played_link import PlayedLink
from server_process import ServerProcess, ids_request, wait_for

from jaxsgl.messages.replies import Load, Replies, Totals


def test_a_token_of_another_request_is_enough(server: ServerProcess) -> None:
    with connect(server) as http, server.stub() as stub:
        wait_for(lambda: report(http)[0] == 0, "an idle engine")
        stream = stub.Generate(ids_request(Script.FOREVER, max_tokens=150))
        next(stream)
        seen = report(http)[1]
        assert http.get("/health_generate").status_code == 200
        assert report(http)[1] == seen + 1, "only the report itself: the probe has asked for no token of its own"
        stream.cancel()


def test_a_token_counts_only_if_it_came_since() -> None:
    async def live() -> list[bool]:
        link = PlayedLink()
        link.receive(Replies([], Load(totals=Totals(output_tokens=5, steps=1))))
        waiting = [asyncio.ensure_future(link.next_token()) for _ in range(2)]
        seen = []
        for tokens, steps in ((5, 1), (5, 2), (6, 3)):
            link.receive(Replies([], Load(totals=Totals(output_tokens=tokens, steps=steps))))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            seen.append(all(waiter.done() for waiter in waiting))
        return seen

    assert asyncio.run(live()) == [False, False, True]
