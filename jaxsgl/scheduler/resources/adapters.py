"""`AdapterTable`: which LoRA adapters are loaded, which of them are on the device, and which requests have them.

    load       a name and a rank; a loading has a number, and shares prefixes with those of equal adapters
    retire     requests can't name it any more; it is forgotten when the last one that has it has ended
    place      gives a loaded adapter columns of the device's pool, those of unused ones if none are free

An adapter stays on the device while a request that has it holds a row. Of the others the one that was used longest ago
leaves first; a pinned one never does. The only writer of `AdapterRows`. Knows no weights: operations in step order say
what the engine is to write where. A server that takes no adapters has an empty table, which is no resource.
arrivals.py and orders/adapters.py call it, and apply.py as any resource.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from jaxsgl.batch.engine_api import PlaceAdapter
from jaxsgl.batch.sampling import AdapterRows
from jaxsgl.cache.prefix import Peek
from jaxsgl.messages.orders import LoadedAdapter
from jaxsgl.messages.replies import Load
from jaxsgl.scheduler.engine_ops import EngineOps
from jaxsgl.scheduler.plan import Action, WhyNot
from jaxsgl.scheduler.req import Adapter, Req
from jaxsgl.scheduler.request_table import RequestTable
from jaxsgl.scheduler.resources.resource import PlanInTheMaking, Resource, ResourceDraft


@dataclass(frozen=True, slots=True)
class Placement:
    """Bring `adapter` to the device, after `removed` have left it."""

    verb: ClassVar[str] = "place"
    adapter: Adapter
    removed: tuple[Adapter, ...]

    def __str__(self) -> str:
        return self.adapter.name


class AdapterTable(Resource):
    """Loaded adapters.

    Args:
      num_rows: of the scheduler.
      max_adapters: that may be on the device; 0: none is ever loaded.
      num_columns: of the pool, enough for `max_adapters` of the highest rank.
      max_loaded: adapters that may be loaded; None: any number.

    Attributes:
      rows: what batches are built from.
      max_rank: of an adapter.
      by_name: those that requests may name.
    """

    def __init__(
        self, ops: EngineOps, num_rows: int, max_adapters: int, num_columns: int, max_loaded: int | None = None
    ) -> None:
        self.rows = AdapterRows(num_rows, max_adapters, num_columns)
        self.max_adapters = max_adapters
        self.max_rank = num_columns // max(max_adapters, 1)
        self.by_name: dict[str, Adapter] = {}
        self.on_device: dict[int, Adapter] = {}  # by place
        self._max_loaded = max_loaded
        self._num_loaded = 0
        self._num_uses = 0
        self._ops = ops

    @property
    def names(self) -> tuple[str, ...]:
        """Those that requests may name, in order of their loading."""
        return tuple(self.by_name)

    def why_not(self, name: str, rank: int, pinned: bool, replace: bool, alias: str) -> str | None:
        """Why an adapter can't be loaded; None if it can."""
        same = self.by_name.get(name)
        for given in (name, alias):
            meant = self.named(given)
            if meant is not None and meant.name != name:
                return f"{given} names the adapter {meant.name} already: unload that first, or take another name and id"
        if same is not None and not replace:
            return f"an adapter named {name} is loaded already: unload it first, or send load_inplace"
        if rank > self.max_rank:
            return f"the adapter has rank {rank}, but {self.max_rank} is the most: raise --max-lora-rank"
        if same is None and self._max_loaded is not None and len(self.by_name) >= self._max_loaded:
            return f"{len(self.by_name)} adapters are loaded, and --max-loaded-loras allows no more: unload one first"
        pins = sum(other.pinned for other in self.by_name.values() if other is not same)
        if pinned and pins + 1 >= self.max_adapters:
            return (
                f"{pins} adapters are pinned, and of --max-loras-per-batch {self.max_adapters} one must be left to "
                "others: load it without pinned"
            )
        return None

    def named(self, name: str) -> Adapter | None:
        """The adapter of that name or alias; None: there is none."""
        found = self.by_name.get(name)
        if found is None and name:
            found = next((adapter for adapter in self.by_name.values() if adapter.alias == name), None)
        return found

    def load(self, name: str, folder: str, rank: int, pinned: bool, alias: str = "", digest: str = "") -> Adapter:
        """Lets requests name an adapter from now on, instead of one that had its name before; see `why_not`."""
        self._num_loaded += 1
        adapter = Adapter(self._num_loaded, name, folder, rank, pinned, digest, alias)
        self.by_name.pop(name, None)
        self.by_name[name] = adapter
        return adapter

    def retire(self, adapter: Adapter) -> None:
        """Lets no further request name it."""
        if self.by_name.get(adapter.name) is adapter:
            del self.by_name[adapter.name]
        adapter.pinned = False
        self.epoch += 1  # its place may be taken

    def forget(self, adapter: Adapter) -> None:
        """Frees its columns; no request has it."""
        assert not adapter.num_requests and self.by_name.get(adapter.name) is not adapter
        if adapter.place:
            self._remove(adapter)

    def place(self, placement: Placement) -> None:
        """Gives an adapter columns, and orders the engine to write them before the next step."""
        for other in placement.removed:
            self._remove(other)
        adapter = placement.adapter
        place = next(place for place in range(1, self.max_adapters + 1) if place not in self.on_device)
        columns = self.rows.place(place, adapter.rank)
        adapter.place = place
        self.on_device[place] = adapter
        self._ops.submit(PlaceAdapter(adapter.number, columns))

    def draft(self, plan: PlanInTheMaking) -> AdapterDraft:
        """See `Resource`."""
        return AdapterDraft(self)

    def arrived(self, samples: Sequence[Req]) -> None:
        """Counts requests that have an adapter."""
        adapter = samples[0].adapter
        if adapter is not None:
            adapter.num_requests += len(samples)

    def prepare(self, actions: Iterable[Action]) -> None:
        """Places adapters: a request is admitted only if its own is on the device."""
        for action in actions:
            if isinstance(action, Placement):
                self.place(action)

    def admitted(self, req: Req) -> None:
        """Gives the row of `req` its adapter, or none."""
        adapter, lease = req.adapter, req.lease
        assert lease is not None
        if adapter is None:
            self.rows.set_row(lease.row, 0)
            return
        assert adapter.place, f"{adapter.name} is not on the device"
        self._num_uses += 1
        adapter.last_used = self._num_uses
        adapter.num_admitted += 1
        self.rows.set_row(lease.row, adapter.place)

    def left(self, req: Req, ends: bool) -> None:
        """Takes the adapter of `req` off its row."""
        adapter = req.adapter
        if req.lease is not None:
            self.rows.set_row(req.lease.row, 0)
            if adapter is not None:
                adapter.num_admitted -= 1
        if adapter is not None:
            adapter.num_requests -= ends

    def report(self) -> list[LoadedAdapter]:
        """What operators may know."""
        return [
            LoadedAdapter(
                adapter.name,
                adapter.folder,
                adapter.rank,
                adapter.pinned,
                bool(adapter.place),
                adapter.num_requests,
                adapter.alias,
            )
            for adapter in self.by_name.values()
        ]

    def add_to(self, load: Load) -> Load:
        """Names the adapters."""
        return msgspec.structs.replace(load, adapters=self.names)

    def dump(self) -> dict[str, Any]:
        """See `report`."""
        return {"adapters": msgspec.to_builtins(self.report())}

    def check(self, requests: RequestTable) -> None:
        """Raises AssertionError if rows, columns or counts are not those of `requests`."""
        owners = self.rows.column_owners
        for place, adapter in self.on_device.items():
            assert adapter.place == place and (owners == place).sum() == adapter.rank, f"{adapter.name} is misplaced"
        assert set(owners[owners > 0].tolist()) == set(self.on_device), "columns of no adapter"
        counts = dict.fromkeys(self.on_device.values(), 0)
        for req in requests.admitted.values():
            assert req.lease is not None
            place = req.adapter.place if req.adapter else 0
            assert self.rows.number_of_row[req.lease.row] == place, f"row {req.lease.row} has another adapter"
            if req.adapter is not None:
                counts[req.adapter] += 1
        assert all(adapter.num_admitted == count for adapter, count in counts.items()), "admitted requests"
        of_reqs = [req.adapter for req in requests.all()]
        for adapter in {*self.by_name.values(), *self.on_device.values()}:
            assert adapter.num_requests == of_reqs.count(adapter), f"requests that have {adapter.name}"

    def _remove(self, adapter: Adapter) -> None:
        assert not adapter.num_admitted
        self.rows.remove(adapter.place)
        del self.on_device[adapter.place]
        adapter.place = 0


