"""Files of sound to chunks of frames: WAV is read here, MP3, FLAC, OGG and others by PyAV (the extra `video`).

What a file may cost is bounded: samples are decoded as they are used, and no more than the model may hear; of MP4 what
the file declares is checked before (`boxes.py`); `decoding.py` bounds time and memory. Nothing but the file's own bytes
is read. Never knows prompts; `loading.py` calls it.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np

from jaxsgl.errors import InvalidRequest
from jaxsgl.preprocess.boxes import check_boxes
from jaxsgl.preprocess.mel import HOP, RATE, LogMel, Samples
from jaxsgl.preprocess.movies import MAX_PROBED_BYTES, av_library, av_options
from jaxsgl.preprocess.placeholders import Part
from jaxsgl.preprocess.resampling import Resampler
from jaxsgl.preprocess.waves import Wave, is_wave
from jaxsgl.requests.media import FRAMES_OF_PATCH, SoundShape, digest_of, too_many_patches

KIND_NAMES = "WAV, MP3, FLAC, OGG, AAC, M4A or WebM"
CODECS = ("aac", "alac", "flac", "mp3", "opus", "vorbis")
RATES = (4000, 192_000)  # samples a second that a file may have
MAX_CHANNELS = 8
WORKING_BYTES = 24 << 20  # of a sound, besides its frames
LOUDEST = 65536.0  # a sample, either way: 1 is full scale, but some programs write floats as large as integers
_AT_ONCE = 1 << 14  # samples: frames of coded files are short, and each step has a price of its own
_DECODERS = {"mp3float": "mp3", "libopus": "opus", "libvorbis": "vorbis"}  # PyAV's names for codecs
_MOST = {"u8": 128.0, "s16": 32768.0, "s32": 2147483648.0, "flt": 1.0, "dbl": 1.0}  # of a sample, by PyAV's name


def parts_of(content: bytes, shape: SoundShape, max_patches: int, name: str) -> tuple[Part, ...]:
    """Returns the chunks of the sound in a file, which may have `max_patches`. Raises `InvalidRequest`."""
    most = max_patches // shape.num_patches if shape.hears_all else 1
    of_chunk = FRAMES_OF_PATCH * shape.num_patches * HOP
    mel = LogMel(shape.bins, FRAMES_OF_PATCH * shape.num_patches)
    for samples in _samples(content, name):
        if mel.num_samples + len(samples) > most * of_chunk:
            raise _too_long(shape, max_patches, most, name)
        mel.add(samples)
    left = -(-mel.num_samples // (FRAMES_OF_PATCH * HOP))  # patches that the sound fills
    if left == 0 or shape.num_tokens(left) == 0:
        raise InvalidRequest(
            f"{name} has {mel.num_samples / RATE:.3f} s of sound, but needs "
            f"{shape.merge * FRAMES_OF_PATCH * HOP / RATE:g} s: send a longer one"
        )
    chunks, parts = mel.finish(), list[Part]()
    for number in range(len(chunks)):
        frames, filled = chunks[number].astype("<f4").tobytes(), min(left, shape.num_patches)
        chunks[number] = np.zeros((0, shape.bins), np.float32)  # its memory
        digest = digest_of(frames, shape.grid, f"sound {shape.bins} {shape.merge} {filled}")
        parts.append(Part(digest, shape.grid, frames, filled=filled))
        left -= filled
    return tuple(parts)


def _too_long(shape: SoundShape, max_patches: int, most: int, name: str) -> InvalidRequest:
    seconds = shape.num_patches * FRAMES_OF_PATCH * HOP / RATE
    if shape.hears_all:
        return too_many_patches((most + 1) * shape.num_patches, max_patches, shape.merge)
    return InvalidRequest(f"{name} is longer than {seconds:g} s, which is all that the model hears: send parts of it")


def _samples(content: bytes, name: str) -> Iterator[Samples]:
    """Yields samples at Whisper's rate, the mean of all channels."""
    if is_wave(content):
        wave = Wave(content, name)
        rate, blocks = wave.rate, wave.blocks()
    else:
        source = _Decoded(content, name)
        rate, blocks = source.rate, source.blocks()
    least, highest = RATES
    if not least <= rate <= highest or not Resampler.is_possible(rate, RATE):
        raise InvalidRequest(
            f"{name} has {rate} samples a second, but must have {least} to {highest}, in a ratio of small numbers to "
            f"{RATE}, as 8000, 44100 and 48000: convert it"
        )
    resampler = Resampler(rate, RATE)
    for mono in _gathered(blocks, name):
        yield resampler.add(mono)
    yield resampler.finish()


