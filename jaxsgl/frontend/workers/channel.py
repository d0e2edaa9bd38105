"""What the parent and its front-end workers say to each other: orders, states, and what each has counted.

One socket per worker, messages as JSON lines. Nothing of a request travels here, and only some messages a minute. The
end of the stream is the death of the process at its other end. workers.py holds the parent's ends, worker.py the
worker's. `Counts` takes every counter and histogram of `Metrics` by its name, so that a new one needs no line here;
exposition.py shows the sum of all processes as one process's metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import Metric

from jaxsgl.config.server import ServerConfig
from jaxsgl.frontend.metrics.measurements import Histogram, Metrics
from jaxsgl.ipc import Endpoints

START_TIME = "process_start_time_seconds"
MAX_MESSAGE_BYTES = 64 << 20

MessageT = TypeVar("MessageT")


class Counts(msgspec.Struct, frozen=True, tag="counts"):
    """Counts of one process, or of several together.

    Attributes:
      counters: by the name that they have in `Metrics`.
      histograms: likewise: values in each bucket, and their sum.
      process: memory, processor time and files, by the names that Prometheus gives them; empty where /proc is missing.
      num_open: calls that are open.
    """

    counters: dict[str, dict[str, int]] = {}
    histograms: dict[str, tuple[list[int], float]] = {}
    process: dict[str, float] = {}
    num_open: int = 0

    def ended(self) -> Counts:
        """Returns what remains of them when their process has ended: what it has counted, and its processor time."""
        kept = {name: value for name, value in self.process.items() if name.endswith("_total")}
        return Counts(self.counters, self.histograms, kept)


def counts_of(metrics: Metrics, num_open: int) -> Counts:
    """Returns the counts of this process."""
    found = vars(metrics)
    return Counts(
        {name: dict(value) for name, value in found.items() if isinstance(value, Counter)},
        {name: value.state() for name, value in found.items() if isinstance(value, Histogram)},
        {sample.name: sample.value for family in process_families() for sample in family.samples},
        num_open,
    )


def process_families() -> list[Metric]:
    """Returns Prometheus' metrics of this process, each with one sample."""
    return list(ProcessCollector(registry=None).collect())


def summed(parts: Iterable[Counts]) -> Counts:
    """Returns the sum; processes have started when the first one has."""
    counters: dict[str, Counter[str]] = {}
    histograms: dict[str, tuple[list[int], float]] = {}
    process: dict[str, float] = {}
    num_open = 0
    for part in parts:
        for name, counter in part.counters.items():
            counters.setdefault(name, Counter()).update(counter)
        for name, (counts, total) in part.histograms.items():
            before, so_far = histograms.get(name, ([0] * len(counts), 0.0))
            histograms[name] = [a + b for a, b in zip(before, counts, strict=True)], so_far + total
        for name, value in part.process.items():
            if name == START_TIME:
                process[name] = min(process.get(name, value), value)
            else:
                process[name] = process.get(name, 0.0) + value
        num_open += part.num_open
    return Counts({name: dict(counter) for name, counter in counters.items()}, histograms, process, num_open)


def with_counts(metrics: Metrics, counts: Counts) -> Metrics:
    """Returns metrics with the engine's numbers of `metrics` and these counts."""
    total = copy.copy(metrics)
    values: dict[str, Any] = {name: Counter(counter) for name, counter in counts.counters.items()}
    for name, state in counts.histograms.items():
        values[name] = getattr(metrics, name).with_state(*state)
    vars(total).update(values)
    return total


class ProcessesCollector:
    """Shows the figures of several processes under the names that those of one process have."""

    def __init__(self, of_all: dict[str, float]) -> None:
        self._of_all = of_all

    def collect(self) -> Iterator[Metric]:
        """Yields a family for each figure."""
        for family in process_families():
            family.samples = [
                sample._replace(value=self._of_all.get(sample.name, sample.value)) for sample in family.samples
            ]
            yield family


class WorkerLaunch(msgspec.Struct, frozen=True, tag="launch"):
    """The first message to a worker.

    Attributes:
      number: 1, 2, ...; the one that takes a dead worker's place has its number.
      config: the server's, with both ports as they were taken.
      endpoints: where each engine is, by rank; the line is this worker's alone.
      dead: why replicas have died, by rank; nothing else is known of them.
      stuck: why replicas are stuck, by rank; they may not answer.
      is_late: the server is ready, and this worker takes the place of one that died.
    """

    number: int
    config: ServerConfig
    endpoints: tuple[Endpoints, ...]
    dead: dict[int, str] = {}
    stuck: dict[int, str] = {}
    is_late: bool = False


class EngineDied(msgspec.Struct, frozen=True, tag="engine_died"):
    """The open calls on the replica `rank` must fail with this reason; with the last replica the worker ends."""

    rank: int
    reason: str


class EngineStuck(msgspec.Struct, frozen=True, tag="engine_stuck"):
    """The watchdog's verdict on the replica `rank` has changed: why it is stuck, None if it works again."""

    rank: int
    reason: str | None


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Let open calls finish within `ServerConfig.drain_s`, and end."""


class AskCounts(msgspec.Struct, frozen=True, tag="ask_counts"):
    """Asks for the worker's `Counts`; also shows that its loop turns."""


class Total(msgspec.Struct, frozen=True, tag="total"):
    """Answers `AskTotal`: the counts of all workers."""

    counts: Counts


class WorkerReady(msgspec.Struct, frozen=True, tag="ready"):
    """The worker takes requests."""


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The worker ends because of this."""

    message: str


class AskTotal(msgspec.Struct, frozen=True, tag="ask_total"):
    """Asks for the counts of all workers, and brings those of the one that asks."""

    counts: Counts


ToWorker: TypeAlias = WorkerLaunch | EngineDied | EngineStuck | Drain | AskCounts | Total
FromWorker: TypeAlias = WorkerReady | StartFailed | Counts | AskTotal


class Channel(Generic[MessageT]):
    """One end of a socket, which receives messages of one type. Made by `open_channel`."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.json.Decoder[MessageT],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder

    async def receive(self) -> MessageT | None:
        """Returns the next message, None if the other process has ended."""
        with contextlib.suppress(ConnectionError):
            line = await self._reader.readline()
            if line.endswith(b"\n"):
                return self._decoder.decode(line)
        return None

    def send(self, message: ToWorker | FromWorker) -> None:
        """Sends without waiting; what is sent to a process that has ended is lost."""
        self._writer.write(msgspec.json.encode(message) + b"\n")

    def close(self) -> None:
        """Closes this end."""
        self._writer.close()


async def parents_end(end: socket.socket) -> Channel[FromWorker]:
    """Returns the parent's end."""
    reader, writer = await asyncio.open_unix_connection(sock=end, limit=MAX_MESSAGE_BYTES)
    return Channel(reader, writer, msgspec.json.Decoder(FromWorker))


async def workers_end(end: socket.socket) -> Channel[ToWorker]:
    """Returns the worker's end."""
    reader, writer = await asyncio.open_unix_connection(sock=end, limit=MAX_MESSAGE_BYTES)
    return Channel(reader, writer, msgspec.json.Decoder(ToWorker))
