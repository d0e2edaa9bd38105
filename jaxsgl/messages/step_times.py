"""How long the engine's steps took, by bucket: the content of `Load.step_times`.

scheduler/stopwatch.py counts and packs them, frontend/exposition.py unpacks and shows them.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

# Upper bounds of the times by which steps are counted, in seconds.
STEP_BOUNDS_S = (5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class BucketTimes(msgspec.Struct, array_like=True):
    """How long the steps of one bucket took.

    Attributes:
      kind: decode, extend or score.
      bucket: the padded shape, in short.
      counts: steps up to each of `STEP_BOUNDS_S`, and above the last.
      seconds: of all of them.
    """

    kind: str
    bucket: str
    counts: list[int]
    seconds: float


def pack(times: list[BucketTimes]) -> bytes:
    """Returns the times of all buckets as bytes."""
    return msgspec.msgpack.encode(times)


def unpack(packed: bytes) -> list[BucketTimes]:
    """Returns the times of all buckets; none for b""."""
    return msgspec.msgpack.decode(packed, type=list[BucketTimes]) if packed else []


def merged(each: Iterable[bytes]) -> bytes:
    """Returns the times of several engines together, packed like those of one."""
    total: dict[tuple[str, str], BucketTimes] = {}
    for packed in each:
        for times in unpack(packed):
            so_far = total.get((times.kind, times.bucket))
            if so_far is None:
                total[times.kind, times.bucket] = times
            else:
                so_far.counts = [a + b for a, b in zip(so_far.counts, times.counts, strict=True)]
                so_far.seconds += times.seconds
    return pack(list(total.values()))
