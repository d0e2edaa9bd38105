"""What the boxes of an MP4 or MOV file declare, checked before FFmpeg opens it.

FFmpeg makes an entry in memory for each sample that a file declares, before anybody can stop it. A file whose samples
have one common size lists none of them, so that 656 bytes may declare gigabytes. Here the numbers are read first.

No tree of boxes is built: FFmpeg takes each kind of box wherever it stands, also where the standard has none. So the
names are searched in everything but the samples, which are the boxes `mdat` at the top. A name may come up by chance,
in a cover of 1 MiB once in some 300 files; such a file is refused if a large number follows. movies.py calls it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from jaxsgl.errors import InvalidRequest

MAX_SAMPLES = 100_000  # of a track: half an hour at 60 frames a second
MAX_SOUND_SAMPLES = 4 * MAX_SAMPLES  # of a track of sound, which is ignored: two hours of AAC
MAX_TRACKS = 8
MAX_FRAGMENTS = 10_000  # and entries of the indices that lead to them
MAX_INDEX_ENTRIES = 10 * MAX_SAMPLES  # that FFmpeg makes for a track: its samples, once for each part of an edit list
MAX_BOXES = 100_000
MAX_BYTES = 16 << 20  # that are no samples
_FEWEST_A_CHUNK = 160  # samples of sound that FFmpeg joins to one entry, at least
_COUNTS_AT = {  # where a box's number of entries stands in its body
    **dict.fromkeys((b"stts", b"ctts", b"stsc", b"stco", b"co64", b"stss", b"stps", b"elst", b"keys", b"trun"), 4),
    **dict.fromkeys((b"stsz", b"stz2", b"sbgp"), 8),
}
_NAMES = re.compile(b"trak|hdlr|cmov|moof|sidx|tfra|" + b"|".join(_COUNTS_AT))


def check_boxes(content: bytes, name: str) -> None:
    """Raises `InvalidRequest` for a file that declares more than a video may have; `name` says in errors which one."""
    tracks = [_Track(name)]  # the first has what stands before all tracks
    num_samples = num_fragments = num_boxes = 0
    for start, end in _without_samples(content, name):
        next_at = start
        while found := _NAMES.search(content, next_at, end):
            next_at = found.start() + 1  # the last letters of a length may look like the first ones of a name
            num_boxes += 1
            _bound(num_boxes, MAX_BOXES, "boxes", name)
            kind, at = found[0], found.end()
            if _number(content, found.start() - 4) == 1:  # a length of 64 bits follows
                at += 8
            if kind == b"cmov":
                raise InvalidRequest(f"{name} has compressed boxes (cmov), which are not taken: convert it")
            if kind == b"trak":
                tracks.append(_Track(name))
            elif kind == b"hdlr":
                tracks[-1].handlers.add(content[at + 8 : at + 12])
            elif kind == b"trun":
                num_samples += _number(content, at + _COUNTS_AT[kind])
            elif kind in _OF_FRAGMENTS:
                num_fragments += _OF_FRAGMENTS[kind](content, at)
            else:
                tracks[-1].add(kind, content, at)
    _bound(len(tracks) - 1, MAX_TRACKS, "tracks", name)
    _bound(num_fragments, MAX_FRAGMENTS, "fragments", name)
    _bound(num_samples, max(MAX_SAMPLES, sum(track.most for track in tracks[1:])), "samples in fragments", name)
    num_bytes = sum(track.check() for track in tracks)
    if num_bytes > len(content):
        raise InvalidRequest(f"{name} declares {num_bytes} bytes of sound, but has {len(content)}: is it complete?")


class _Track:
    """What the boxes from one `trak` to the next declare."""

    def __init__(self, name: str) -> None:
        self.handlers: set[bytes] = set()  # what the track says that it is
        self._name = name
        self._samples = self._chunks = self._edits = 0
        self._longest = (0, b"")  # entries of the longest table, and its kind
        self._sizes: list[int] = []  # of each table of sizes: that of all samples in bytes, or 0
        self._times: list[tuple[int, int]] = []  # of each table: entries, and ticks that a sample of the first lasts
        self._chunk_sizes: list[npt.NDArray[np.int64]] = []  # rows: the first chunk, samples in it and those after it

    @property
    def most(self) -> int:
        """Samples that it may have."""
        return MAX_SOUND_SAMPLES if self._is_sound else MAX_SAMPLES

    def add(self, kind: bytes, content: bytes, at: int) -> None:
        """Notes a table whose body stands at `at`."""
        count = _number(content, at + _COUNTS_AT[kind])
        if kind in (b"stsz", b"stz2"):
            self._samples += count
            self._sizes.append(_number(content, at + 4) if kind == b"stsz" else 0)
            return
        self._longest = max(self._longest, (count, kind))
        if kind in (b"stco", b"co64"):
            self._chunks += count
        elif kind == b"elst":
            self._edits += count
        elif kind == b"stts":
            self._times.append((count, _number(content, at + 12)))
        elif kind == b"stsc":
            held = min(count, max(0, len(content) - at - 8) // 12)
            rows = np.frombuffer(content, ">u4", 3 * held, min(at + 8, len(content))).reshape(-1, 3)
            self._chunk_sizes.append(rows[:, :2].astype(np.int64))

    def check(self) -> int:
        """Returns bytes of samples that FFmpeg joins, of which a file may have as many as fit into it.

        Raises `InvalidRequest` if a table, or FFmpeg's index of the track, would have too many entries.
        """
        count, kind = self._longest
        _bound(count, self.most, f"entries in a box {kind.decode()}", self._name)
        entries, num_bytes = self._joined(), 0
        if self._is_joined():
            num_bytes = self._samples * self._sizes[0]
        else:
            _bound(self._samples, self.most, "samples in a track", self._name)
            entries = max(entries, self._samples)
        _bound(entries * max(1, self._edits), MAX_INDEX_ENTRIES, "samples with its edits", self._name)
        return num_bytes

    @property
    def _is_sound(self) -> bool:
        return b"soun" in self.handlers and b"vide" not in self.handlers

    def _is_joined(self) -> bool:
        """Whether samples are joined: those of sound without compression, of which a second has some ten thousand."""
        return self._is_sound and len(self._sizes) == 1 and self._sizes[0] > 0 and self._times == [(1, 1)]

    def _joined(self) -> int:
        """Entries for joined samples, at most."""
        if not self._chunk_sizes:
            return self._chunks
        rows = np.concatenate(self._chunk_sizes)
        entries = 1 + rows[:, 1] // _FEWEST_A_CHUNK
        ends = np.append(rows[1:, 0], self._chunks + 1)
        if (np.diff(rows[:, 0]) <= 0).any():  # FFmpeg changes such tables
            return self._chunks * int(entries.max(initial=1))
        return int((np.clip(ends - rows[:, 0], 0, self._chunks) * entries).sum())


def _without_samples(content: bytes, name: str) -> Iterator[tuple[int, int]]:
    """Yields the first byte and the end of what stands before, between and after the boxes of samples."""
    at = start = num_boxes = num_bytes = 0
    while at < len(content):
        num_boxes += 1
        _bound(num_boxes, MAX_BOXES, "boxes", name)
        length = _number(content, at)
        if length == 1:
            length = _number(content, at + 8) << 32 | _number(content, at + 12)
        end = len(content) if length < 8 else min(at + length, len(content))  # 0: to the end; others are no lengths
        is_samples = content[at + 4 : at + 8] == b"mdat" and (length == 0 or length >= 8)
        stop = at if is_samples else end
        if is_samples or end == len(content):
            num_bytes += stop - start
            _bound(num_bytes, MAX_BYTES, "bytes that are no samples", name)
            yield start, stop
            start = end
        at = end


def _sidx_count(content: bytes, at: int) -> int:
    """Entries of an index of fragments; times have 64 bits in its later versions."""
    wide = at < len(content) and content[at] > 0
    return _number(content, at + (30 if wide else 22), 2)


_OF_FRAGMENTS: dict[bytes, Callable[[bytes, int], int]] = {
    b"moof": lambda content, at: 1,
    b"sidx": _sidx_count,
    b"tfra": lambda content, at: _number(content, at + 12),
}


def _number(content: bytes, at: int, length: int = 4) -> int:
    """What FFmpeg reads there: 0 after the end."""
    return int.from_bytes(content[max(0, at) : at + length].ljust(length, b"\0"), "big")


def _bound(number: int, most: int, what: str, name: str) -> None:
    if number > most:
        raise InvalidRequest(
            f"{name} declares {number} {what}, but may have {most}: send a shorter video, or convert it to plain MP4"
        )
