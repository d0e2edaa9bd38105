"""The replicas that a front end serves with: one link per engine process, and what it asks of all of them as one.

Sends each request to one replica, which it stays on with all its samples, and each order to all of them, for one
answer. A dead replica ends its own calls only; the server ends when the last one dies. Never knows a client protocol;
engine_link.py talks to one engine, router.py chooses. With one replica, requests go straight to its link.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar

import msgspec

from jaxsgl.errors import EngineUnavailable, InvalidRequest, StartupError
from jaxsgl.frontend.engines.link import EngineLink, ReplyStream
from jaxsgl.frontend.engines.router import Router
from jaxsgl.frontend.metrics.measurements import Replica
from jaxsgl.messages.orders import Answer, Command, Ping
from jaxsgl.messages.replies import (
    EngineInfo,
    HostLoad,
    Load,
    SpeculationTotals,
    Totals,
    TransferLoad,
    merged_times,
)
from jaxsgl.requests.placement import PlaceLoad
from jaxsgl.requests.request import Request

STATES = ("ready", "paused", "stuck", "draining", "loading", "dead")  # the state of all is that of the first of these

LATE_S = 1.0  # for the other replicas to answer a late front end, once one has

ResultT = TypeVar("ResultT")


class Replicas:
    """The links to all engine processes of a server, by rank; there is at least one."""

    def __init__(self, links: Sequence[EngineLink]) -> None:
        self.links = tuple(links)
        self._only = self.links[0] if len(self.links) == 1 else None
        self._router: Router | None = None

    # Life.

    async def start(self) -> None:
        """Starts or connects to all of them, except those known to be dead. Raises `StartupError`."""
        for link in self.links:
            if not link.is_dead:
                await link.start()

    async def ready(self) -> EngineInfo:
        """Waits until all can take requests; returns what holds for each of them. Raises `StartupError`.

        Those that were dead before are left out.
        """
        alive = [link for link in self.links if not link.is_dead]
        waiting = [asyncio.ensure_future(link.ready()) for link in alive]
        try:
            infos = await asyncio.gather(*waiting)
        finally:
            for one in waiting:
                one.cancel()
        return self._all_as_one(infos)

    async def some_ready(self) -> EngineInfo:
        """As `ready`, but waits for one that lives only: of a front end that comes when the others serve already.

        One that stands still is left out until it answers. Raises `StartupError` if all of them end.
        """
        waiting = {asyncio.ensure_future(link.ready()) for link in self.links}
        pending = waiting
        try:
            while pending and all(link.info is None or link.is_dead for link in self.links):
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if pending:
                await asyncio.wait(pending, timeout=LATE_S)
        finally:
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        infos = [link.info for link in self.links if link.info is not None and not link.is_dead]
        if not infos:
            raise StartupError("; ".join(self.problems))
        return self._all_as_one(infos)

    def _all_as_one(self, infos: Sequence[EngineInfo]) -> EngineInfo:
        if self._only is None:
            pool_tokens = [infos[0].pool_tokens if link.info is None else link.info.pool_tokens for link in self.links]
            self._router = Router(infos[0].page_size, pool_tokens)
        limits = msgspec.structs.replace(infos[0].limits, pool_tokens=min(info.limits.pool_tokens for info in infos))
        return msgspec.structs.replace(infos[0], limits=limits)

    def accept(self) -> None:
        """Lets requests in, to those that `some_ready` has left out from when they are ready."""
        ready = [link for link in self.links if link.info is not None] or self.links
        for link in self.links:
            if link in ready:
                link.accept()
            else:
                link.accept_once_ready()

    async def death(self) -> str:
        """Waits until the last one is dead; returns why. All open calls have failed then."""
        reasons = [await link.death() for link in self.links]
        return "; ".join(_by_replica(dict(enumerate(reasons)), len(self.links)))

    def refuse(self, reason: str) -> None:
        """Refuses new requests from now on with `EngineUnavailable`."""
        for link in self.links:
            link.refuse(reason)

    def fail(self, reason: str) -> None:
        """Refuses new requests and ends all open calls with `EngineUnavailable`."""
        for link in self.links:
            link.fail(reason)

    async def stop(self) -> None:
        """Ends the engine processes, or hangs up. May be called in any state."""
        for link in self.links:
            if link.stuck is not None:
                link.kill()  # it would not hear the request to end
        await asyncio.gather(*(link.stop() for link in self.links))

    def kill(self) -> None:
        """Ends the engine processes at once."""
        for link in self.links:
            link.kill()

    # State.

    @property
    def line(self) -> int:
        """The number of this process's lines to the engines."""
        return self.links[0].line

    @property
    def refusal(self) -> str | None:
        """Why new requests are refused now, None if a replica takes them. All health endpoints report it."""
        if any(link.refusal is None for link in self.links):
            return None
        return "; ".join(self.problems)

    @property
    def problems(self) -> list[str]:
        """Why replicas take no requests; those that do take some have no entry."""
        refusals = {rank: link.refusal for rank, link in enumerate(self.links)}
        return _by_replica({rank: reason for rank, reason in refusals.items() if reason is not None}, len(self.links))

    @property
    def state(self) -> str:
        """Where the best of them stands: dead, loading, draining, stuck, paused or ready."""
        return min((link.state for link in self.links), key=STATES.index)

    @property
    def num_open(self) -> int:
        """Calls whose `open` block has not ended."""
        return sum(link.num_open for link in self.links)

    @property
    def load(self) -> Load:
        """The load of all together."""
        return self._only.load if self._only is not None else total(self.links)

    @property
    def each(self) -> list[Replica]:
        """What metrics show of each replica, by rank."""
        return [
            Replica(
                link.refusal is None,
                link.load,
                0 if link.info is None or link.is_dead else link.info.pool_tokens,
                () if link.info is None else link.info.kernels,
                link.hosts.hosts,
            )
            for link in self.links
        ]

    @property
    def places(self) -> list[tuple[EngineLink, int]]:
        """The ranks of all replicas in the order of their numbers, each as its replica's link and its number there.

        A server has several replicas or an engine of several ranks, not both.
        """
        return [(link, rank) for link in self.links for rank in range(link.num_ranks)]

    @property
    def heard_s(self) -> float:
        """When an engine said something last (`time.monotonic`)."""
        return max(link.heard_s for link in self.links)

    # Calls.

    def open(self, request: Request, rank: int | None = None) -> AbstractContextManager[ReplyStream]:
        """Submits `request` to a replica, to that of `rank` if given; see `EngineLink.open`."""
        if self._only is not None and rank is None:
            return self._only.open(request)
        if self._only is not None and 0 <= (rank or 0) < self._only.num_ranks:
            return self._only.open(
                request if self._only.num_ranks == 1 else msgspec.structs.replace(request, rank=rank)
            )
        return self.links[self._rank_for(request, rank)].open(request)

    async def abort(self, request_id: str) -> bool:
        """Aborts a running request; its stream then ends with `FinishReason.ABORT`. Returns whether it ran."""
        return any((await self._of_each(lambda _, link: link.abort(request_id))).values())

    async def abort_prefix(self, prefix: str) -> int:
        """Aborts all running requests whose ids begin with `prefix`, with "" all there are; returns how many."""
        return sum((await self._of_each(lambda _, link: link.abort_prefix(prefix))).values())

    # Orders.

    async def ask(self, command: Callable[[int], Command], timeout_s: float) -> Answer:
        """Sends an order to all replicas that live, and waits for one answer: that all have done it, or which has not.

        Raises `EngineUnavailable` if none answers within `timeout_s` seconds.
        """
        if self._only is not None:
            return await self._only.ask(command, timeout_s)
        return self.together(await self.ask_each(lambda _, number: command(number), timeout_s))

    async def ask_each(self, command: Callable[[int, int], Command], timeout_s: float) -> dict[int, Answer]:
        """As `ask`, with the answer of each replica by its rank; that of one that gives none says so.

        `command` makes a command of a rank and a number.
        """

        async def of(rank: int, link: EngineLink) -> Answer:
            try:
                return await link.ask(partial(command, rank), timeout_s)
            except EngineUnavailable as error:
                if self._only is not None:
                    raise
                return Answer(UNANSWERED, False, str(error))

        answers = await self._of_each(of)
        if all(answer.number == UNANSWERED for answer in answers.values()):
            raise EngineUnavailable(self.together(answers).text)
        return answers

    def together(self, answers: Mapping[int, Answer]) -> Answer:
        """Returns one answer for those of the replicas: of the ones that failed, if some did."""
        failed = {rank: answer for rank, answer in answers.items() if not answer.ok}
        told = {rank: answer.text for rank, answer in (failed or answers).items() if answer.text}
        texts = _by_replica(told, len(self.links))
        if failed and len(failed) < len(answers):
            done = ", ".join(str(rank) for rank in answers if rank not in failed)
            texts.append(f"it was done on replica {done}")
        return Answer(next(iter(answers.values())).number, not failed, "; ".join(texts))

    async def check_alive(self, timeout_s: float) -> None:
        """Raises `EngineUnavailable` unless an engine's loop turns within `timeout_s` seconds."""
        if self.refusal is not None:
            raise EngineUnavailable(self.refusal)
        await self.ask_each(lambda _, number: Ping(number), timeout_s)

    async def next_token(self) -> None:
        """Waits until an engine has made a token, of whatever request."""
        waiting = [asyncio.ensure_future(link.next_token()) for link in self.links]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()

    # How a replica is found.

    def _rank_for(self, request: Request, rank: int | None) -> int:
        """Returns the replica for a request. Raises `InvalidRequest` for a rank or an id that can't be."""
        if rank is not None and not 0 <= rank < len(self.links):
            ranks = len(self.places)
            raise InvalidRequest(
                f"data_parallel_rank is {rank}, but this server's replicas are 0 to {ranks - 1}: leave it out"
            )
        for link in self.links:
            link.check_id(request.request_id)
        if self._router is None or self.refusal is not None:
            return rank or 0  # which says why it refuses requests
        loads = [load_of(link) if link.refusal is None else None for link in self.links]
        return self._router.send(request, loads, rank)

    async def _of_each(self, work: Callable[[int, EngineLink], Coroutine[Any, Any, ResultT]]) -> dict[int, ResultT]:
        """Returns what `work` gives for each replica that lives, by rank; of a dead server for its first one."""
        if self._only is not None:
            return {0: await work(0, self._only)}
        links = {rank: link for rank, link in enumerate(self.links) if not link.is_dead} or {0: self.links[0]}
        working: list[Awaitable[ResultT]] = [asyncio.ensure_future(work(rank, link)) for rank, link in links.items()]
        return dict(zip(links, await asyncio.gather(*working), strict=True))


