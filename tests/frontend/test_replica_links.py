"""What a front end asks of several replicas as of one, and what becomes of its calls; the test plays the engines."""

from __future__ import annotations

import asyncio

import pytest
from played_link import PlayedLink

from jaxsgl.config.engine import Limits
from jaxsgl.errors import EngineUnavailable, InvalidRequest, StartupError
from jaxsgl.frontend.engines.link import STARTING
from jaxsgl.frontend.engines.replicas import Replicas
from jaxsgl.messages.orders import Answer, ContinueGeneration, Ping
from jaxsgl.messages.replies import EngineFailed, EngineInfo, EngineReady, Load, Replies, Totals
from jaxsgl.requests.request import Request, SamplingParams

pytestmark = pytest.mark.unit

INFO = EngineInfo("m", "FakeForCausalLM", "float32", Limits(1000, 200, 160), (1,), 16, 8, "xla", "cpu", 1, 1, 0)


def played(number: int = 2) -> tuple[Replicas, list[PlayedLink]]:
    """Replicas that are ready, and their links."""
    links = [PlayedLink() for _ in range(number)]
    replicas = Replicas(links)
    for link in links:
        link.receive(EngineReady(INFO))
    asyncio.run(replicas.ready())
    replicas.accept()
    return replicas, links


def request(name: str, *ids: int) -> Request:
    return Request(name, list(ids) or [5], SamplingParams())


def placed(replicas: Replicas, name: str, *ids: int, rank: int | None = None) -> int:
    """The rank of the replica that a request is sent to; it ends at once."""
    before = [len(link.sent) for link in replicas.links if isinstance(link, PlayedLink)]
    with replicas.open(request(name, *ids), rank):
        after = [len(link.sent) for link in replicas.links if isinstance(link, PlayedLink)]
    (chosen,) = (rank for rank, count in enumerate(after) if count > before[rank])
    return chosen


def test_a_dead_replica_ends_its_own_calls_and_the_others_serve_on() -> None:
    replicas, links = played()
    with replicas.open(request("a"), 0) as first, replicas.open(request("b"), 1) as second:
        links[1].receive(EngineFailed("the engine failed: why"))
        with pytest.raises(EngineUnavailable, match="the engine failed: why"):
            asyncio.run(second.next())
        assert not first.ended
    assert replicas.refusal is None and replicas.state == "ready"
    assert replicas.problems == ["replica 1: the engine failed: why"]
    assert {placed(replicas, str(number), number, number) for number in range(10)} == {0}
    links[0].receive(EngineFailed("the engine failed: too"))
    assert replicas.refusal == "replica 0: the engine failed: too; replica 1: the engine failed: why"
    assert asyncio.run(replicas.death()) == replicas.refusal
    with pytest.raises(EngineUnavailable, match="too"), replicas.open(request("c")):
        pass


def test_a_replica_that_fails_to_start_fails_the_start() -> None:
    links = [PlayedLink(), PlayedLink()]

    async def scenario() -> None:
        waiting = asyncio.ensure_future(Replicas(links).ready())
        await asyncio.sleep(0)
        links[1].receive(EngineFailed("no such model"))
        with pytest.raises(StartupError, match="no such model"):
            await waiting

    asyncio.run(scenario())


def test_a_late_front_end_serves_with_the_replicas_that_answer() -> None:
    links = [PlayedLink() for _ in range(3)]
    links[0].died("dead before")
    replicas = Replicas(links)

    async def scenario() -> None:
        waiting = asyncio.ensure_future(replicas.some_ready())
        await asyncio.sleep(0)
        links[1].receive(EngineReady(INFO))
        assert (await waiting).limits == INFO.limits
        replicas.accept()

    asyncio.run(scenario())
    assert {placed(replicas, str(number), number, number) for number in range(10)} == {1}
    assert replicas.problems == ["replica 0: dead before", f"replica 2: {STARTING}"]
    links[2].receive(EngineReady(INFO))
    assert placed(replicas, "a", rank=2) == 2