def _gathered(blocks: Iterable[Samples], name: str) -> Iterator[Samples]:
    """Yields means of all channels, many at once, which are numbers that nothing after them makes infinite."""
    held: list[Samples] = []
    for block in chain(blocks, (None,)):
        if block is not None:
            if block.shape[1] > MAX_CHANNELS:
                raise InvalidRequest(f"{name} has {block.shape[1]} channels, but may have {MAX_CHANNELS}: convert it")
            if not (np.abs(block) <= LOUDEST).all():
                raise InvalidRequest(f"{name} has samples that are no finite numbers or beyond {LOUDEST:g}: convert it")
            held.append(block.mean(axis=1, dtype=np.float32))
        if sum(map(len, held)) >= (_AT_ONCE if block is not None else 1):
            yield np.concatenate(held)
            held.clear()


class _Decoded:
    """A file that FFmpeg decodes.

    Attributes:
      rate: samples a second.
    """

    def __init__(self, content: bytes, name: str) -> None:
        """Raises `InvalidRequest`."""
        self._content, self._name, self._kind = content, name, _demuxer(content)
        if self._kind is None:
            raise InvalidRequest(f"{name} is no sound that can be read: send {KIND_NAMES}; {len(content)} bytes came")
        self._library = av_library(name, "sound other than WAV", "send it as WAV")
        if self._kind == "mp4":
            check_boxes(content, name)
        with self._opened() as (stream, _):
            codec = stream.codec_context.name
            if _DECODERS.get(codec, codec) not in CODECS:
                raise InvalidRequest(f"{name} is coded as {codec}, but must be one of {', '.join(CODECS)}: convert it")
            self.rate = int(stream.codec_context.sample_rate or 0)

    def blocks(self) -> Iterator[Samples]:
        """Yields samples `[n, channels]`, one block after the other."""
        with self._opened() as (stream, container):
            stream.thread_type = "NONE"
            for frame in container.decode(stream):
                if frame.sample_rate != self.rate:
                    raise InvalidRequest(f"{self._name} changes its rate of samples: convert it")
                yield self._block(frame)

    def _block(self, frame: Any) -> Samples:
        numbers, kind = frame.to_ndarray(), frame.format.name.removesuffix("p")
        if kind not in _MOST:
            raise InvalidRequest(f"{self._name} has samples of the kind {kind}, which is not taken: convert it")
        by_sample = numbers.T if frame.format.is_planar else numbers.reshape(-1, len(frame.layout.channels))
        zero = _MOST[kind] if kind == "u8" else 0.0
        scaled: Samples = ((by_sample - zero) / _MOST[kind]).astype(np.float32)
        return scaled

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        """The first stream of sound and its container, with the decoder's errors as `InvalidRequest`."""
        av = self._library
        try:
            with av.open(
                io.BytesIO(self._content), format=self._kind, options=av_options(),
                container_options={"probesize": str(MAX_PROBED_BYTES), "analyzeduration": "0"},
            ) as container:  # fmt: skip
                if not container.streams.audio:
                    raise InvalidRequest(f"{self._name} has no sound: send a file of sound")
                yield container.streams.audio[0], container
        except InvalidRequest:
            raise
        except (av.FFmpegError, ValueError, MemoryError, UnicodeError) as error:
            reason = str(error)[:200] or type(error).__name__
            raise InvalidRequest(f"{self._name} can't be decoded ({reason}): is the file complete?") from None


def _demuxer(content: bytes) -> str | None:
    """FFmpeg's name for the kind of file; others are never tried."""
    if content[4:8] == b"ftyp":
        return "mp4"
    if content[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if content[:4] in (b"fLaC", b"OggS"):
        return "flac" if content[:4] == b"fLaC" else "ogg"
    if content[:3] == b"ID3":
        return "mp3"
    if content[:1] == b"\xff" and len(content) > 1 and content[1] & 0xE0 == 0xE0:
        return "aac" if content[1] & 0xF6 == 0xF0 else "mp3"
    return None
