"""What stages pass on reaches the next host as it was, in order; a host that is gone or a stranger is named."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxsgl.config.hosts import HostsConfig
from jaxsgl.errors import StartupError
from jaxsgl.hosts import passing
from jaxsgl.hosts.group import Alone, Neighbours
from jaxsgl.hosts.line import LineLost, greet
from jaxsgl.hosts.passing import Passage, meet_neighbours
from tests.hosts.world import PATIENCE_S, World, connection, secret_file


@contextlib.contextmanager
def passage() -> Iterator[tuple[Passage, Passage]]:
    with connection() as (one, other):
        yield Passage(one, "host 2 (b)"), Passage(other, "host 1 (a)")


def meet(world: World, host: Any) -> Neighbours:
    config = HostsConfig(world.size, host.rank, f"127.0.0.1:{world.port}", world.secrets[host.rank], PATIENCE_S)
    return meet_neighbours(config, host)


def close(found: list[Neighbours]) -> None:
    for neighbours in found:
        for before in neighbours.before:
            before.close()
        for after in neighbours.after:
            after.close()


def test_arrays_come_as_they_were_sent_in_order() -> None:
    sent = [
        np.arange(12, dtype=np.float32).reshape(3, 4),
        np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(2, 3),
        np.arange(40, dtype=np.float32).reshape(5, 8)[:, ::2],
    ]
    with passage() as (giving, taking):
        for array in sent:
            giving.send(array)
        found = [taking.receive(array.shape, array.dtype) for array in sent]
    for mine, theirs in zip(sent, found, strict=True):
        assert theirs.dtype == mine.dtype
        np.testing.assert_array_equal(theirs, mine)


def test_a_side_that_is_gone_or_passes_on_another_array_is_named() -> None:
    with passage() as (giving, taking):
        giving.send(np.zeros(3, np.float32))
        with pytest.raises(LineLost, match=r"host 1 \(a\) passes on 12 bytes as array 0, but array 0 has 16: run the"):
            taking.receive((4,), np.float32)
    with passage() as (giving, taking):
        giving.close()
        with pytest.raises(LineLost, match=r"host 1 \(a\) is gone \("):
            taking.receive((4,), np.float32)
        taking.close()
        with pytest.raises(LineLost, match=r"host 2 \(b\) is gone \("):
            giving.send(np.zeros(3, np.float32))


def test_each_host_passes_on_to_the_next_one_and_the_last_one_to_host_0(
    tmp_path: Path, new_world: Callable[..., World]
) -> None:
    world = new_world(3, (secret_file(tmp_path, "s"),) * 3)
    world.start()
    found = world.everywhere(lambda host: meet(world, host))
    assert [(len(each.before), len(each.after)) for each in found] == [(1, 0), (0, 1), (1, 1)]
    for rank in (1, 2):
        found[rank].after[0].send(np.full(2, rank, np.int32))
    for rank, after in ((1, 2), (2, 0)):
        np.testing.assert_array_equal(found[after].before[0].receive((2,), np.int32), [rank, rank])
    close(found)
    assert meet_neighbours(HostsConfig(), Alone()) == Neighbours()


def test_a_stranger_at_the_port_is_refused_and_the_host_gets_in(tmp_path: Path) -> None:
    config = HostsConfig(2, 0, "127.0.0.1:20000", secret_file(tmp_path, "s"), PATIENCE_S)
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as threads:
        taken = threads.submit(passing._taken_in, listening, config, 1)
        with connected(listening) as stranger, pytest.raises(LineLost, match="another --dist-secret-file"):
            greet(stranger, b"x" * 32, connects=True)
        with connected(listening) as stranger:
            greet(stranger, b"s" * 32, connects=True)
            stranger.sendall(passing._WHO.pack(passing._MAGIC, 0))
            assert stranger.recv(1) == b""  # it is another host
        with connected(listening) as host:
            greet(host, b"s" * 32, connects=True)
            host.sendall(passing._WHO.pack(passing._MAGIC, 1))
            before = taken.result(PATIENCE_S)
            Passage(host, "host 0").send(np.ones(1, np.int32))
            np.testing.assert_array_equal(before.receive((1,), np.int32), [1])
            before.close()


def connected(listening: socket.socket) -> socket.socket:
    return socket.create_connection(listening.getsockname())


def test_a_port_that_is_taken_is_named(new_world: Callable[..., World]) -> None:
    world = new_world(2)
    world.start()
    expected = f"host 0 can't wait for other hosts at 127.0.0.1:{world.port + 1}: "
    with socket.create_server(("127.0.0.1", world.port + 1)), pytest.raises(StartupError, match=expected):
        meet(world, world.hosts[0])
