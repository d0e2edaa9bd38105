"""`AdapterOrders`: operators' orders about LoRA adapters: load, unload, list.

    load     read the folder in a thread while steps run -> requests may name it
    unload   requests can't name it any more -> wait until those that have it have ended -> forget it

Orders of both kinds overtake each other; loads are read one after the other. An adapter that another one of its name
replaces is unloaded the same way. Knows no files and no arrays: `AdapterStore` does that work. Called by control.py.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Protocol

import msgspec

from jaxsgl.errors import StartupError
from jaxsgl.messages.orders import AdapterOrder, Answer, ListAdapters, LoadAdapter, UnloadAdapter
from jaxsgl.scheduler.req import Adapter
from jaxsgl.scheduler.resources.adapters import AdapterTable
from jaxsgl.scheduler.serving import Serving

IDLE_POLL_S = 0.05

logger = logging.getLogger(__name__)


class Staged(Protocol):
    """An adapter that was read: its highest rank, and what it is."""

    @property
    def rank(self) -> int:
        """The most columns that it needs."""
        ...

    @property
    def digest(self) -> str:
        """Equal for equal adapters, on any server."""
        ...


class AdapterStore(Protocol):
    """Where an engine holds the adapters that are loaded, by the numbers of their loadings."""

    def stage(self, folder: str) -> Staged:
        """Reads an adapter, in any thread, while steps run. Raises `StartupError` if it can't be served."""
        ...

    def keep(self, number: int, staged: Any) -> None:
        """Holds what `stage` returned as loading `number`, which may be placed from now on."""
        ...

    def drop(self, number: int) -> None:
        """Forgets a loading."""
        ...


class _Reading(NamedTuple):
    order: LoadAdapter
    staged: Future[Staged]


class _Leaving(NamedTuple):
    adapter: Adapter
    number: int | None  # of the order, or None if it was replaced or nothing waits for the answer


class AdapterOrders:
    """The orders that are not done yet; an `Order` while there are any.

    Args:
      serving: whose requests name adapters.
      store: holds their weights, or None if no flag asks for adapters.
      answer: takes the answers.
      loader: reads adapters while steps run; a thread does if it is None.
    """

    def __init__(
        self,
        serving: Serving,
        store: AdapterStore | None,
        answer: Callable[[Answer], None],
        loader: Executor | None = None,
    ) -> None:
        self._serving = serving
        self._table = serving.scheduler.ranks[0].state.adapters  # of several ranks none takes any
        self._store = store
        self._answer = answer
        self._reading: deque[_Reading] = deque()
        self._leaving: list[_Leaving] = []
        self._loader = loader or ThreadPoolExecutor(1, "load-adapters")  # starts its thread with the first order

    @property
    def is_active(self) -> bool:
        """Whether an adapter is being read, so that `after_turn` will have news although no message comes."""
        return bool(self._reading)

    def handle(self, order: AdapterOrder) -> None:
        """Begins `order`. Its answer comes with this turn or a later one."""
        table, store = self._table, self._store
        if store is None:
            self._answer(Answer(order.number, False, "this server takes no adapters: start it with --enable-lora"))
            return
        match order:
            case LoadAdapter(name=name):
                why_not = table.why_not(name, 0, order.pinned, order.replace, order.alias)
                if why_not is not None:
                    self._answer(Answer(order.number, False, why_not))
                else:
                    self._reading.append(_Reading(order, self._loader.submit(store.stage, order.folder)))
            case UnloadAdapter(number, name):
                adapter = table.named(name)
                if adapter is None:
                    self._answer(Answer(number, False, f"no adapter named {name} is loaded"))
                else:
                    table.retire(adapter)
                    self._leaving.append(_Leaving(adapter, number))
            case ListAdapters(number):
                self._answer(Answer(number, True, msgspec.json.encode(table.report()).decode()))

    def withdraw(self, number: int) -> None:
        """Needs no answer to the order `number`: what is read for it is thrown away; an unload goes on."""
        for reading in [reading for reading in self._reading if reading.order.number == number]:
            reading.staged.cancel()
            self._reading.remove(reading)
        self._leaving = [
            _Leaving(adapter, None) if of_order == number else _Leaving(adapter, of_order)
            for adapter, of_order in self._leaving
        ]

    def after_turn(self, collected: bool) -> bool:
        """Advances all orders after a turn; False if none is left."""
        if self._reading:
            wait([self._reading[0].staged], IDLE_POLL_S if self._serving.is_idle else 0)
        while self._reading and self._reading[0].staged.done():
            self._end_load(self._reading.popleft())
        for leaving in [leaving for leaving in self._leaving if not leaving.adapter.num_requests]:
            self._leaving.remove(leaving)
            self._forget(leaving)
        return bool(self._reading or self._leaving)

    def _end_load(self, reading: _Reading) -> None:
        order = reading.order
        try:
            staged = reading.staged.result()
        except StartupError as error:
            self._answer(Answer(order.number, False, str(error)))
            return
        except Exception as error:
            logger.exception("the adapter %s can't be loaded", order.name)
            words = " ".join(str(error).split())[:500]
            self._answer(Answer(order.number, False, f"{type(error).__name__}: {words}"))
            return
        assert self._store is not None
        why_not = self._table.why_not(order.name, staged.rank, order.pinned, order.replace, order.alias)
        if why_not is None:
            load(self._table, self._store, order, staged, self._replaced)
            logger.info("adapter %s of %s is loaded, rank %d", order.name, order.folder, staged.rank)
        self._answer(Answer(order.number, why_not is None, why_not or ""))

    def _replaced(self, adapter: Adapter) -> None:
        self._leaving.append(_Leaving(adapter, None))

    def _forget(self, leaving: _Leaving) -> None:
        assert self._store is not None
        self._table.forget(leaving.adapter)
        self._store.drop(leaving.adapter.number)
        logger.info("adapter %s of %s is unloaded", leaving.adapter.name, leaving.adapter.folder)
        if leaving.number is not None:
            self._answer(Answer(leaving.number, True))


def load(
    table: AdapterTable,
    store: AdapterStore,
    order: LoadAdapter,
    staged: Staged,
    replaced: Callable[[Adapter], None] = lambda adapter: None,
) -> None:
    """Lets requests name the adapter that was read for `order`; `replaced` gets the one that had its name before."""
    old = table.by_name.get(order.name)
    if old is not None:
        table.retire(old)
        replaced(old)
    adapter = table.load(order.name, order.folder, staged.rank, order.pinned, order.alias, staged.digest)
    store.keep(adapter.number, staged)
