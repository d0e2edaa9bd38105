"""Samples of a sound to frames of a log-mel spectrogram, as Whisper hears it (arXiv 2212.04356), and their filters.

Frames are made as samples come, so that of a long sound no more stands in memory than its frames. Never knows files;
`sounds.py` feeds it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

RATE = 16_000  # samples a second
HOP = 160  # samples from frame to frame
WINDOW = 400  # samples that a frame looks at
TOP_HZ = RATE / 2
_HALF = WINDOW // 2
_FLOOR = 1e-10  # of a band's power
_DEPTH = 8.0  # powers of ten below the loudest band of the sound, where silence begins
_AT_ONCE = 1024  # frames
# Slaney's scale of pitch (Auditory Toolbox, 1998): in even steps up to 1 kHz, and in even ratios above.
_STEP_HZ, _EVEN_HZ, _RATIO = 200 / 3, 1000.0, np.log(6.4) / 27

Samples: TypeAlias = npt.NDArray[np.float32]
Frames: TypeAlias = npt.NDArray[np.float32]


class LogMel:
    """Makes frames of one sound.

    Args:
      bins: numbers of a frame.
      chunk_frames: a sound is filled with silence up to a multiple of so many frames. At least 2.
    """

    def __init__(self, bins: int, chunk_frames: int) -> None:
        self._filters = filters(bins)
        self._window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
        self._chunk_frames = chunk_frames
        self._chunks: list[Frames] = []
        self._num_frames = 0
        self._loudest = np.float32(np.log10(_FLOOR))
        self._buffer = np.zeros(0, np.float32)  # samples that frames to come look at
        self.num_samples = 0

    def add(self, samples: Samples) -> None:
        """Takes the samples `[n]` that come next."""
        self.num_samples += len(samples)
        self._take(samples)

    def finish(self) -> list[Frames]:
        """Returns the chunks `[chunk_frames, bins]` of the sound, which ends here."""
        of_chunk = self._chunk_frames * HOP
        silence = -self.num_samples % of_chunk
        self._take(np.zeros(silence, np.float32))
        end = self._buffer[-1 - _HALF : -1][::-1]  # as in a mirror
        self._buffer = np.concatenate([self._buffer, end])
        self._make(most=(self.num_samples + silence) // HOP)
        least = self._loudest - np.float32(_DEPTH)
        for chunk in self._chunks:
            np.maximum(chunk, least, out=chunk)
            chunk += np.float32(4)
            chunk /= np.float32(4)
        return self._chunks

    def _take(self, samples: Samples) -> None:
        self._buffer = np.concatenate([self._buffer, samples])
        if self._num_frames == 0:
            if len(self._buffer) <= WINDOW:
                return
            self._buffer = np.concatenate([self._buffer[_HALF:0:-1], self._buffer])  # as in a mirror
            self._chunks.append(np.empty((self._chunk_frames, len(self._filters)), np.float32))
        self._make()

    def _make(self, most: int | None = None) -> None:
        """Makes the frames that need no further samples, `most` of the sound in all."""
        while True:
            count = (len(self._buffer) - WINDOW) // HOP + 1
            if most is not None:
                count = min(count, most - self._num_frames)
            place = self._num_frames - (len(self._chunks) - 1) * self._chunk_frames
            if count > 0 and place == self._chunk_frames:
                self._chunks.append(np.empty_like(self._chunks[0]))
                place = 0
            count = min(count, _AT_ONCE, self._chunk_frames - place)
            if count <= 0:
                return
            made = self._logarithms(count)
            self._chunks[-1][place : place + count] = made
            self._loudest = max(self._loudest, made.max())
            self._num_frames += count
            self._buffer = self._buffer[count * HOP :]

    def _logarithms(self, count: int) -> Frames:
        """`[count, bins]` powers of the next frames, by their logarithms."""
        frames = np.lib.stride_tricks.sliding_window_view(self._buffer, WINDOW)[: count * HOP : HOP]
        spectrum = np.fft.rfft(frames * self._window)
        power = np.square(spectrum.real) + np.square(spectrum.imag)
        return np.log10(np.maximum(power @ self._filters.T, _FLOOR)).astype(np.float32)


@lru_cache(maxsize=4)
def filters(bins: int) -> npt.NDArray[np.float64]:
    """`[bins, WINDOW // 2 + 1]` what of each frequency each band has: triangles of one area, even on Slaney's scale."""
    edges = _frequencies(np.linspace(0.0, _pitch(TOP_HZ), bins + 2))
    of_spectrum = np.linspace(0.0, TOP_HZ, WINDOW // 2 + 1)
    rises = (of_spectrum - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falls = (edges[2:, None] - of_spectrum) / np.diff(edges)[1:, None]
    triangles = np.maximum(np.minimum(rises, falls), 0.0)
    weights: npt.NDArray[np.float64] = triangles * (2.0 / (edges[2:] - edges[:-2]))[:, None]
    weights.flags.writeable = False
    return weights


def _pitch(frequency: float) -> float:
    """The place of a frequency above 1 kHz on the scale."""
    return float(_EVEN_HZ / _STEP_HZ + np.log(frequency / _EVEN_HZ) / _RATIO)


def _frequencies(pitches: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The inverse, of any places."""
    first = _EVEN_HZ / _STEP_HZ
    return np.where(pitches < first, _STEP_HZ * pitches, _EVEN_HZ * np.exp(_RATIO * (pitches - first)))
