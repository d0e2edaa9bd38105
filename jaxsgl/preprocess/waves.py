"""Files of sound as WAV, read here: samples of integers, floats or telephones, in chunks of the RIFF format.

Never knows other formats; `sounds.py` calls it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess.mel import Samples

_INTEGERS, _FLOATS, _A_LAW, _MU_LAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
_TYPES = {
    (_INTEGERS, 8): "u1",
    (_INTEGERS, 16): "<i2",
    (_INTEGERS, 32): "<i4",
    (_FLOATS, 32): "<f4",
    (_FLOATS, 64): "<f8",
    (_A_LAW, 8): "u1",
    (_MU_LAW, 8): "u1",
}
_UNTOLD = 0xFFFFFFFF
_AT_ONCE = 1 << 16  # samples of all channels
MOST_CHUNKS = 1000  # before the samples


# By G.711 a byte is a sign, a power of two of 3 bits, and the 4 bits behind the first one of the sample.
def _a_law() -> Samples:
    bits = np.arange(256) ^ 0x55
    power, size = bits >> 4 & 7, 16 * (bits & 15) + 8
    return _signed(np.where(power > 0, (size + 256) << np.maximum(power - 1, 0), size), bits >= 128)


def _mu_law() -> Samples:
    bits = np.arange(256) ^ 0xFF
    return _signed(((8 * (bits & 15) + 132) << (bits >> 4 & 7)) - 132, bits < 128)


def _signed(sizes: npt.NDArray[np.int64], is_above: npt.NDArray[np.bool_]) -> Samples:
    return (np.where(is_above, sizes, -sizes) / 32768).astype(np.float32)


_SAMPLES_OF_BYTES = {_A_LAW: _a_law(), _MU_LAW: _mu_law()}


def is_wave(content: bytes) -> bool:
    """Whether a file is a WAV file by its first bytes."""
    return content[:4] == b"RIFF" and content[8:12] == b"WAVE"


def wave_of(samples: Samples, rate: int) -> bytes:
    """Returns a WAV file of one channel: float32 samples `[n]`, `rate` of them a second."""
    data = samples.astype("<f4").tobytes()
    form = struct.pack("<IHHIIHH", 16, _FLOATS, 1, rate, 4 * rate, 4, 32)
    return b"RIFF" + struct.pack("<I", _UNTOLD) + b"WAVEfmt " + form + b"data" + struct.pack("<I", _UNTOLD) + data


class Wave:
    """A file, of which the header is read.

    Attributes:
      rate: samples a second.
      num_channels: of each sample.
    """

    def __init__(self, content: bytes, name: str) -> None:
        """Raises `InvalidRequest`; `name` says in errors which file it is."""
        self._content = content
        at, form, self._data = 12, None, None
        for _ in range(MOST_CHUNKS):
            kind, size = content[at : at + 4], int.from_bytes(content[at + 4 : at + 8], "little")
            at += 8
            if len(kind) < 4 or at > len(content):
                break
            if kind == b"fmt " and size >= 16:
                form = content[at : at + min(size, 40)]
            if kind == b"data":
                # Programs that write to a pipe know neither this size nor that of the file.
                is_whole = int.from_bytes(content[4:8], "little") == len(content) - 8
                is_told = size != _UNTOLD and (size > 0 or is_whole)
                self._data = at, min(at + size if is_told else len(content), len(content))
                break
            at += size + size % 2
        if form is None or len(form) < 16 or self._data is None:
            raise InvalidRequest(f"{name} is a WAV file without a format or samples: is the file complete?")
        tag, self.num_channels, self.rate, _, self._frame_bytes, self._bits = struct.unpack("<HHIIHH", form[:16])
        self._tag = int.from_bytes(form[24:26], "little") if tag == _EXTENSIBLE else tag
        is_known = (self._tag, self._bits) in _TYPES or (self._tag, self._bits) == (_INTEGERS, 24)
        if is_known and (self.num_channels < 1 or self._frame_bytes != self.num_channels * self._bits // 8):
            raise InvalidRequest(
                f"{name} is a WAV file of {self.num_channels} channels of {self._bits} bits with {self._frame_bytes} "
                "bytes for all, which disagree: is the file complete?"
            )
        if not is_known:
            raise InvalidRequest(
                f"{name} is a WAV file of format {self._tag} with {self._bits} bits, but must have integers of 8, 16, "
                "24 or 32 bits, floats of 32 or 64, or A-law or mu-law of 8: convert it"
            )

    def blocks(self) -> Iterator[Samples]:
        """Yields samples `[n, channels]`, -1 to 1, one block after the other."""
        assert self._data is not None
        start, stop = self._data
        step = max(_AT_ONCE // self.num_channels, 1) * self._frame_bytes
        for at in range(start, stop, step):
            raw = self._content[at : min(at + step, stop)]
            raw = raw[: len(raw) - len(raw) % self._frame_bytes]
            yield self._numbers(raw).reshape(-1, self.num_channels)

    def _numbers(self, raw: bytes) -> Samples:
        if self._bits == 24:
            in_threes = np.frombuffer(raw, np.uint8).reshape(-1, 3)
            wide = np.zeros((len(in_threes), 4), np.uint8)
            wide[:, 1:] = in_threes
            return (wide.reshape(-1).view("<i4") / np.float64(1 << 31)).astype(np.float32)
        numbers = np.frombuffer(raw, _TYPES[self._tag, self._bits])
        if self._tag in _SAMPLES_OF_BYTES:
            return _SAMPLES_OF_BYTES[self._tag][numbers]
        if self._tag == _FLOATS:
            with np.errstate(over="ignore", invalid="ignore"):  # callers refuse what is infinite
                return numbers.astype(np.float32)
        zero, most = (128, 128) if self._bits == 8 else (0, 1 << (self._bits - 1))
        return ((numbers - np.float64(zero)) / most).astype(np.float32)
