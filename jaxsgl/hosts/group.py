"""What an engine process asks of the hosts that share its model: `Hosts`. `Alone` is the answer on one host.

    start     same(..), least(..), all_of(..)     all hosts come to one decision, or all end and say why
    end       fail(..), end()

leader.py and follower.py implement it over the network. `Neighbours` is what pipeline stages see of the hosts that have
the stages around theirs; passing.py connects them. Knows no sockets and no JAX.
"""

from __future__ import annotations

import logging
import os
import queue
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy.typing as npt

from jaxsgl.messages.replies import HostsLoad

REMIND_S = 60.0
BLAME_S = 1.0  # in which a host that has failed learns whether another one that is gone is the cause

ItemT = TypeVar("ItemT")

logger = logging.getLogger(__name__)


class Hosts(Protocol):
    """The hosts of a model. Methods are called by all hosts in the same order, from the main thread.

    Attributes:
      rank: of this host.
      size: how many there are.
      num_threads: that compile, the same everywhere, since programs of GPUs are tuned by all hosts together.
      address: at which other hosts reach this one, without a port.
    """

    rank: int
    size: int
    num_threads: int
    address: str

    def same(self, what: str, value: str, way_out: str) -> None:
        """Waits for all hosts. Raises `StartupError`, which names host and values, unless `value` is the same on all.

        `what` is a plural, as "the devices"; `way_out` says what to do.
        """
        ...

    def least(self, what: str, values: Sequence[int]) -> tuple[int, ...]:
        """Waits for all hosts; the least of each of `values`."""
        ...

    def all_of(self, what: str, value: str) -> tuple[str, ...]:
        """Waits for all hosts; the `value` of each, by rank."""
        ...

    def fail(self, text: str) -> None:
        """Tells the other hosts that this one ends because of `text`, so that they do. Before that another host's end
        may be seen as the cause, and named to the front end.
        """
        ...

    def end(self) -> None:
        """Has all hosts end, now that nothing runs."""
        ...


class Before(Protocol):
    """The host whose pipeline stages come before those of this one."""

    def receive(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Waits for the next array that it passes on. Raises `LineLost` if it is gone, or passes on another one."""
        ...

    def close(self) -> None:
        """Hangs up."""
        ...


class After(Protocol):
    """The host whose pipeline stages come after those of this one."""

    def send(self, array: npt.NDArray[Any]) -> None:
        """Passes an array on. Raises `LineLost` if the host is gone."""
        ...

    def close(self) -> None:
        """Hangs up."""
        ...


class Neighbours(NamedTuple):
    """The hosts with the stages before and after those of this one; (): the first or the last stage is here."""

    before: tuple[Before, ...] = ()
    after: tuple[After, ...] = ()


class Report(Protocol):
    """Takes what the front end of this host must know. May be called from any thread."""

    def hosts(self, load: HostsLoad) -> None:
        """The hosts live."""
        ...

    def fail(self, text: str) -> None:
        """This process ends because of `text`; doesn't return where it can end the process, whose loop may hang."""
        ...


class Alone:
    """One host."""

    rank = 0
    size = 1
    address = "localhost"

    def __init__(self) -> None:
        self.num_threads = processors()

    def same(self, what: str, value: str, way_out: str) -> None:
        """There is no other."""

    def least(self, what: str, values: Sequence[int]) -> tuple[int, ...]:
        """See `Hosts`."""
        return tuple(values)

    def all_of(self, what: str, value: str) -> tuple[str, ...]:
        """See `Hosts`."""
        return (value,)

    def fail(self, text: str) -> None:
        """There is no other."""

    def end(self) -> None:
        """There is no other."""


def wait_patiently(source: queue.SimpleQueue[ItemT], what: str) -> ItemT:
    """The next item, whenever it comes; the log says now and then that `what` is waited for.

    Loading and compiling may take one host much longer than another. One that dies meanwhile is noticed elsewhere.
    """
    while True:
        try:
            return source.get(timeout=REMIND_S)
        except queue.Empty:
            logger.info("waiting for %s", what)


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def difference(mine: Mapping[str, str], theirs: Mapping[str, str], here: str, there: str) -> str | None:
    """In words, what differs between the facts of two hosts, at most three of them; None if nothing does."""
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if not names:
        return None
    told = [f"{name} is {theirs.get(name)} on {there}, but {mine.get(name)} on {here}" for name in names[:3]]
    more = f", and {len(names) - 3} more differ" if len(names) > 3 else ""
    return "; ".join(told) + more + ": give all hosts the same flags, and install the same versions"
