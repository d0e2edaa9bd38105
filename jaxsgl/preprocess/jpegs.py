"""The markers of a JPEG file, as libjpeg finds them: how many scans it has, and whether it must keep coefficients.

A progressive file may refine a picture in any number of scans. Each visits all blocks, though 53 bytes may be enough to
say that nothing changes: 118 KB take seconds. So scans are counted before anything is decoded. Only markers are read,
never samples. pictures.py calls it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from jaxsgl.errors import InvalidRequest

MAX_SCANS = 100  # encoders make 10 or so; libjpeg-turbo's own fuzzers stop at 500
MAX_SEGMENTS = 10_000  # headers, tables, profiles: Pillow takes microseconds and keeps an entry for each
_START_OF_SCAN, _END = 0xDA, 0xD9
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = {0xC2, 0xC6, 0xCA, 0xCE}
_MARKER = re.compile(rb"\xff([\xc0-\xcf\xd9-\xfe])")  # those that mark no place among samples
_WINDOW_BYTES = 1 << 20  # that are searched at a time: other threads get their turn in between


def check_scans(content: bytes, name: str) -> None:
    """Raises `InvalidRequest` for a JPEG file with more than `MAX_SCANS` scans; `name` says in errors which one."""
    num_scans = 0
    for number, (marker, _) in enumerate(_segments(content)):
        num_scans += marker == _START_OF_SCAN
        if num_scans > MAX_SCANS:
            raise InvalidRequest(
                f"{name} is a JPEG of more than {MAX_SCANS} scans, but may have {MAX_SCANS}: save it as baseline JPEG"
            )
        if number >= MAX_SEGMENTS:
            raise InvalidRequest(
                f"{name} is a JPEG of more than {MAX_SEGMENTS} segments, but may have {MAX_SEGMENTS}: save it again "
                "without metadata"
            )


def has_several_scans(content: bytes) -> bool:
    """Whether the first scan of a JPEG lacks components, or the file is progressive, by its markers."""
    num_components = 0
    for marker, at in _segments(content):
        if marker in _PROGRESSIVE:
            return True
        if marker in _FRAMES:
            num_components = _byte(content, at + 7)
        elif marker == _START_OF_SCAN:
            return _byte(content, at + 2) < num_components
    return True  # no scan was found: the safe answer


def _segments(content: bytes) -> Iterator[tuple[int, int]]:
    """Yields each marker that has a length, and where this length stands, up to the end of the picture.

    As libjpeg does, what is no marker is skipped: samples after the head of a scan, and junk anywhere. Pictures after
    the first one, as in MPO files, are not read.
    """
    at = 2
    while True:
        found = _next_marker(content, at)
        if found is None:
            return
        marker, at = found
        if marker == _END:
            return
        yield marker, at
        at += max(2, int.from_bytes(content[at : at + 2], "big"))


def _next_marker(content: bytes, at: int) -> tuple[int, int] | None:
    """Returns the next marker at `at` or later, and the place after it."""
    for start in range(at, len(content), _WINDOW_BYTES):
        # A marker may begin in one window and end in the next.
        found = _MARKER.search(content, max(at, start - 1), start + _WINDOW_BYTES)
        if found is not None:
            return found[1][0], found.end()
    return None


def _byte(content: bytes, at: int) -> int:
    return content[at] if at < len(content) else 0
