"""GET /engine_events: what the engines hold and do, as one stream of events for people who look on.

Everybody who looks shares one `Live`, which asks the engines a few times a second for as long as somebody does; then
nothing is asked, and the engines stop recording by themselves. A reader who is slow misses events and gets later ones.
An event holds counts, ids and lengths of other clients' requests, but none of their tokens; middleware.py leaves it to
the administrator, if there is one. scheduler/orders/view.py makes the views; app.py includes the router.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from jaxsgl.errors import EngineUnavailable, Overloaded
from jaxsgl.frontend.engines.replicas import Replicas
from jaxsgl.frontend.generation import FrontEnd
from jaxsgl.frontend.http.calls import EventStream, event
from jaxsgl.frontend.http.sglang.admin import flat_load
from jaxsgl.messages.orders import Answer, WatchEngine

INTERVAL_S = 0.5  # between an answer and the next question
RECORD_S = 5.0  # that steps are recorded after a question
ANSWER_LIMIT_S = 20.0  # the longest step may have to end
ENDS = ("draining", "dead")  # states after which no other comes: streams end, so that the server can
MAX_VIEWERS = 32  # streams that one front-end process serves at once


class _Newest(msgspec.Struct):
    """Of an `EngineView` the part that is read here."""

    last_step: int


class Live:
    """What engines do, for all who look on at the same time.

    Args:
      engine: the replicas.

    Attributes:
      num_viewers: streams that are open.
    """

    def __init__(self, engine: Replicas) -> None:
        self._engine = engine
        self._since = [0] * len(engine.links)
        self._next: asyncio.Future[bytes] | None = None
        self._asking: asyncio.Task[None] | None = None
        self.num_viewers = 0

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields an event after each question, until the engines end. Raises `Overloaded` if too many look already."""
        if self.num_viewers >= MAX_VIEWERS:
            raise Overloaded(f"{self.num_viewers} streams of engine events are open, and {MAX_VIEWERS} are the most")
        self.num_viewers += 1
        try:
            while True:
                if self._asking is None or self._asking.done():
                    self._next = asyncio.get_running_loop().create_future()
                    self._asking = asyncio.create_task(self._ask_on())
                assert self._next is not None
                yield await asyncio.shield(self._next)
                if self._engine.state in ENDS:
                    return
        finally:
            self.num_viewers -= 1

    async def _ask_on(self) -> None:
        """Asks until nobody looks any more."""
        while self.num_viewers:
            try:
                data = await self._look()
            except Exception as error:  # it ends all streams, rather than leave them waiting
                self._told().set_exception(error)
                return
            self._told().set_result(event(data))
            await asyncio.sleep(INTERVAL_S)

    def _told(self) -> asyncio.Future[bytes]:
        """Returns what all viewers wait for; those that come or go on from now wait for another event."""
        told, self._next = self._next, asyncio.get_running_loop().create_future()
        assert told is not None
        return told

    async def _look(self) -> bytes:
        """Returns what all replicas say of themselves now, as JSON."""
        try:
            answers = await self._engine.ask_each(
                lambda rank, number: WatchEngine(number, self._since[rank], RECORD_S), ANSWER_LIMIT_S
            )
        except EngineUnavailable:
            answers = {}
        replicas = [self._replica(rank, answers.get(rank)) for rank in range(len(self._engine.links))]
        return msgspec.json.encode({"state": self._engine.state, "replicas": replicas})

    def _replica(self, rank: int, answer: Answer | None) -> dict[str, Any]:
        link = self._engine.links[rank]
        view = None
        if answer is not None and answer.ok:
            newest = msgspec.json.decode(answer.text, type=_Newest).last_step
            self._since[rank] = newest or self._since[rank]
            view = msgspec.Raw(answer.text.encode())
        return {
            "rank": rank,
            "state": link.state,
            "problem": link.refusal,
            "load": flat_load(link.load),
            "view": view,
        }


def router(front_end: FrontEnd) -> APIRouter:
    """Returns the endpoint, for `front_end`."""
    api = APIRouter(tags=["operate"])
    live = Live(front_end.engine)

    @api.get("/engine_events", response_class=Response)
    async def engine_events() -> Response:
        """A stream of events, two a second: pages, prefix tree, requests and steps of each replica, without a token."""
        return EventStream(live.events())

    return api
