"""Small files that would take decoders minutes and gigabytes."""

from __future__ import annotations

import struct

_EOB_RUN = 32767  # blocks without a change that one code can stand for
_AC_TABLE = b"\xff\xc4" + struct.pack(">HB", 20, 0x10) + b"\x01" + bytes(15) + b"\xe0"  # one code: "0", 14 bits follow

_QUANTIZERS = b"\xff\xdb" + struct.pack(">HB", 67, 0) + b"\x01" * 64


def many_scans(num_scans: int, side: int) -> bytes:
    """A grey progressive JPEG whose scans all say that nothing changes."""
    frame = b"\xff\xc2" + struct.pack(">HBHHB", 11, 8, side, side, 1) + b"\x01\x11\x00"
    num_runs = -(-(((side + 7) // 8) ** 2) // _EOB_RUN)
    bits = ("0" + "1" * 14) * num_runs
    bits += "1" * (-len(bits) % 8)
    samples = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\x00")
    scan = b"\xff\xda" + struct.pack(">HB", 8, 1) + b"\x01\x00" + b"\x01\x3f\x00" + samples
    return b"\xff\xd8" + _QUANTIZERS + frame + _AC_TABLE + scan * num_scans + b"\xff\xd9"


def box(kind: bytes, *parts: bytes) -> bytes:
    """A box of an MP4 file."""
    body = b"".join(parts)
    return struct.pack(">I", 8 + len(body)) + kind + body


def table(kind: bytes, *parts: bytes, flags: int = 0) -> bytes:
    """A box whose body begins with version 0 and flags."""
    return box(kind, numbers(flags), *parts)


def numbers(*given: int) -> bytes:
    return struct.pack(f">{len(given)}I", *given)


def track(num_samples: int, *others: bytes, number: int = 1, edits: bytes = b"", sizes: bytes = b"") -> bytes:
    """A track of video whose samples all have one byte, so that no list of them is needed."""
    picture = bytes(16) + struct.pack(">HH", 64, 48) + numbers(0x480000, 0x480000, 0)
    entry = box(b"mp4v", bytes(6) + b"\0\1", picture + b"\0\1" + bytes(32) + b"\0\x18\xff\xff")
    samples = box(
        b"stbl",
        table(b"stsd", numbers(1), entry),
        table(b"stts", numbers(1, num_samples, 1)),
        sizes or table(b"stsz", numbers(1, num_samples)),
        table(b"stsc", numbers(1, 1, num_samples, 1)),
        table(b"stco", numbers(1, 1024)),
        *others,
    )
    links = box(b"dinf", table(b"dref", numbers(1), table(b"url ", flags=1)))
    media = box(
        b"mdia",
        table(b"mdhd", numbers(0, 0, 1000, num_samples), b"\x55\xc4\0\0"),
        table(b"hdlr", numbers(0), b"vide", bytes(13)),
        box(b"minf", table(b"vmhd", bytes(8), flags=1), links, samples),
    )
    head = table(b"tkhd", numbers(0, 0, number, 0, num_samples), bytes(52), numbers(64 << 16, 48 << 16), flags=7)
    return box(b"trak", head, edits, media)


def mp4(*tracks: bytes, after: bytes = b"") -> bytes:
    """An MP4 file of these tracks."""
    head = table(b"mvhd", numbers(0, 0, 1000, 1000, 0x10000), bytes(82), numbers(2))
    kind = box(b"ftyp", b"isom", numbers(0), b"isom")
    return kind + box(b"moov", head, *tracks) + after + box(b"mdat", bytes(64))


def same_edits(count: int, num_samples: int) -> bytes:
    """A list of edits each of which shows the whole track."""
    return box(b"edts", table(b"elst", numbers(count), numbers(num_samples, 0, 0x10000) * count))


def fragment(num_samples: int) -> bytes:
    """A fragment of the first track whose samples have the size that the head of the file gives them."""
    runs = box(b"traf", table(b"tfhd", numbers(1)), table(b"trun", numbers(num_samples)))
    return box(b"moof", table(b"mfhd", numbers(1)), runs)


def fragmented(num_samples: int) -> bytes:
    """An MP4 file with one fragment."""
    defaults = box(b"mvex", table(b"trex", numbers(1, 1, 1, 1, 0)))
    return mp4(track(10), defaults, after=fragment(num_samples))


def large_movies() -> dict[str, bytes]:
    """Files of some kilobytes for which FFmpeg takes gigabytes."""
    return {
        "samples": mp4(track(89_000_000)),
        "tracks": mp4(*(track(20_000_000, number=number) for number in range(1, 5))),
        "small samples": mp4(track(10, sizes=table(b"stz2", numbers(8, 50_000_000)))),
        "edits": mp4(track(100_000, edits=same_edits(1000, 100_000))),
        "fragment": fragmented(50_000_000),
        "keys": mp4(track(10), table(b"keys", numbers(1 << 28))),
    }
