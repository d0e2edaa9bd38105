"""Notices when the engine stands still, and says whether requests make sense now.

Asks the engine for a sign of life whenever it was silent, and expects steps while requests run or wait, unless
generation is paused. Health
endpoints of all protocols read `problem`; server.py runs it. Counts its own ticks instead of seconds, so that a front
end that was stopped itself (a debugger, a laptop asleep) blames nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from jaxsgl.errors import EngineUnavailable
from jaxsgl.frontend.engine_client import EngineClient
from jaxsgl.messages import Ping

MAX_TICK_S = 5.0
TICKS = 4  # in `limit_s` at least

logger = logging.getLogger(__name__)


class Watchdog:
    """Watches `engine`. It counts as stuck when nothing was heard of it for `limit_s` seconds."""

    def __init__(self, engine: EngineClient, limit_s: float) -> None:
        self._engine = engine
        self._limit_s = limit_s
        self._tick_s = min(MAX_TICK_S, limit_s / TICKS)
        self._heard_s = 0.0
        self._steps_total = 0
        self._silent_ticks = self._stalled_ticks = 0
        self._asked = False

    def problem(self) -> str | None:
        """Why requests would fail now: the engine is starting, stuck or dead, or the server is stopping."""
        return self._engine.refusal

    async def run(self, tell: Callable[[], Awaitable[None]]) -> None:
        """Watches for ever. While the engine is stuck, new requests are refused; `tell` is awaited at each change."""
        while True:
            await asyncio.sleep(self._tick_s)
            stuck = self.tick()
            if (stuck is None) == (self._engine.stuck is None):
                continue
            self._engine.stuck = stuck
            if stuck is not None:
                logger.error("%s: refusing requests until it does; %d are open", stuck, self._engine.num_open)
            else:
                logger.info("the engine works again")
            await tell()

    def tick(self) -> str | None:
        """Looks at the engine; to be called every `limit_s` / `TICKS` seconds. Returns why it counts as stuck."""
        engine = self._engine
        heard = engine.heard_s != self._heard_s
        load = engine.load
        stepped = load.steps_total != self._steps_total
        self._heard_s, self._steps_total = engine.heard_s, load.steps_total
        self._silent_ticks = 0 if heard else self._silent_ticks + 1
        has_work = (load.num_running > 0 or load.num_waiting > 0) and not load.paused
        self._stalled_ticks = self._stalled_ticks + 1 if has_work and not stepped else 0
        if heard or not self._asked:  # one question at a time: nothing piles up in front of a stuck engine
            with contextlib.suppress(EngineUnavailable):  # its death is told by the supervisor
                engine.send_command(Ping)
            self._asked = True
        if self._silent_ticks * self._tick_s >= self._limit_s:
            return f"the engine has given no sign of life for {self._limit_s:g} s"
        if self._stalled_ticks * self._tick_s >= self._limit_s:
            return f"the engine has made no step for {self._limit_s:g} s, though requests run or wait"
        return None
