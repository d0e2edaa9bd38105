"""Prefixes that a file keeps between starts: all of them, the newest where room is short, none of a broken file."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from jaxsgl.cache import kv_file
from jaxsgl.cache.host_pages import HostPages, extend_names
from jaxsgl.cache.pages import as_pages
from tests.grids import count

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


def test_the_old_file_stays_until_the_new_one_is_whole_and_no_part_of_that_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, path = empty(12), tmp_path / "x.kv"
    host_with(A, host)
    kv_file.save(host, path, PAGE_SIZE)
    host_with(B, host)
    monkeypatch.setattr(host, "read", lambda pages: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kv_file.save(host, path, PAGE_SIZE)
    assert kv_file.load(empty(12), path, PAGE_SIZE) == 5
    assert list(tmp_path.iterdir()) == [path]


def test_only_this_user_may_read_prompts(tmp_path: Path) -> None:
    path = tmp_path / "x.kv"
    path.touch(0o644)
    kv_file.save(empty(12), path, PAGE_SIZE)
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_a_killed_server_was_writing_is_cleared_and_what_another_writes_is_not(tmp_path: Path) -> None:
    left, path = tmp_path / "x.4194305.new", tmp_path / "y.kv"
    left.write_bytes(kv_file.MAGIC)
    with kv_file._unfinished(path) as file:
        kv_file.clear_unfinished(tmp_path)
        file.write(b"whole")
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == {"y.kv": b"whole"}


def test_a_page_that_changed_on_the_disk_is_left_out_with_those_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host, path = empty(12), tmp_path / "x.kv"
    names = host_with(A, host)
    kv_file.save(host, path, PAGE_SIZE)
    data = bytearray(path.read_bytes())
    data[len(kv_file.MAGIC) + 2 * host.arena[:1].nbytes + 3] ^= 1  # of the third page
    path.write_bytes(data)
    found = empty(12)
    assert kv_file.load(found, path, PAGE_SIZE) == len(found.run_of(names, 0)) == 2
    assert "3 of 5 pages" in caplog.text
    assert not found.wrong([], [])


def signed(data: bytes) -> bytes:
    """`data` with the right digest of whatever its index is now: as a file that somebody made on purpose."""
    length = kv_file._TAIL.unpack(data[-kv_file._TAIL.size :])[0]
    index = data[-kv_file._TAIL.size - length : -kv_file._TAIL.size]
    return data[: -kv_file._TAIL.size] + kv_file._TAIL.pack(length, kv_file._digest(index))


@pytest.mark.timeout(60)
def test_a_page_that_follows_itself_ends_no_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    host, path = empty(12), tmp_path / "x.kv"
    host_with(A, host)
    kv_file.save(host, path, PAGE_SIZE)
    data = path.read_bytes()
    parents = np.array([-1, 0, 1, 2, 3], "<i4").tobytes()
    for others in ([0, 0, 1, 2, 3], [-1, 2, 1, 2, 3], [-1, 0, 1, 2, 9], [-2, 0, 1, 2, 3]):
        assert parents in data
        path.write_bytes(signed(data.replace(parents, np.array(others, "<i4").tobytes())))
        assert kv_file.load(empty(12), path, PAGE_SIZE) == 0
    assert caplog.text.count("don't come after") == 4


def test_no_change_of_a_file_ends_a_start_or_brings_a_wrong_page(tmp_path: Path) -> None:
    host, path, rng = empty(12), tmp_path / "x.kv", random.Random(31)
    host_with(A, host)
    host_with(B, host, private=True)
    kv_file.save(host, path, PAGE_SIZE)
    data, num_taken = path.read_bytes(), 0
    right = {page.name: host.read([page])[0] for page in host.all()}
    for _ in range(count(400, 8_000)):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            place = rng.choice((rng.randrange(len(changed)), len(changed) - 1 - rng.randrange(300)))
            match rng.randrange(4):
                case 0:
                    changed[place] ^= 1 << rng.randrange(8)
                case 1:
                    del changed[place : place + rng.randint(1, 40)]
                case 2:
                    changed[place:place] = rng.randbytes(rng.randint(1, 40))
                case 3:
                    changed[place : place + 4] = rng.choice((b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff"))
            if len(changed) < 400:
                break
        path.write_bytes(signed(bytes(changed)) if rng.random() < 0.5 and len(changed) > 400 else changed)
        found = empty(12)
        num_taken += kv_file.load(found, path, PAGE_SIZE)
        assert not found.wrong([], [])
        for page in found.all():
            if page.name in right:
                assert (found.read([page])[0] == right[page.name]).all()
    assert num_taken, "some pages of some files stay"
