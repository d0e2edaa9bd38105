"""`World`, one run of the simulation: processes of a server, clients, operators and faults, all from one seed.

test_ipc_simulation.py says what is checked and why; simulated.py has the clock, the lines and the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from simulated import EngineThread, SimulatedLine, SimulatedLink

from jaxsgl.batch.buckets import Capacity
from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.errors import EngineUnavailable, JaxsglError, StartupError
from jaxsgl.frontend.engines.replicas import Replicas
from jaxsgl.frontend.generation import Generator, Prompted, ServedModel
from jaxsgl.frontend.metrics.measurements import Metrics
from jaxsgl.messages.orders import (
    PARENT_LINE,
    CloseLine,
    Command,
    ContinueGeneration,
    DumpState,
    FlushCache,
    FromEngine,
    OpenLine,
    PauseGeneration,
    PauseMode,
    Ping,
    Shutdown,
    ToMailbox,
    WatchCache,
)
from jaxsgl.messages.replies import EngineInfo
from jaxsgl.requests.request import FinishReason, SamplingParams
from jaxsgl.testing.engine import generate
from jaxsgl.text.prompts import IdsPrompt
from jaxsgl.text.tokenizer import Tokenizer

VOCAB = 60
EOS = frozenset({0, 1})
NUM_CALLS = 40
LENGTH_S = 3.0  # in which calls arrive
FOREVER_S = 3000.0
GRACE_S = 60.0  # after the last call, for what is still under way


@dataclass
class Call:
    """What a client asked for and what became of it.

    Attributes:
      tokens: that it got, by sample.
      reasons: of the samples that ended.
      end: "whole", "left", "died" with its front end, or the name of the error.
    """

    prompt: list[int]
    sampling: SamplingParams
    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    end: str = ""

    def finish(self, end: str) -> None:
        assert not self.end, "a call ends once"
        self.end = end

    def check(self) -> None:
        assert self.end, "every call ends"
        stops = frozenset() if self.sampling.ignore_eos else EOS
        assert self.sampling.max_tokens is not None
        expected = generate(self.prompt, self.sampling.max_tokens, stops, VOCAB)
        for index, tokens in self.tokens.items():
            complete = self.reasons.get(index) in (FinishReason.STOP, FinishReason.LENGTH)
            assert tokens == (expected if complete else expected[: len(tokens)])
        if self.end == "whole":
            assert set(self.reasons) == set(range(self.sampling.n))


class FrontEndProcess:
    """A front-end process: link, metrics and generator, as server.py puts them together."""

    def __init__(self, world: World, line: int | None) -> None:
        rng = world.rng
        self.line = line or PARENT_LINE
        self.tasks: set[asyncio.Task[None]] = set()
        self.dead = False
        to_engine = world.new_line(ToMailbox, world.engine.arrive)
        self.link = SimulatedLink(line, rng.choice([3, 20, 1000]), to_engine)
        self.metrics = Metrics(lambda: self.link.load, world.loop.time)
        timeout_s = rng.choice([0.3, FOREVER_S, FOREVER_S])
        self.generator = Generator(Replicas([self.link]), world.threads, self.metrics, timeout_s)
        world.links[self.line] = self.link
        world.begin(self._serve(world.tokenizer))

    async def _serve(self, tokenizer: Tokenizer) -> None:
        self.generator.serve(ServedModel(await self.link.ready(), tokenizer))

    def die(self) -> None:
        self.dead = True
        self.link.end()
        for task in self.tasks:
            task.cancel()


class World:
    """One run: everything in it follows from the seed."""

    def __init__(self, seed: int, tokenizer: Tokenizer, threads: ThreadPoolExecutor) -> None:
        self.rng = rng = random.Random(seed)
        self.loop = asyncio.get_running_loop()
        self.tokenizer = tokenizer
        self.threads = threads
        self.trace: list[tuple[float, str]] = []
        self.links: dict[int, SimulatedLink] = {}
        self.calls: list[Call] = []
        self.background: list[asyncio.Task[None]] = []
        self.max_delay_s = rng.choice([0.002, 0.05, 0.3])
        self.several = rng.random() < 0.7
        page_size = rng.choice([1, 2, 4])
        context = rng.choice([16, 40])
        pages = context // page_size + rng.choice([2, 8, 60])
        self.capacity = Capacity(page_size, pages, rng.choice([1, 3, 8]), context, rng.choice([4, 40]), VOCAB)
        config = SchedulingConfig(
            schedule_policy=rng.choice(["fcfs", "lpm", "lof"]),
            schedule_conservativeness=rng.choice([0.05, 1.0]),
            enable_mixed_chunk=rng.random() < 0.5,
            queue_timeout_s=rng.choice([None, None, 0.2]),
            running_timeout_s=rng.choice([None, None, 0.3]),
        )
        queued = rng.choice([3, 1000, 1000])
        self.engine = EngineThread(rng, self.capacity, config, queued, self.several, rng.random() < 0.8, self.line_from)
        self.info = EngineInfo(
            model_path="m", architecture="Fake", dtype="float32", limits=self.capacity.limits, eos_token_ids=(0, 1),
            page_size=page_size, max_running_requests=self.capacity.num_rows, attention_backend="reference",
            platform="cpu", kv_bytes=0, weight_bytes=0, warmup_s=0.0,
        )  # fmt: skip
        self.engine_life = asyncio.create_task(self.engine.live(self.info))
        self.parent: SimulatedLink | None = None
        self.last_line = PARENT_LINE
        self.processes: list[FrontEndProcess] = []
        self.engine_died = False

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        self.background.append(asyncio.create_task(work))

    def new_line(self, kind: Any, receive: Callable[[Any], None]) -> SimulatedLine:
        return SimulatedLine(self.rng, self.max_delay_s, kind, receive)

    def line_from(self, line: int) -> SimulatedLine:
        """The engine's direction of a line. A message to a front end that has died is lost."""
        return self.new_line(FromEngine, lambda message: self.links[line].receive(message))

    def note(self, what: str) -> None:
        self.trace.append((self.loop.time(), what))

    # The parent's part.

    def start(self) -> None:
        if not self.several:
            self.processes = [FrontEndProcess(self, None)]
            return
        self.parent = SimulatedLink(PARENT_LINE, 1, self.new_line(ToMailbox, self.engine.arrive))
        self.links[PARENT_LINE] = self.parent
        for _ in range(self.rng.choice([2, 3])):
            self.start_process()

    def start_process(self) -> None:
        assert self.parent is not None
        self.last_line += 1
        self.parent.send(OpenLine(self.last_line))
        self.processes.append(FrontEndProcess(self, self.last_line))

    async def kill_a_process(self) -> None:
        """A front end dies; the parent notices, tells the engine, and starts another."""
        assert self.parent is not None
        await asyncio.sleep(self.rng.uniform(0.1, LENGTH_S))
        process = self.rng.choice(self.processes)
        self.note(f"front end {process.line} dies")
        self.processes.remove(process)
        process.die()
        await asyncio.sleep(self.rng.uniform(0, 0.2))
        self.parent.send(CloseLine(process.line))
        self.start_process()

    async def kill_the_engine(self) -> None:
        await asyncio.sleep(self.rng.uniform(0.5, LENGTH_S))
        self.note("the engine dies")
        self.engine_died = True
        self.engine.kill()
        await asyncio.sleep(self.rng.uniform(0, 0.2))
        if self.parent is not None:
            self.parent.died("the engine process was killed")
        for process in self.processes:
            await asyncio.sleep(self.rng.uniform(0, 0.01))
            process.link.died("the engine process was killed")

    # Clients and operators.

    async def process(self) -> FrontEndProcess:
        """The front end that the kernel gives a new connection to; while none is alive, connections wait."""
        while not self.processes:
            await asyncio.sleep(0.01)
        return self.rng.choice(self.processes)

    async def check_gone(self, request_id: str) -> None:
        """Checks that a request without a client is gone from the engine, soon after it lost him."""
        await asyncio.sleep(self.max_delay_s + 0.3)  # a front end's death is noticed within 0.2 s; a turn takes 0.05
        assert self.engine_died or not self.engine.runs(request_id), f"{request_id} runs on without a client"

    async def client(self, number: int) -> None:
        """A call from its arrival to its end, at one front end."""
        rng = self.rng
        await asyncio.sleep(rng.uniform(0, LENGTH_S))
        base, length = rng.randrange(3), rng.randint(1, self.capacity.context_length - 2)
        prompt = [2 + (i * i + base * (i // 5 + 1)) % (VOCAB - 2) for i in range(length)]
        n = rng.choice([1, 1, 1, 3])
        sampling = SamplingParams(
            temperature=0.0, max_tokens=rng.randint(1, self.capacity.context_length - length), n=n,
            ignore_eos=rng.random() < 0.7,
        )  # fmt: skip
        call = Call(prompt, sampling)
        self.calls.append(call)
        request_id = rng.choice([f"call{number}", f"call{number}", f"again{rng.randrange(4)}"])
        process = await self.process()
        task = asyncio.create_task(self.request(process, call, request_id))
        process.tasks.add(task)
        task.add_done_callback(process.tasks.discard)
        patience_s = rng.choice([rng.uniform(0, 1.0), FOREVER_S, FOREVER_S])
        done, _ = await asyncio.wait({task}, timeout=patience_s)
        if not done:
            task.cancel()
            await asyncio.wait({task})
        if task.cancelled():
            call.finish("died" if process.dead else "left")
        else:
            task.result()
        if request_id.startswith("call"):
            self.begin(self.check_gone(request_id))
        self.note(f"{request_id} at {process.line}: {call.end}, {sum(map(len, call.tokens.values()))} tokens")

    async def request(self, process: FrontEndProcess, call: Call, request_id: str) -> None:
        pause_s = self.rng.choice([0.0, 0.0, 0.1])
        enough = self.rng.choice([0, 3, 1000, 1000])
        try:
            request = await process.generator.prepare(Prompted(IdsPrompt(call.prompt), call.sampling, request_id))
            with process.generator.start(request, text=False) as generation:
                async for piece in generation:
                    assert piece.index not in call.reasons, "nothing comes after a sample's end"
                    call.tokens.setdefault(piece.index, []).extend(piece.token_ids)
                    if piece.end is not None:
                        call.reasons[piece.index] = piece.end.reason
                    if sum(map(len, call.tokens.values())) > enough:
                        call.finish("left")
                        return
                    await asyncio.sleep(pause_s)
        except JaxsglError as error:
            call.finish(type(error).__name__)
        else:
            call.finish("whole")

    async def operator(self) -> None:
        """Gives orders at any front end, and sometimes doesn't wait for the answer."""
        rng = self.rng
        while self.loop.time() < LENGTH_S:
            await asyncio.sleep(rng.uniform(0, 0.8))
            order = rng.choice([self.abort, self.pause, self.flush, self.ask, self.watch])
            process = await self.process()
            task = asyncio.create_task(order(process.link))
            process.tasks.add(task)
            task.add_done_callback(process.tasks.discard)
            await asyncio.wait({task}, timeout=rng.choice([0.1, FOREVER_S]))
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled() and task.exception() is not None:
                assert isinstance(task.exception(), EngineUnavailable)
                assert self.engine_died or "still starting" in str(task.exception())
            if order == self.pause:
                await asyncio.sleep(self.max_delay_s)  # another line may be faster than the one that the order took
                await self.go_on()

    async def abort(self, link: SimulatedLink) -> None:
        if self.rng.random() < 0.7:
            request_id = f"call{self.rng.randrange(NUM_CALLS)}"
            if await link.abort(request_id):
                self.begin(self.check_gone(request_id))
        else:
            await link.abort_prefix(self.rng.choice(["call1", "again", ""]))

    async def pause(self, link: SimulatedLink) -> None:
        mode = self.rng.choice(list(PauseMode))
        await link.ask(lambda number: PauseGeneration(number, mode), FOREVER_S)
        await asyncio.sleep(self.rng.uniform(0, 0.3))

    async def go_on(self) -> None:
        """Continues generation: at another front end, if the one that is asked dies before it answers."""
        while True:
            process = await self.process()
            try:
                await process.link.ask(ContinueGeneration, 1.0)
                return
            except EngineUnavailable:
                if self.engine_died:
                    return
                await asyncio.sleep(0.01)  # it is still starting

    async def flush(self, link: SimulatedLink) -> None:
        timeout_s = self.rng.choice([0.0, FOREVER_S])
        await link.ask(lambda number: FlushCache(number, timeout_s), FOREVER_S)

    async def ask(self, link: SimulatedLink) -> None:
        commands: list[Callable[[int], Command]] = [Ping, lambda number: DumpState(number, check=True)]
        answer = await link.ask(self.rng.choice(commands), FOREVER_S)
        assert answer.ok

    async def watch(self, link: SimulatedLink) -> None:
        link.send_command(WatchCache)

    # The run.

    async def run(self) -> None:
        self.start()
        rng = self.rng
        faults = rng.choice([[], [], ["process"], ["process", "process"], ["engine"]])
        for fault in faults if self.several else [fault for fault in faults if fault == "engine"]:
            self.begin(self.kill_a_process() if fault == "process" else self.kill_the_engine())
        clients = [asyncio.create_task(self.client(number)) for number in range(NUM_CALLS)]
        await asyncio.gather(self.operator(), *clients)
        assert self.loop.time() < FOREVER_S, "nothing has to wait for a time limit"
        await asyncio.sleep(GRACE_S)
        self.check()
        await self.end()

    def check(self) -> None:
        for call in self.calls:
            call.check()
        for process in self.processes:
            assert process.link.num_open == 0, "no call is left in the link"
        if self.engine_died:
            assert all("killed" in (process.link.refusal or "") for process in self.processes)
            return
        assert self.engine.error is None, self.engine.error
        scheduler = self.engine.scheduler
        assert scheduler.is_idle
        assert scheduler.cache.num_available == self.capacity.num_pages - 1, "all pages are free"
        if self.engine.mailbox is not None:
            assert self.engine.mailbox.num_running == 0
            assert self.engine.mailbox.num_unanswered == 0
            assert set(self.engine.lines) == {PARENT_LINE, *(process.line for process in self.processes)}
        for process in self.processes:
            assert process.link.load == scheduler.load(0, 0), "each front end knows the last load"

    async def end(self) -> None:
        if not self.engine_died:
            (self.parent or self.processes[0].link).send(Shutdown())
        await self.engine_life
        for task in self.background:
            with contextlib.suppress(StartupError):  # of a front end that was still to start when the engine died
                if task.done():
                    task.result()
            task.cancel()
        assert self.engine.error is None, self.engine.error