def test_a_late_front_end_leaves_out_a_replica_that_dies_while_it_starts() -> None:
    links = [PlayedLink(), PlayedLink()]
    replicas = Replicas(links)

    async def scenario() -> None:
        waiting = asyncio.ensure_future(replicas.some_ready())
        await asyncio.sleep(0)
        links[0].receive(EngineFailed("no memory"))
        await asyncio.sleep(0)
        links[1].receive(EngineReady(INFO))
        await waiting
        with pytest.raises(StartupError, match="no memory"):
            links[1].died("no memory")
            await replicas.some_ready()

    asyncio.run(scenario())


def test_an_order_is_given_to_all_and_a_failure_on_one_is_told() -> None:
    replicas, links = played()

    async def answer(*answers: Answer) -> Answer:
        asking = asyncio.ensure_future(replicas.ask(ContinueGeneration, timeout_s=1))
        await asyncio.sleep(0.01)
        for link, told in zip(links, answers, strict=True):
            assert link.sent[-1] == ContinueGeneration(told.number)
            link.receive(told)
        return await asking

    assert asyncio.run(answer(Answer(0, True, "done"), Answer(0, True, "done"))) == Answer(0, True, "done")
    assert asyncio.run(answer(Answer(1, True, "a"), Answer(1, True, "b"))).text == "replica 0: a; replica 1: b"
    failed = asyncio.run(answer(Answer(2, True, "done"), Answer(2, False, "busy")))
    assert not failed.ok
    assert failed.text == "replica 1: busy; it was done on replica 0"
    links[0].receive(EngineFailed("dead"))

    async def answer_of_one() -> Answer:
        asking = asyncio.ensure_future(replicas.ask(Ping, timeout_s=1))
        await asyncio.sleep(0.01)
        links[1].receive(Answer(3, True))
        return await asking

    assert asyncio.run(answer_of_one()) == Answer(3, True), "a dead replica is asked nothing"
    with pytest.raises(EngineUnavailable, match=r"replica 1: .*no sign of life within 0.01 s"):
        asyncio.run(replicas.ask(Ping, timeout_s=0.01))


def test_the_load_of_all_is_the_sum_and_counts_of_the_dead_stay() -> None:
    replicas, links = played()
    for number, link in enumerate(links, 1):
        totals = Totals(prompt_tokens=10 * number, cached_prompt_tokens=4, steps=number)
        link.receive(Replies([], Load(number, 2, 30, 40, 50, totals=totals, paused=number == 1, num_blocked=2)))
    load = replicas.load
    assert (load.num_running, load.num_waiting, load.used_tokens, load.paused) == (3, 4, 80, False)
    assert load.num_blocked == 4
    assert (load.totals.prompt_tokens, load.totals.cached_prompt_tokens) == (30, 8)
    links[1].receive(EngineFailed("dead"))
    load = replicas.load
    assert (load.num_running, load.num_waiting, load.used_tokens, load.paused) == (1, 2, 40, True)
    assert load.num_blocked == 2
    assert (load.totals.prompt_tokens, load.totals.steps) == (30, 3)
    assert [replica.is_up for replica in replicas.each] == [True, False]


def test_a_rank_or_an_id_that_cannot_be_is_refused_and_a_rank_binds() -> None:
    replicas, links = played()
    assert [placed(replicas, "a", *range(64), rank=rank) for rank in (0, 1, 1)] == [0, 1, 1]
    for rank in (-1, 2):
        with pytest.raises(InvalidRequest, match="data_parallel_rank"):
            replicas.open(request("a"), rank)
    with (
        replicas.open(request("same"), 0),
        pytest.raises(InvalidRequest, match="id of a running request"),
        replicas.open(request("same"), 1),
    ):
        pass
    links[1].receive(EngineFailed("dead"))
    with pytest.raises(EngineUnavailable, match="dead"), replicas.open(request("a"), 1):
        pass
    alone = Replicas([PlayedLink()])
    with pytest.raises(InvalidRequest, match="data_parallel_rank is 1"):
        alone.open(request("a"), 1)


def test_what_a_replica_was_sent_draws_what_begins_alike() -> None:
    replicas, _ = played(3)
    prompts = [[group] * 40 for group in range(6)]
    first = [placed(replicas, "a", *prompt) for prompt in prompts]
    assert sorted(first) == [0, 0, 1, 1, 2, 2]
    assert [placed(replicas, "a", *prompt, 7, 7) for prompt in prompts] == first
