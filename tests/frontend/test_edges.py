"""Every field of every protocol at the edges of its type, through the real front end, loop, scheduler and builder.

Only the device is a fake one. By night, tests/end_to_end/test_edges.py sends many more to a real server.
"""

from __future__ import annotations

import asyncio
import queue
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import msgspec
import pytest
from played_link import PlayedLink, front_end_of

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.constraints.compiler import Compiler
from jaxsgl.errors import InvalidRequest
from jaxsgl.frontend.generation import ServedModel
from jaxsgl.frontend.grpc.server import GrpcServer
from jaxsgl.frontend.http.app import build_app
from jaxsgl.messages.orders import FromEngine, News, Shutdown, ToEngine
from jaxsgl.messages.replies import EngineInfo, RefusalKind
from jaxsgl.requests.outputs import PoolingSpec
from jaxsgl.requests.request import check_request
from jaxsgl.scheduler.grammars.queue import GrammarQueue
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.testing.engine import FakeEngine, ScriptedMailbox
from jaxsgl.text.tokenizer import Tokenizer
from tests import edges
from tests.grids import count

SIZES = Capacity(
    page_size=4, num_pages=200, num_rows=16, context_length=48, max_extend_tokens=64, vocab_size=402,
    pooling=PoolingSpec(dimension=8, matryoshka=True, answer_ids=(5, 6)),
)  # fmt: skip
AT_ONCE = 8
PATIENCE_S = 60.0
INFO = EngineInfo(
    model_path="m", architecture="Fake", dtype="float32", limits=SIZES.limits, eos_token_ids=(1,), page_size=4,
    max_running_requests=16, attention_backend="reference", platform="cpu", kv_bytes=1, weight_bytes=1, warmup_s=0.0,
)  # fmt: skip


class ThreadMailbox:
    """The line between the two processes inside one: messages are encoded and decoded as they are there."""

    def __init__(self, receive: Callable[[FromEngine], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._receive = receive
        self._arrived: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._to_engine = msgspec.msgpack.Decoder(ToEngine)
        self._from_engine = msgspec.msgpack.Decoder(FromEngine)

    def put(self, message: object) -> None:
        self._arrived.put(msgspec.msgpack.encode(message))

    def receive(self, wait_s: float) -> list[ToEngine]:
        messages = [self._to_engine.decode(self._arrived.get())] if wait_s else []
        while not self._arrived.empty():
            messages.append(self._to_engine.decode(self._arrived.get()))
        return messages

    def send(self, news: News) -> None:
        self._loop.call_soon_threadsafe(self._receive, self._from_engine.decode(msgspec.msgpack.encode(news)))


@pytest.fixture(scope="module")
def compiler(model_folder: str) -> Compiler:
    """The real one; what it costs is held by limits of its own, and tests/attacks tries these."""
    return Compiler(Path(model_folder), SIZES.vocab_size, (1,))


def new_scheduler(compiler: Compiler) -> Scheduler:
    grammars = GrammarQueue(compiler.compile, 30.0)
    return Scheduler(SIZES, BucketSet.derive(SIZES), (1,), max_queued_requests=5000, grammars=grammars)


@asynccontextmanager
async def running(
    tokenizer: Tokenizer, compiler: Compiler
) -> AsyncIterator[tuple[httpx.AsyncClient, grpc.aio.Channel, PlayedLink]]:
    """The whole server in this process, with the scheduler's loop in a thread that must end well."""
    link = PlayedLink()
    mailbox = ThreadMailbox(link.receive)
    link.send = mailbox.put  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as threads:
        front_end = front_end_of(link, threads, ServedModel(INFO, tokenizer))
        failures: list[BaseException] = []

        def serve() -> None:
            try:
                run_loop(new_scheduler(compiler), FakeEngine(SIZES), mailbox, depth=1, check_every_step=True)
            except BaseException as error:  # the test fails with it
                failures.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        server = GrpcServer(front_end, None)
        try:
            address = await server.start()
            transport = httpx.ASGITransport(build_app(front_end), raise_app_exceptions=False)
            async with (
                httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=PATIENCE_S) as http,
                grpc.aio.insecure_channel(address) as channel,
            ):
                yield http, channel, link
        finally:
            mailbox.put(Shutdown())
            await asyncio.to_thread(thread.join)
            await server.stop()
        if failures:
            raise failures[0]


@pytest.mark.timeout(count(300, 3600))
def test_no_field_at_the_edge_of_its_type_fails_anything(tokenizer: Tokenizer, compiler: Compiler) -> None:
    rng = random.Random(16)

    async def scenario() -> Counter[object]:
        async with running(tokenizer, compiler) as (http, channel, link), asyncio.timeout(1800):
            openapi = (await http.get("/openapi.json")).json()
            sets = [edges.random_set(rng, openapi) for _ in range(count(400, 8_000))]
            statuses = await edges.statuses_of(http, channel, sets, AT_ONCE)
            assert link.load.totals.failed_requests == 0
            return statuses

    statuses = asyncio.run(scenario())
    assert min(statuses[200], statuses[400]) > 30, statuses
    assert min(statuses[grpc.StatusCode.OK], statuses[grpc.StatusCode.INVALID_ARGUMENT]) > 20, statuses


def test_no_sampling_parameter_at_the_edge_of_its_type_fails_the_offline_loop(compiler: Compiler) -> None:
    rng = random.Random(17)
    refused = 0
    scheduler = new_scheduler(compiler)
    for _ in range(count(600, 8_000)):
        make = edges.offline_set(rng)
        try:
            request = make()
            check_request(request, SIZES.limits)
        except InvalidRequest:
            refused += 1
            continue
        mailbox = ScriptedMailbox([[request]])
        run_loop(scheduler, FakeEngine(SIZES), mailbox, depth=1)
        ended = [reply for reply in mailbox.replies if reply.finish_reason is not None]
        assert len(ended) == request.sampling.n, (request, mailbox.replies)
        assert not [reply for reply in mailbox.replies if reply.refusal and reply.refusal.kind is RefusalKind.FAILED]
    assert 60 < refused < count(600, 8_000) - 60
    assert scheduler.is_idle
    assert not scheduler.leaks()
