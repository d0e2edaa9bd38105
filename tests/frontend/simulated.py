"""Front ends and an engine in one process, on a clock that jumps: parts of a simulation that a seed repeats exactly.

`SimulatedLoop` is asyncio without waiting: when nothing is ready, its time jumps to the next timer, and if there is no
timer either, something waits forever, which is an error. `SimulatedLine` delays messages by chance, but keeps their
order. `EngineThread` runs the engine's real blocking loop; it and the event loop take turns, so never run at once.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.frontend.engines.link import EngineLink
from jaxsgl.messages.orders import PARENT_LINE, FromEngine, News, ToEngine, ToMailbox
from jaxsgl.messages.replies import EngineInfo, EngineReady
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.shared_mailbox import SharedMailbox
from jaxsgl.testing.engine import FakeEngine
from tests.checked import CheckedScheduler


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: notes by how much time should jump instead."""

    jumped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "no message is under way, and no timer runs: what still waits will wait forever"
        self.jumped_s += max(timeout, 0.0)
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is simulated. Nothing outside the process may take part."""

    def __init__(self) -> None:
        self._jumps = _JumpingSelector()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.jumped_s


class SimulatedLine:
    """One direction of a line: messages arrive as they were sent, in order, later by up to `max_delay_s`."""

    def __init__(self, rng: random.Random, max_delay_s: float, kind: Any, receive: Callable[[Any], None]) -> None:
        self._rng = rng
        self._max_delay_s = max_delay_s
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._receive = receive
        self._last_s = 0.0
        self._is_cut = False
        self._cut_s = float("inf")

    def send(self, message: object) -> None:
        if self._is_cut:
            return
        loop = asyncio.get_running_loop()
        delay_s = self._rng.choice([0.0, 0.001, self._rng.uniform(0, self._max_delay_s)])
        self._last_s = max(loop.time() + delay_s, self._last_s + 1e-6)
        loop.call_at(self._last_s, self._deliver, self._encoder.encode(message))

    def cut(self) -> None:
        """One end has died: of what is under way, the first messages may still arrive, the others are lost."""
        now_s = asyncio.get_running_loop().time()
        self._is_cut = True
        self._cut_s = min(self._cut_s, self._rng.uniform(now_s, max(now_s, self._last_s)))

    def _deliver(self, encoded: bytes) -> None:
        if asyncio.get_running_loop().time() <= self._cut_s:
            self._receive(self._decoder.decode(encoded))


class _Killed(BaseException):
    """Unwinds the engine's thread, as SIGKILL would end its process."""


class EngineThread:
    """The engine process: the real loop, scheduler and mailbox over simulated lines. It is a `Transport`.

    Attributes:
      scheduler: the engine's.
      mailbox: the shared one; None with a single front end.
      lines: to the front ends, by number.
      ended: set once the loop has ended.
      error: what ended it, if that was an error.
    """

    def __init__(
        self,
        rng: random.Random,
        capacity: Capacity,
        config: SchedulingConfig,
        max_queued_requests: int,
        several: bool,
        overlap: bool,
        line_to: Callable[[int], SimulatedLine],
    ) -> None:
        clock = asyncio.get_running_loop().time
        buckets = BucketSet.derive(capacity, decode_steps=rng.choice([1, 1, 3]))
        self.scheduler = CheckedScheduler(
            capacity, buckets, (0, 1), config, max_queued_requests=max_queued_requests, clock=clock
        )
        self._rng = rng
        self._line_to = line_to
        self.lines: dict[int, SimulatedLine] = {}
        self.mailbox = SharedMailbox(self, clock) if several else None
        if not several:
            self.connect(PARENT_LINE)
        self._engine = FakeEngine(capacity)
        self._overlap = overlap
        self._coming: list[ToMailbox] = []
        self._going: list[tuple[int, FromEngine]] = []
        self._arrived = asyncio.Event()
        self._engines_turn, self._fronts_turn = threading.Semaphore(0), threading.Semaphore(0)
        self._killed = False
        self._blocks = False
        self.ended = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    async def live(self, info: EngineInfo) -> None:
        """Runs the engine until its loop ends, a turn at a time."""
        if self.mailbox is not None:
            self.mailbox.announce(info)
        else:
            self.send(PARENT_LINE, EngineReady(info))
        self._thread.start()
        while True:
            self._engines_turn.release()
            self._fronts_turn.acquire()
            for line, message in self._going:
                if line in self.lines:
                    self.lines[line].send(message)
            self._going.clear()
            if self.ended:
                self._thread.join()
                return
            await asyncio.sleep(self._rng.choice([0.0, 0.005, 0.05]))
            while self._blocks and not self._coming and not self._killed:
                self._arrived.clear()
                await self._arrived.wait()

    def kill(self) -> None:
        """Ends it in the middle of its work."""
        self._killed = True
        self._arrived.set()
        for line in self.lines.values():
            line.cut()

    def runs(self, client_id: str) -> bool:
        """Whether a request with that id of its client is in the scheduler."""
        return any(req.request_id.rpartition("/")[0] == client_id for req in self.scheduler.state.requests.all())

    def arrive(self, message: ToMailbox) -> None:
        """Takes a message that a line delivers."""
        self._coming.append(message)
        self._arrived.set()

    # The engine's thread.

    def _run(self) -> None:
        self._engines_turn.acquire()
        try:
            run_loop(self.scheduler, self._engine, self.mailbox or _Mailbox(self), int(self._overlap))
        except _Killed:
            pass
        except BaseException as error:
            self.error = error
        self.ended = True
        self._fronts_turn.release()

    def receive(self, wait_s: float) -> Sequence[ToMailbox]:
        """See `Transport`: the front ends' turn begins here and ends."""
        self._blocks = wait_s > 0
        self._fronts_turn.release()
        self._engines_turn.acquire()
        if self._killed:
            raise _Killed
        coming, self._coming = self._coming, []
        return coming

    def wake_at(self, fd: int) -> None:
        raise AssertionError("nothing else wakes the engine here")

    def connect(self, line: int) -> None:
        self.lines[line] = self._line_to(line)

    def disconnect(self, line: int) -> None:
        del self.lines[line]

    def send(self, line: int, message: FromEngine) -> None:
        self._going.append((line, message))


class _Mailbox:
    """The mailbox of an engine with a single front end."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine

    def receive(self, wait_s: float) -> list[ToEngine]:
        return list(self._engine.receive(wait_s))  # type: ignore[arg-type]

    def send(self, news: News) -> None:
        self._engine.send(PARENT_LINE, news)


class SimulatedLink(EngineLink):
    """A front end's link over a simulated line. Its engine process dies by `died`."""

    def __init__(self, line: int | None, max_unread: int, to_engine: SimulatedLine) -> None:
        super().__init__(line, max_unread)
        self._to_engine = to_engine
        self._line = to_engine  # type: ignore[assignment]

    def end(self) -> None:
        """This front end dies: nothing leaves it any more."""
        self._to_engine.cut()