class AdapterDraft(ResourceDraft):
    """What a plan in the making brings to the device: reads the table, and changes nothing of it."""

    def __init__(self, table: AdapterTable) -> None:
        self._table = table
        self._used: set[Adapter] = set()  # by requests that the plan admits
        self._removed: set[Adapter] = set()
        self._placements: list[Placement] = []
        self._keeps_places = False  # for a request that was passed over too often

    def begin_step(self) -> None:
        """The queue is read anew."""
        self._keeps_places = False

    def may_admit(self, req: Req) -> WhyNot | None:
        """Whether the adapter of `req` is on the device or can be brought there, and no other one waits for its place.

        While one does, only requests are admitted that keep no adapter there which could leave.
        """
        adapter = req.adapter
        if adapter is None:
            return None
        if not self._is_there(adapter) and self._removals(adapter) is None:
            return WhyNot.ADAPTERS
        return WhyNot.ADAPTERS if self._keeps_places and not adapter.pinned else None

    def passed_over(self, req: Req) -> None:
        """Keeps a place for `req`, if it is its adapter that it waits for."""
        self._keeps_places = self._keeps_places or req.adapter is not None

    def admit(self, req: Req, prefix: Peek) -> None:
        """Counts `req` as admitted; see `may_admit`."""
        adapter = req.adapter
        if adapter is None:
            return
        if not self._is_there(adapter):
            removed = self._removals(adapter)
            assert removed is not None
            self._removed.update(removed)
            self._placements.append(Placement(adapter, removed))
        self._used.add(adapter)

    def actions(self, decodes: bool) -> tuple[Action, ...]:
        """The placements, in order."""
        return tuple(self._placements)

    def _is_there(self, adapter: Adapter) -> bool:
        return adapter in self._used or (adapter.place > 0 and adapter not in self._removed)

    def _removals(self, adapter: Adapter) -> tuple[Adapter, ...] | None:
        """The adapters that must leave for it, oldest first; None if those that may are not enough.

        As many columns as the highest rank are there for each of the adapters, so their number is all that counts.
        """
        there = {other for other in self._table.on_device.values() if other not in self._removed}
        there |= {placement.adapter for placement in self._placements}
        if len(there) < self._table.max_adapters:
            return ()
        idle = [other for other in self._table.on_device.values() if other in there and self._may_leave(other)]
        if not idle:
            return None
        return (min(idle, key=lambda other: other.last_used),)

    def _may_leave(self, adapter: Adapter) -> bool:
        return not (adapter.num_admitted or adapter.pinned or adapter in self._used)
