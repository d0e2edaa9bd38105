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