UNANSWERED = -1  # the number of an answer that a replica did not give


def load_of(link: EngineLink) -> PlaceLoad:
    """Returns what the router must know: the engine's word, or our own calls if it hasn't heard of them yet."""
    load, info = link.load, link.info
    assert info is not None
    num_requests = max(link.num_open, load.num_running + load.num_waiting)
    return PlaceLoad(num_requests, load.num_waiting, load.used_tokens / info.pool_tokens)


def _by_replica(texts: Mapping[int, str], num_replicas: int) -> list[str]:
    """Returns texts of replicas, by rank: each with its replica's rank, unless all say the same."""
    if num_replicas == 1 or (len(texts) == num_replicas and len(set(texts.values())) == 1):
        return [next(iter(texts.values()))] if texts else []
    return [f"replica {rank}: {text}" for rank, text in texts.items()]


def total(links: Sequence[EngineLink]) -> Load:
    """Returns the load of several engines together. Dead ones hold nothing, but what they have counted stays."""
    loads = [link.load for link in links]
    alive = [link.load for link in links if not link.is_dead] or loads

    def of_all(part: Callable[[Load], int]) -> int:
        return sum(map(part, loads))

    counters = {name: sum(getattr(load.totals, name) for load in loads) for name in Totals.__struct_fields__}
    return Load(
        num_running=of_all(lambda load: load.num_running),
        num_waiting=of_all(lambda load: load.num_waiting),
        waiting_tokens=of_all(lambda load: load.waiting_tokens),
        used_tokens=of_all(lambda load: load.used_tokens),
        cached_tokens=of_all(lambda load: load.cached_tokens),
        num_retracted=of_all(lambda load: load.num_retracted),
        paused=all(load.paused for load in alive),
        totals=Totals(**counters),
        step_times=merged_times(load.step_times for load in loads),
        weight_version=alive[0].weight_version,
        adapters=tuple(name for name in alive[0].adapters if all(name in load.adapters for load in alive)),
        host=HostLoad(**{name: sum(getattr(load.host, name) for load in loads) for name in HostLoad.__struct_fields__}),
        speculation=_all_drafts([load.speculation for load in loads]),
        transfer=_all_on_the_way([load.transfer for load in loads if load.transfer is not None]),
        num_blocked=of_all(lambda load: load.num_blocked),
    )


def _all_drafts(each: Sequence[SpeculationTotals]) -> SpeculationTotals:
    plain: Counter[str] = Counter()
    for one in each:
        plain.update(one.plain_decodes)
    return SpeculationTotals(
        sum(one.runs for one in each),
        sum(one.draft_tokens for one in each),
        sum(one.accepted_tokens for one in each),
        tuple(map(sum, zip_longest(*(one.accepted_at for one in each), fillvalue=0))),
        dict(plain),
    )


def _all_on_the_way(transfers: Sequence[TransferLoad]) -> TransferLoad | None:
    if not transfers:
        return None
    numbers = {
        name: sum(getattr(transfer, name) for transfer in transfers)
        for name in TransferLoad.__struct_fields__
        if name != "mode"
    }
    return TransferLoad(transfers[0].mode, **numbers)
