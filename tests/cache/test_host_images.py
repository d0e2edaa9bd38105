"""Rows of images in host memory: within their limit, the ones used last, and all that requests hold."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxsgl.cache.embeddings import HostImages, HostRows


def rows(num_bytes: int) -> HostRows:
    return np.zeros((1, num_bytes), np.uint8)


def test_the_image_unused_for_longest_leaves_first() -> None:
    host = HostImages(10)
    for name in (b"a", b"b"):
        host.put(name, rows(4))
    host.used(b"a")
    host.put(b"c", rows(5))
    assert [name for name in (b"a", b"b", b"c") if host.find(name) is not None] == [b"a", b"c"]
    host.put(b"d", rows(11))
    assert host.find(b"d") is None and host.find(b"a") is not None, "what can't fit drives nothing out"
    host.check()


def test_what_a_request_holds_stays_and_may_come_later() -> None:
    host = HostImages(10)
    host.put(b"a", rows(4))
    assert host.hold("r", {b"a": 4, b"b": 5})
    assert not host.hold("s", {b"c": 2}), "its row finds no room beside those of the first"
    host.put(b"c", rows(2))
    assert host.find(b"c") is None
    host.put(b"b", rows(5))
    host.drop("r")
    assert host.hold("s", {b"c": 2}) and host.find(b"a") is None and host.find(b"b") is not None
    host.drop("s")
    assert host.num_bytes == 5, "rows that did not come leave with the request"
    host.drop("unknown")
    host.check()


def test_new_weights_drop_all_rows_also_those_that_are_held() -> None:
    host = HostImages(10)
    host.put(b"a", rows(4))
    host.put(b"b", rows(4))
    assert host.hold("r", {b"a": 4})
    host.flush()
    assert host.find(b"a") is not None and host.find(b"b") is None
    host.retire()
    assert host.find(b"a") is None and host.num_bytes == 4
    host.put(b"a", rows(4))
    assert host.find(b"a") is not None
    host.drop("r")
    host.check()


@pytest.mark.parametrize("seed", range(3))
def test_bytes_and_holders_are_counted_in_random_histories(seed: int) -> None:
    rng = random.Random(seed)
    held: list[str] = []
    host, sizes = HostImages(30), {name.encode(): rng.randint(1, 9) for name in "abcdefghij"}
    for number in range(400):
        some = {name: sizes[name] for name in rng.sample(list(sizes), rng.randint(1, 3))}
        action = rng.random()
        if action < 0.4:
            name = rng.choice(list(sizes))
            host.put(name, rows(sizes[name]))
        elif action < 0.65:
            held += [str(number)] if host.hold(str(number), some) else []
        elif action < 0.95 and held:
            assert host.drop(held.pop(rng.randrange(len(held))))
        elif action < 0.98:
            host.flush()
        else:
            host.retire()
        host.check()
