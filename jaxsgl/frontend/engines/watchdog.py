"""Notices when the engine stands still: has its link refuse requests, logs all stacks, and ends the server at last.

Pings the engine whenever it has been silent, and expects steps while requests run or wait, unless generation is paused.
Of requests that wait for a grammar, or for the other side of a prefill or decode worker, it expects none.
Counts its own ticks instead of seconds: a front end that was stopped itself (by a debugger, or a laptop's sleep) must
not take that time for the engine's silence. server.py and workers.py run `watch`; health endpoints read `refusal`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from jaxsgl import stacks
from jaxsgl.config.server import ServerConfig
from jaxsgl.errors import EngineUnavailable
from jaxsgl.frontend.engines.link import EngineLink
from jaxsgl.frontend.engines.replicas import Replicas
from jaxsgl.mask_mark import Marked
from jaxsgl.messages.orders import Ping

MAX_TICK_S = 5.0
TICKS = 4  # at least this many in `limit_s`
PATIENCE = 5  # times `limit_s` from the engine's last sign of life until the server ends
MASK_LIMIT_S = 10.0  # for one mask or token, which takes milliseconds; its request won't be sent again

logger = logging.getLogger(__name__)


class Watchdog:
    """Watches `engine`, which counts as stuck after `limit_s` seconds without a message, or without a step it owes.

    One that is at the same token of a grammar for `MASK_LIMIT_S` must end: no wait helps it, and the request that did
    it is known. With `keep_alive` a stuck engine is given any time to move again.

    Attributes:
      dump_s: seconds for the engine's stacks to arrive before the server ends.
    """

    dump_s = 1.0

    def __init__(self, engine: EngineLink, limit_s: float, keep_alive: bool = False) -> None:
        self._engine = engine
        self._limit_s = limit_s
        self._keep_alive = keep_alive
        self._tick_s = min(MAX_TICK_S, limit_s / TICKS)
        self._heard_s = 0.0
        self._steps_total = 0
        self._silent_ticks = self._stalled_ticks = self._mask_ticks = 0
        self._masking: Marked | None = None
        self._asked = False

    async def run(self, report: Callable[[], Awaitable[None]]) -> str:
        """Watches until the engine must end, and returns why. Sets `EngineLink.stuck`; awaits `report` at each change.

        It must end once it has been stuck for `PATIENCE` times the limit.
        """
        while True:
            await asyncio.sleep(self._tick_s)
            stuck = self.tick()
            if (stuck is None) != (self._engine.stuck is None):
                await self._changed(stuck, report)
            reason = None if self._keep_alive else self._problem(PATIENCE * self._limit_s)
            if reason is not None:
                logger.error("%s: ending it and %d open calls", reason, self._engine.num_open)
                self._dump_stacks(last=True)
                await asyncio.sleep(self.dump_s)
                return reason

    def tick(self) -> str | None:
        """Looks at the engine, every `limit_s` / `TICKS` seconds. Returns why it is stuck, None if it isn't."""
        engine = self._engine
        heard = engine.heard_s != self._heard_s
        load = engine.load
        stepped = load.totals.steps != self._steps_total
        self._heard_s, self._steps_total = engine.heard_s, load.totals.steps
        self._silent_ticks = 0 if heard else self._silent_ticks + 1
        self._stalled_ticks = self._stalled_ticks + 1 if load.owes_step and not stepped else 0
        masking = engine.masking
        self._mask_ticks = self._mask_ticks + 1 if masking is not None and masking == self._masking else 0
        self._masking = masking
        if heard or not self._asked:  # one ping at a time: they must not pile up in front of a stuck engine
            with contextlib.suppress(EngineUnavailable):  # the link itself reports a death
                engine.send_command(Ping)
            self._asked = True
        return self._problem(self._limit_s)

    def _problem(self, limit_s: float) -> str | None:
        """Why the engine has been stuck for `limit_s` seconds or more, None if it hasn't."""
        if self._mask_ticks * self._tick_s >= MASK_LIMIT_S:
            return f"the engine has been busy with one token of a grammar for {MASK_LIMIT_S:g} s"
        if self._silent_ticks * self._tick_s >= limit_s:
            return f"the engine has given no sign of life for {limit_s:g} s"
        if self._stalled_ticks * self._tick_s >= limit_s:
            return f"the engine has made no step for {limit_s:g} s, though requests run or wait"
        return None

    async def _changed(self, stuck: str | None, report: Callable[[], Awaitable[None]]) -> None:
        self._engine.stuck = stuck
        if stuck is not None:
            logger.error("%s: refusing requests until it does; %d are open", stuck, self._engine.num_open)
            self._dump_stacks()
        else:
            logger.info("the engine works again")
        await report()

    def _dump_stacks(self, last: bool = False) -> None:
        """Logs where this process stands, and has the engine do so."""
        self._engine.dump_stacks(last)
        logger.error("stacks of the server process:\n%s%s", stacks.of_threads(), stacks.of_tasks())


async def watch(replicas: Replicas, config: ServerConfig, report: Callable[[], Awaitable[None]]) -> str:
    """Watches every replica, and ends one that stays stuck. Returns why the last one died, once all are dead.

    Awaits `report` when one gets stuck, works again or dies.
    """

    reasons: list[str] = []  # of deaths, in their order

    async def follow(link: EngineLink) -> None:
        watchdog = Watchdog(link, config.watchdog_s, config.keep_stuck_server)
        death, verdict = asyncio.create_task(link.death()), asyncio.create_task(watchdog.run(report))
        try:
            await asyncio.wait({death, verdict}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            death.cancel()
            verdict.cancel()
        if not death.done():
            link.kill()
            link.died(verdict.result())
        reasons.append(await link.death())
        await report()

    following = [asyncio.create_task(follow(link)) for link in replicas.links]
    try:
        await asyncio.gather(*following)
    finally:
        for task in following:
            task.cancel()
    return reasons[-1]
