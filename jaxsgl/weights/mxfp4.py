"""Weights in MXFP4, kept or decoded to bfloat16: 4-bit numbers in blocks of 32, each with a power of two.

Owns the packing of the OCP Microscaling formats (version 1.0) as gpt-oss stores it. Never knows names of parameters;
`experts.py` and, for its check of scales, `stored_matrix.py` call it.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxsgl.errors import CheckpointError

BLOCK = 32  # numbers that share a scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # sign, two bits of exponent, one of mantissa
_SCALE_BIAS = 127  # a scale s is 2 ** (s - 127)
MOST_SCALE = 252  # beyond it 6 * 2 ** (s - 127) is no bfloat16
_EXPONENT_SHIFT, _NOT_SIGN = 7, 0x7FFF  # of a bfloat16's bits


def _bits_of_pairs() -> npt.NDArray[np.uint32]:
    """`[256]` for each byte the bits of its two numbers as bfloat16; the one in the low bits comes first."""
    values = np.array([*_MAGNITUDES, *(-x for x in _MAGNITUDES)], ml_dtypes.bfloat16).view(np.uint16)
    byte = np.arange(256)
    pairs = np.stack([values[byte & 15], values[byte >> 4]], axis=1)
    return np.ascontiguousarray(pairs).view(np.uint32)[:, 0]


_PAIRS = _bits_of_pairs()


class Mxfp4:
    """A stack of matrices `[E, out, in]`. Implements `recipe.Numbers`.

    Args:
      blocks: `[E, out, in / 32, 16]` uint8, two numbers in a byte.
      scales: `[E, out, in / 32]` uint8.
      name: of the tensor, for errors.

    Attributes:
      shape: `(E, out, in)`.
      dtype, nbytes: of the decoded numbers.

    Raises:
      CheckpointError: the tensors don't fit each other.
    """

    dtype = np.dtype(ml_dtypes.bfloat16)

    def __init__(self, blocks: npt.NDArray[Any], scales: npt.NDArray[Any], name: str) -> None:
        if blocks.dtype != np.uint8 or scales.dtype != np.uint8 or blocks.shape != (*scales.shape, BLOCK // 2):
            raise CheckpointError(
                f"{name}: blocks are {blocks.dtype} {blocks.shape} and scales {scales.dtype} {scales.shape}, but must "
                f"be uint8 [E, out, in / {BLOCK}, {BLOCK // 2}] and [E, out, in / {BLOCK}]"
            )
        self._blocks, self._scales, self._name = blocks, scales, name
        self.shape = (*scales.shape[:-1], scales.shape[-1] * BLOCK)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, box: tuple[slice, ...], /) -> npt.NDArray[Any]:
        """Numbers of a part, bfloat16."""
        columns = (*box, *(slice(None) for _ in self.shape[len(box) :]))[-1]
        first, end, _ = columns.indices(self.shape[-1])
        whole = slice(first // BLOCK, -(-end // BLOCK))  # blocks that the part touches
        rows = box[: len(self.shape) - 1]
        of_scales: Any = (*rows, ..., whole)
        of_blocks: Any = (*of_scales, slice(None))
        scales = self._scales[of_scales]
        check_scales(scales, self._name)
        bits = _PAIRS[self._blocks[of_blocks]].view(np.uint16)  # [.., blocks, 32]
        exponents = (scales.astype(np.int16) - _SCALE_BIAS) << _EXPONENT_SHIFT
        moved = bits + exponents.view(np.uint16)[..., None]
        # What is 0, and what is too small to be a normal number, keeps its sign only.
        is_normal = ((bits & _NOT_SIGN) != 0) & (scales > 1)[..., None]
        numbers = np.where(is_normal, moved, bits & ~np.uint16(_NOT_SIGN)).reshape(*scales.shape[:-1], -1)
        offset = whole.start * BLOCK
        return numbers[..., first - offset : end - offset].view(ml_dtypes.bfloat16)


class Mxfp4Scales:
    """The scales of such a stack as they are, checked as they are read. Implements `recipe.Numbers`.

    Args:
      scales: uint8.
      name: of the tensor, for errors.
      most: the largest one.
    """

    def __init__(self, scales: npt.NDArray[Any], name: str, most: int) -> None:
        self._scales, self._name, self._most = scales, name, most
        self.shape, self.dtype, self.nbytes = scales.shape, scales.dtype, scales.nbytes

    def __getitem__(self, box: tuple[slice, ...], /) -> npt.NDArray[Any]:
        """Scales of a part."""
        scales: npt.NDArray[Any] = self._scales[box]
        check_scales(scales, self._name, self._most)
        return scales


def check_scales(scales: npt.NDArray[Any], name: str, most: int = MOST_SCALE) -> None:
    """Raises `CheckpointError` for scales beyond `most`, by default beyond bfloat16."""
    if scales.size and scales.max() > most:
        powers = int(scales.max()) - _SCALE_BIAS, most - _SCALE_BIAS
        raise CheckpointError(
            f"{name}: a scale is 2 ** {powers[0]}, or no number; the largest here is 2 ** {powers[1]}"
        )


assert sys.byteorder == "little", "the first number of a pair is taken from the low half of a word"
