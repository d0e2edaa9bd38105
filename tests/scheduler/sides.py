"""Servers that compute one side of each request, with fake engines: what the tests of disaggregation drive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.cache.tiers import HostTier
from jaxsgl.messages.orders import Abort, LoadAdapter
from jaxsgl.messages.replies import RefusalKind, Reply, TransferLoad
from jaxsgl.requests.request import FinishReason, Rendezvous, Request
from jaxsgl.scheduler.disagg.decode_side import DecodeSide
from jaxsgl.scheduler.disagg.prefill_side import PrefillSide
from jaxsgl.scheduler.disagg.rooms import RoomLimits
from jaxsgl.scheduler.orders.adapters import load
from jaxsgl.scheduler.req import Key
from jaxsgl.scheduler.resources.host_tier import LoadRule
from jaxsgl.testing.engine import FakeEngine, FakeHandle
from tests.checked import CheckedScheduler
from tests.scheduler.memory_wire import MemoryWire, Network
from tests.scheduler.tiered import check_names

PREFILL = ("prefill", 8998)


class Worker:
    """A side, its scheduler, engine and wire, driven turn by turn as the loop does.

    Args:
      engine: a real one in a fake one's place, of `sizes`; its weights have no version.

    Attributes:
      outputs, prompt_logprobs: what clients got, by sample and by request.
      ended: how each sample ended, or why its request was refused.
    """

    def __init__(
        self,
        network: Network,
        address: tuple[str, int] | None,
        sizes: Capacity,
        clock: Callable[[], float] = lambda: 0.0,
        *,
        staging_pages: int = 1000,
        max_rooms: int = 1000,
        overlap: bool = True,
        tier: HostTier | None = None,
        engine: Any = None,
        **kwargs: Any,
    ) -> None:
        self.engine = engine or FakeEngine(sizes)
        buckets = engine.buckets if engine else BucketSet.derive(sizes)
        self.wire = MemoryWire(network, address)
        layout = self.engine.page_layout
        self.tier, self.holds_gathers = tier, False
        if tier is not None:
            kwargs |= {"tier": tier, "loads": LoadRule(0.0, 5.0, least_tokens=1)}
        self.scheduler = CheckedScheduler(sizes, buckets, kwargs.pop("eos", ()), clock=clock, **kwargs)
        kind = DecodeSide if address is None else PrefillSide
        limits = RoomLimits(
            layout.page_bytes,
            staging_pages * layout.page_bytes,
            max_rooms,
            30.0,
            kwargs.get("max_queued_tokens"),
            self.scheduler.state.config.queue_timeout_s,
        )
        self.side: DecodeSide | PrefillSide = kind(
            self.scheduler, self.wire, layout, limits, lambda: getattr(self.engine, "weight_version", ""), clock
        )
        self.sizes, self.clock = sizes, clock
        self.last_turn_s: float | None = None
        self.unread_allowed = int(overlap)
        self.in_flight: deque[FakeHandle] = deque()
        self.outputs: dict[Key, list[int]] = {}
        self.replies: list[Reply] = []
        self.ended: dict[Key, FinishReason | RefusalKind] = {}
        self.requests: dict[str, Request] = {}

    def receive(self, message: Request | Abort) -> None:
        if isinstance(message, Request):
            self.requests[message.request_id] = message
        self.side.receive([message])
        self.scheduler.check()
        self.settle()

    def turn(self) -> None:
        """One turn of the loop, which sleeps while there is nothing to do and no time has passed."""
        if not self.is_busy and self.last_turn_s == self.clock():
            return
        self.last_turn_s = self.clock()
        inputs = self.side.launch()
        for number, op in self.scheduler.ops.take():
            self.engine.apply(op, number)
        if inputs is not None:
            self.in_flight.append(self.engine.submit(inputs))
        collects = self.in_flight and (inputs is None or len(self.in_flight) > self.unread_allowed)
        newest_only = len(self.in_flight) == 1
        if collects and not newest_only:
            self._collect()
        if inputs is not None and inputs.masked:
            self.in_flight[-1].choose(self.scheduler.masks(inputs.bucket.num_choices))
        if collects and newest_only:
            self._collect()
        if self.scheduler.ops.waiting and not self.holds_gathers:
            self.scheduler.ops.finished(self.engine.poll(wait=not (collects or self.in_flight)))
        self.settle()

    def load_adapter(self, name: str, folder: str) -> None:
        """In place of one of that name."""
        table = self.scheduler.state.adapters
        assert table is not None
        load(table, self.engine.adapters, LoadAdapter(0, name, folder), self.engine.adapters.stage(folder))

    def unload_adapter(self, name: str) -> None:
        table = self.scheduler.state.adapters
        assert table is not None
        table.retire(table.by_name[name])

    def _collect(self) -> None:
        oldest = self.in_flight.popleft()
        self.scheduler.collect(oldest.tokens(), oldest.outputs(), oldest.drafts)

    def settle(self) -> None:
        """Takes the replies. Every sample ends once, and says nothing after."""
        for reply in self.side.take_replies():
            self.replies.append(reply)
            samples = range(self.requests[reply.request_id].sampling.n)
            if reply.refusal is not None:
                left = [(reply.request_id, i) for i in samples if (reply.request_id, i) not in self.ended]
                assert left, f"{reply.request_id} has ended, and is refused"
                self.ended.update(dict.fromkeys(left, reply.refusal.kind))
                continue
            key = (reply.request_id, reply.index)
            assert key not in self.ended, f"{key} has ended: {reply}"
            self.outputs.setdefault(key, []).extend(reply.token_ids)
            if reply.finish_reason is not None:
                self.ended[key] = reply.finish_reason

    @property
    def transfer(self) -> TransferLoad:
        transfer = self.side.load(0).transfer
        assert transfer is not None
        return transfer

    @property
    def is_busy(self) -> bool:
        return bool(self.in_flight or self.wire.events) or not self.side.is_idle

    def check_empty(self) -> None:
        """Nothing is left: no rooms, no staging memory, no page but cached ones."""
        scheduler, rooms = self.scheduler, self.side.rooms
        assert (rooms.num_rooms, rooms.staged_bytes) == (0, 0)
        assert self.side.is_idle and scheduler.cache.num_available == self.sizes.num_pages - 1
        assert scheduler.load(0).used_tokens == 0
        kept_images, images = scheduler.kept_images, scheduler.state.images
        assert kept_images is None or not kept_images.host.num_holders
        assert images is None or (images.sliced is None and not images.pool.num_locked)
        scheduler.check()
        if self.tier is not None:
            assert not self.tier.is_writing and not any(page.num_loads for page in self.tier.host.all())
            check_names(self.tier, scheduler.cache)


def without_tower(sizes: Capacity) -> Capacity:
    """`sizes` of a decode worker, which gets embeddings from prefill."""
    assert sizes.media is not None and sizes.tower is not None
    media = msgspec.structs.replace(sizes.media, may_come_later=True)
    return replace(sizes, media=media, tower=replace(sizes.tower, encodes=False))


def at(request: Request, number: int, address: tuple[str, int] = PREFILL) -> Request:
    """`request` with a room."""
    return msgspec.structs.replace(request, room=Rendezvous(*address, number))


def run(network: Network, *workers: Worker, turns: int = 2000) -> None:
    """Turns and delivers until nothing happens any more."""
    for _ in range(turns):
        network.deliver_all()
        for worker in workers:
            worker.turn()
        if not (any(network.on_way.values()) or any(worker.is_busy for worker in workers)):
            return
    raise AssertionError(f"not done after {turns} turns")
