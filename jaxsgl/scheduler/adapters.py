"""`AdapterTable`: which LoRA adapters are loaded, which of them are on the device, and which requests have them.

    load       a name and a rank; each loading has a number and a namespace of prefixes of its own, whatever its name
    retire     requests can't name it any more; it is forgotten when the last one that has it has ended
    place      gives a loaded adapter columns of the device's pool, those of unused ones if none are free

An adapter stays on the device while a request that has it holds a row. Of the others the one that was used longest ago
leaves first; a pinned one never does. `AdapterLedger` tells a plan what could be placed. The only writer of
`AdapterRows`. Knows no weights: operations in step order tell the engine what to write where. scheduler.py,
arrivals.py, apply.py and adapter_orders.py call it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxsgl.batch.adapter_rows import AdapterRows
from jaxsgl.batch.engine_ops import PlaceAdapter
from jaxsgl.messages.adapters import LoadedAdapter
from jaxsgl.scheduler.engine_ops import EngineOps


@dataclass(eq=False, slots=True)
class Adapter:
    """One loading of an adapter.

    Attributes:
      number: of the loading; never used again.
      name, folder, rank, pinned, alias: see `LoadAdapter`.
      digest: of what was read, equal on servers that have read the same.
      loading: stands for this loading in namespaces; unlike that of any other server.
      num_requests: samples that have it and have not ended.
      num_admitted: of those, the ones that hold a row.
      place: its small number on the device, 0 while it isn't there.
      last_used: counts uses; the order of them is all that matters.
    """

    number: int
    name: str
    folder: str
    rank: int
    pinned: bool
    digest: str = ""
    alias: str = ""
    loading: str = field(default_factory=lambda: uuid.uuid4().hex)
    num_requests: int = 0
    num_admitted: int = 0
    place: int = 0
    last_used: int = 0


class Placement(NamedTuple):
    """Bring `adapter` to the device, after `removed` have left it."""

    adapter: Adapter
    removed: tuple[Adapter, ...]


class AdapterTable:
    """Loaded adapters.

    Args:
      num_rows: of the scheduler.
      max_adapters: that may be on the device.
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
        self.max_rank = num_columns // max_adapters
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

    def why_not(self, name: str, rank: int, pinned: bool, replace: bool) -> str | None:
        """Why an adapter can't be loaded; None if it can."""
        same = self.by_name.get(name)
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

    def admitted(self, adapter: Adapter | None, row: int) -> None:
        """A request that has `adapter`, or none, got `row`."""
        if adapter is None:
            self.rows.set_row(row, 0)
            return
        assert adapter.place, f"{adapter.name} is not on the device"
        self._num_uses += 1
        adapter.last_used = self._num_uses
        adapter.num_admitted += 1
        self.rows.set_row(row, adapter.place)

    def left(self, adapter: Adapter | None, row: int) -> None:
        """A request that has `adapter`, or none, gave `row` back."""
        self.rows.set_row(row, 0)
        if adapter is not None:
            adapter.num_admitted -= 1

    def told(self) -> list[LoadedAdapter]:
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

    def check(self, admitted: Iterable[tuple[Adapter | None, int]], reqs: Iterable[Adapter | None]) -> None:
        """Raises AssertionError if rows, columns or counts are not those of the requests."""
        owners = self.rows.column_owners
        for place, adapter in self.on_device.items():
            assert adapter.place == place and (owners == place).sum() == adapter.rank, f"{adapter.name} is misplaced"
        assert set(owners[owners > 0].tolist()) == set(self.on_device), "columns of no adapter"
        counts = dict.fromkeys(self.on_device.values(), 0)
        for of_row, row in admitted:
            assert self.rows.number_of_row[row] == (of_row.place if of_row else 0), f"row {row} has another adapter"
            if of_row is not None:
                counts[of_row] += 1
        assert all(adapter.num_admitted == count for adapter, count in counts.items()), "admitted requests"
        of_reqs = [adapter for adapter in reqs if adapter is not None]
        for adapter in {*self.by_name.values(), *self.on_device.values()}:
            assert adapter.num_requests == of_reqs.count(adapter), f"requests that have {adapter.name}"

    def _remove(self, adapter: Adapter) -> None:
        assert not adapter.num_admitted
        self.rows.remove(adapter.place)
        del self.on_device[adapter.place]
        adapter.place = 0


class AdapterLedger:
    """What a plan in the making brings to the device: reads the table, and changes nothing of it.

    Attributes:
      placements: in order.
    """

    def __init__(self, table: AdapterTable) -> None:
        self._table = table
        self._used: set[Adapter] = set()  # by requests that the plan admits
        self._removed: set[Adapter] = set()
        self.placements: list[Placement] = []

    def may_admit(self, adapter: Adapter) -> bool:
        """Whether a request for it can get a row: it is on the device, or can be brought there."""
        return self._is_there(adapter) or self._removals(adapter) is not None

    def admit(self, adapter: Adapter) -> None:
        """Counts a request for it as admitted; see `may_admit`."""
        if not self._is_there(adapter):
            removed = self._removals(adapter)
            assert removed is not None
            self._removed.update(removed)
            self.placements.append(Placement(adapter, removed))
        self._used.add(adapter)

    def _is_there(self, adapter: Adapter) -> bool:
        return adapter in self._used or (adapter.place > 0 and adapter not in self._removed)

    def _removals(self, adapter: Adapter) -> tuple[Adapter, ...] | None:
        """The adapters that must leave for it, oldest first; None if those that may are not enough.

        As many columns as the highest rank are there for each of the adapters, so their number is all that counts.
        """
        there = {other for other in self._table.on_device.values() if other not in self._removed}
        there |= {placement.adapter for placement in self.placements}
        if len(there) < self._table.max_adapters:
            return ()
        idle = [other for other in self._table.on_device.values() if other in there and self._may_leave(other)]
        if not idle:
            return None
        return (min(idle, key=lambda other: other.last_used),)

    def _may_leave(self, adapter: Adapter) -> bool:
        return not (adapter.num_admitted or adapter.pinned or adapter in self._used)
