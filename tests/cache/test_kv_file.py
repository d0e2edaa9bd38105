"""Prefixes that a file keeps between starts: all of them, the newest where room is short, none of a broken file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxsgl.cache import kv_file
from jaxsgl.cache.host_pages import HostPages, extend_names
from jaxsgl.cache.pages import as_pages

PAGE_SIZE = 4


def empty(num_pages: int) -> HostPages:
    return HostPages(np.zeros((num_pages, 2, PAGE_SIZE), np.uint16))


def names_of(prompt: list[int]) -> list[bytes]:
    names: list[bytes] = []
    extend_names(names, as_pages(np.array(prompt, np.int32), PAGE_SIZE), b"")
    return names


def host_with(prompt: list[int], host: HostPages, private: bool = False) -> list[bytes]:
    """Writes the pages of `prompt`; each holds its first token everywhere."""
    names = names_of(prompt)
    host.touch(names)
    for i, name in enumerate(names):
        if host.get(name) is None:
            tokens = None if private else np.array(prompt[i * PAGE_SIZE : (i + 1) * PAGE_SIZE], np.int32)
            page = host.reserve(name, names[i - 1] if i else None, tokens)
            assert page is not None
            host.written([page], np.full((1, 2, PAGE_SIZE), prompt[i * PAGE_SIZE], np.uint16))
    host.touch(names)
    return names


A, B = list(range(20)), [0, 1, 2, 3, *range(50, 66)]


def test_pages_tokens_and_order_of_use_come_back(tmp_path: Path) -> None:
    host, path = empty(12), tmp_path / "x.kv"
    a, b = host_with(A, host), host_with(B, host, private=True)
    assert kv_file.save(host, path, PAGE_SIZE) == 9
    found = empty(12)
    assert kv_file.load(found, path, PAGE_SIZE) == 9
    for names, prompt in ((a, A), (b, B)):
        pages = found.run_of(names, 0)
        assert len(pages) == 5
        assert found.read(pages)[:, 0, 0].tolist() == prompt[::PAGE_SIZE]
    assert found.run_of(a, 0)[2].tokens is not None and found.run_of(b, 0)[2].tokens is None
    assert not found.wrong([], [])
    host_with(list(range(100, 120)), found)
    assert len(found.run_of(b, 0)) > len(found.run_of(a, 0)), "what was used first goes first, as before"


def test_the_newest_pages_are_taken_where_room_is_short_and_never_without_those_before(tmp_path: Path) -> None:
    host, path = empty(12), tmp_path / "x.kv"
    a, b = host_with(A, host), host_with(B, host)
    kv_file.save(host, path, PAGE_SIZE)
    found = empty(6)
    assert kv_file.load(found, path, PAGE_SIZE) == 6
    assert len(found.run_of(b, 0)) == 5 and len(found.run_of(a, 0)) == 2
    assert not found.wrong([], [])


@pytest.mark.parametrize("change", ["cut", "foreign", "missing", "other_layout"])
def test_a_file_that_is_not_whole_is_left_alone(tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture) -> None:
    host, path = empty(12), tmp_path / "x.kv"
    host_with(A, host)
    kv_file.save(host, path, PAGE_SIZE)
    data, found = path.read_bytes(), empty(12)
    if change == "cut":
        path.write_bytes(data[:-1])
    elif change == "foreign":
        path.write_bytes(b"x" * 400)
    elif change == "missing":
        path.unlink()
    else:
        found = HostPages(np.zeros((12, 2, PAGE_SIZE), np.float32))
    assert kv_file.load(found, path, PAGE_SIZE) == found.num_used == 0
    assert ("are not taken" in caplog.text) == (change != "missing")


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, path = empty(12), tmp_path / "x.kv"
    host_with(A, host)
    kv_file.save(host, path, PAGE_SIZE)
    host_with(B, host)
    monkeypatch.setattr(host, "read", lambda pages: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kv_file.save(host, path, PAGE_SIZE)
    assert kv_file.load(empty(12), path, PAGE_SIZE) == 5
