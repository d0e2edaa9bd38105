"""Hosts of one model over loopback, for tests of how they meet."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxsgl.config.hosts import HostsConfig
from jaxsgl.hosts.follower import Follower
from jaxsgl.hosts.leader import Leader
from jaxsgl.messages.replies import HostsLoad

FACTS = {"--page-size": "16", "the version of JAX": "0.10"}
PATIENCE_S = 20.0


def free_port(number: int) -> int:
    """The first of so many free ports next to each other. The system gives none of these to connections."""
    while True:
        first = random.randrange(12_000, 30_000)
        with contextlib.ExitStack() as bound, contextlib.suppress(OSError):
            for port in range(first, first + number):
                bound.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


class Reports:
    """A `Report` that ends nothing."""

    def __init__(self) -> None:
        self.loads: list[HostsLoad] = []
        self.failures: list[str] = []

    def hosts(self, load: HostsLoad) -> None:
        self.loads.append(load)

    def fail(self, text: str) -> None:
        self.failures.append(text)


def wait_for(look: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return found


class World:
    """Hosts of one model, each started in a thread."""

    def __init__(self, size: int, secrets: tuple[str | None, ...] = (), timeout_s: float = PATIENCE_S) -> None:
        self.port = free_port(size)
        self.size, self.timeout_s = size, timeout_s
        self.secrets = secrets or (None,) * size
        self.reports = [Reports() for _ in range(size)]
        self.hosts: list[Any] = []
        self.threads = ThreadPoolExecutor(size)
        self._begun: list[Future[Any]] = []

    def starting(self, rank: int, facts: Mapping[str, str] = FACTS) -> Future[Any]:
        address = f"127.0.0.1:{self.port}"
        config = HostsConfig(self.size, rank, address, self.secrets[rank], self.timeout_s)
        self._begun.append(self.threads.submit(Follower if rank else Leader, config, facts, self.reports[rank]))
        return self._begun[-1]

    def close(self) -> None:
        for begun in self._begun:
            if begun.exception(PATIENCE_S) is None:
                host = begun.result()
                host._ending.set()
                if host.rank:
                    host._calls.put(None)  # so that nothing waits for the next one
                for end in [host._line] if host.rank else [each.line for each in host._others.values()]:
                    end.close()
        self.threads.shutdown()

    def start(self) -> tuple[Leader, list[Follower]]:
        self.hosts = [each.result(PATIENCE_S) for each in [self.starting(rank) for rank in range(self.size)]]
        return self.hosts[0], self.hosts[1:]

    def everywhere(self, ask: Callable[[Any], Any]) -> list[Any]:
        """What each host gets, all at the same time; errors as they are."""
        asked = [self.threads.submit(ask, host) for host in self.hosts]
        return [each.exception(PATIENCE_S) or each.result() for each in asked]


def secret_file(folder: Path, text: str) -> str:
    path = folder / f"secret-{text}"
    path.write_text(text * 32)
    path.chmod(0o600)
    return str(path)


@contextlib.contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as one,
        listening.accept()[0] as other,
    ):
        yield one, other
