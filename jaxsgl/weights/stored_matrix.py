"""Quantized matrices as checkpoints store them, read row by row: numbers, scales, offsets, order of columns.

Owns the packings: which bits of which word are which number. A row is an output's weights, whatever the axes of the
stored tensors. Never knows names of parameters or how rows are fused: `quantized.py`, which calls it, does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxsgl.errors import CheckpointError
from jaxsgl.models.quantization import MXFP4_PAIRS, Storage, WeightFormat
from jaxsgl.weights.mxfp4 import MOST_SCALE, check_scales
from pallas_kernels import packed

Array: TypeAlias = npt.NDArray[Any]
Rows: TypeAlias = slice | npt.NDArray[np.intp]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight outputs in a word, from its lowest bits
WORD_BITS = 32
_WORDS = ("int32", "uint32")  # dtypes
# Floats of 4 bits: the tensors of numbers, and of the scale that all scales of the matrix have.
FP4_NAMES = {"fp4": ("weight", "weight_scale_2"), "packed_fp4": ("weight_packed", "weight_global_scale")}
# Other kinds' numbers; those in words are `qweight`.
_NUMBERS = {"plain": "weight", "packed": "weight_packed", "packed_mxfp4": "weight_packed", "int8_mxfp4": "weight"}
_AS_STORED = (packed.MXFP4, packed.MXFP4_FRAGMENTS, packed.MXFP4_CODES)  # packings that are made of what is stored
FP4_DOUBLED = np.array(packed.MXFP4_DOUBLED, np.int8)  # what their codes stand for, doubled so that all are whole


def tensor_names(storage: Storage, reorders: bool) -> tuple[str, ...]:
    """The tensors of a matrix by what replaces "weight" in its name."""
    if storage.kind in FP4_NAMES:
        numbers, of_scales = FP4_NAMES[storage.kind]
        return numbers, storage.scale, of_scales
    numbers = _NUMBERS.get(storage.kind, "qweight")
    in_words = storage.kind in ("awq", "gptq")
    names = [numbers, storage.scale]
    if storage.has_zeros or in_words:
        names.append("qzeros" if in_words else "weight_zero_point")
    if reorders:
        names.append(order_name(storage))
    return tuple(names)


def order_name(storage: Storage) -> str:
    """The tensor that says of which group each input is, if there is one."""
    return "g_idx" if storage.kind in ("awq", "gptq") else "weight_g_idx"


def names_in_stack(stack: str, part: str) -> tuple[str, ...]:
    """What the tensor that `part` of `tensor_names` means may be called of a stack of matrices: `stack` is its numbers.

    Names have no "weight" there, or all of `part` after the stack's (ModelOpt).
    """
    return tuple(dict.fromkeys((stack + part.removeprefix("weight"), stack if part == "weight" else f"{stack}_{part}")))


def is_unused(name: str, fmt: WeightFormat) -> bool:
    """Whether a tensor of a checkpoint of that format is rightly left unread.

    Activations are not quantized here, so their scales mean nothing; shapes and orders follow from the configuration.
    Some GPTQ software writes biases of zeros for models that have none.
    """
    if fmt.method in ("gptq", "auto-round") and name.endswith("_proj.bias"):
        return True
    return name.endswith(
        (
            "input_scale",
            "activation_scale",
            "input_global_scale",
            ".input_zero_point",
            ".output_scale",
            "weight_shape",
            ".g_idx",
            ".weight_g_idx",
        )
    )


def most_scale_of(fmt: WeightFormat) -> int:
    """The largest scale of MXFP4 that a format can keep."""
    return packed.MXFP4_MOST_SCALE if fmt.packing == packed.MXFP4_FRAGMENTS else MOST_SCALE


class PlainMatrix:
    """A matrix `[out, in]` that is stored as it is, next to others that are quantized."""

    def __init__(self, stored: Array) -> None:
        self.shape = stored.shape
        self._stored = stored

    def weights(self, rows: Rows) -> npt.NDArray[np.float32]:
        """`[R, in]` float32."""
        return self._stored[rows].astype(np.float32)


class StoredMatrix:
    """One quantized matrix.

    Args:
      fmt: in which it is to be kept; its `storage` says how it is stored.
      tensors: by the names of `tensor_names`; cutting one reads only the part. With one of `order_name` it is checked
        that inputs are in the order that `fmt` says.
      shape: `(out, in)`.
      name: of the matrix, for errors.

    Attributes:
      fmt, shape: as given.
      num_groups: G.
      num_columns, dtype: of what `numbers` returns.
      scale_dtype: of what `scale` returns.

    Raises:
      CheckpointError: a tensor has another shape, dtype or order than the configuration says.
    """

    def __init__(self, fmt: WeightFormat, tensors: Mapping[str, Array], shape: tuple[int, int], name: str) -> None:
        assert fmt.storage is not None
        self.fmt, self._storage, self._tensors, self._name = fmt, fmt.storage, tensors, name
        self.shape = shape
        self._group = fmt.group_of(shape[1])
        self.num_groups = -(-shape[1] // self._group)
        is_packed = fmt.packing in _AS_STORED
        self.num_columns = shape[1] // 2 if is_packed else shape[1]
        self.dtype = np.dtype(np.uint8 if is_packed else getattr(ml_dtypes, fmt.numbers, fmt.numbers))
        self.scale_dtype = np.dtype(np.uint8 if is_packed else np.float32)
        self._numbers, *others = (tensors[each] for each in tensor_names(self._storage, fmt.reorders))
        self._scale = others[0]
        if self._scale.ndim == 4 and self._scale.shape[1::2] == (1, 1):  # ModelOpt's scales of blocks
            self._scale = self._scale[:, 0, :, 0]
        self._is_mxfp4 = self._storage.kind in MXFP4_PAIRS
        if self._is_mxfp4 and self._scale.dtype == ml_dtypes.float8_e8m0fnu:
            self._scale = self._scale.view(np.uint8)  # the same bits
        if self._is_mxfp4 and self._numbers.dtype == np.int8:
            self._numbers = self._numbers.view(np.uint8)  # as DeepSeek's software calls pairs
        has_zeros = self._storage.has_zeros or self._storage.kind in ("awq", "gptq")
        self._zeros = others[1] if has_zeros else None
        self._scale_of_scales = others[1] if self._storage.kind in FP4_NAMES else None
        self._check()
        self._check_zeros()
        self._check_order()

    def numbers(self, rows: Rows) -> Array:
        """`[R, in]` in the dtype of the format, columns in their order; packed MXFP4 as it is stored, `[R, in / 2]`."""
        dtype = self.dtype
        if self._storage.kind in (*FP4_NAMES, *MXFP4_PAIRS):
            pairs = self._numbers[rows]
            if self.fmt.packing in _AS_STORED:
                return pairs
            return FP4_DOUBLED[np.stack([pairs & 15, pairs >> 4], axis=-1)].reshape(len(pairs), -1).astype(dtype)
        if self._storage.kind == "plain":
            plain = self._numbers[rows]
            if self._storage.has_zeros and not self.fmt.has_zeros:
                plain = plain - self._per_column(self.zero(rows))
            return self._sorted(plain).astype(dtype)
        numbers = self._unpacked(rows)
        if self._storage.has_zeros and not self.fmt.has_zeros:
            return (self._sorted(numbers) - self._per_column(self.zero(rows))).astype(dtype)
        return self._sorted(numbers).astype(dtype)

    def scale(self, rows: Rows) -> Array:
        """`[R, G]` float32; of packed MXFP4 as it is stored."""
        out = self.shape[0]
        if self._is_mxfp4:
            exponents = self._scale[rows]
            check_scales(exponents, self._name, most_scale_of(self.fmt))
            if self.fmt.packing in _AS_STORED:
                return exponents
            return np.ldexp(np.float32(0.5), exponents.astype(np.int32) - packed.MXFP4_BIAS)  # of doubled numbers
        if self._scale.size == 1:
            scale = np.broadcast_to(self._scale.reshape(1, 1), (out, self.num_groups))[rows]
        elif self._storage.kind in ("awq", "gptq"):
            scale = self._scale[:, rows].T
        elif self._storage.block_rows > 1:
            scale = self._scale[np.arange(out)[rows] // self._storage.block_rows]
        else:
            scale = self._scale.reshape(out, self.num_groups)[rows]
        if self._scale_of_scales is not None:
            stored = self._scale_of_scales.reshape(()).astype(np.float32)
            whole = np.float32(self._finite(stored, FP4_NAMES[self._storage.kind][1]))
            # Of numbers that are doubled. compressed-tensors has the reciprocal.
            with np.errstate(divide="ignore", invalid="ignore"):
                scale = scale.astype(np.float32) * (whole if self._storage.kind == "fp4" else 1 / whole) / 2
        return self._finite(np.ascontiguousarray(scale, np.float32), self._storage.scale)

    def zero(self, rows: Rows) -> npt.NDArray[np.int8]:
        """`[R, G]` int8: what stands for 0 among `numbers`."""
        assert self._zeros is not None
        bits, middle = self._storage.bits, 1 << (self._storage.bits - 1)
        if self._has_whole_zeros:
            if self._zeros.size == 1:
                return np.broadcast_to(self._zeros.reshape(1, 1), (self.shape[0], self.num_groups))[rows].astype(
                    np.int8
                )
            zeros: Array = self._zeros.reshape(self.shape[0], self.num_groups)[rows]
            return zeros.astype(np.int8)
        if self._storage.kind == "packed":  # eight rows in a word
            zeros = _numbers_at(np.arange(self.shape[0])[rows], self._zeros.view(np.uint32).T, bits).T
        else:  # eight outputs in a word of a group
            places = _places(np.arange(self.shape[0])[rows], self._storage)
            zeros = _numbers_at(places, self._zeros.view(np.uint32), bits).T
        more = 1 if self._storage.zeros_one_less else 0
        return (((zeros.astype(np.int16) + more) & int(_mask(bits))) - middle).astype(np.int8)

    def weights(self, rows: Rows) -> npt.NDArray[np.float32]:
        """`[R, in]` float32: what the numbers mean, columns in the order of the inputs."""
        values = self.numbers(rows).astype(np.float32)
        if self.fmt.has_zeros:
            values -= self._per_column(self.zero(rows))
        values *= self._per_column(self.scale(rows))
        if self.fmt.reorders:
            values[:, self.order()] = values.copy()
        return values

    def order(self) -> npt.NDArray[np.int32]:
        """`[in]`: the input of each column. Raises `CheckpointError` unless every group has equally many inputs."""
        index = self._tensors[order_name(self._storage)].reshape(-1)
        if (index < 0).any():  # as compressed-tensors writes one that it has not set
            return np.arange(self.shape[1], dtype=np.int32)
        sizes = np.bincount(index, minlength=self.num_groups)
        if len(sizes) != self.num_groups or (sizes[:-1] != self._group).any():
            raise CheckpointError(
                f"{self._name}: groups of g_idx have {sizes.min()} to {sizes.max()} inputs, but group_size is "
                f"{self._group}"
            )
        return np.argsort(index, kind="stable").astype(np.int32)

    @property
    def _has_whole_zeros(self) -> bool:
        """Whether zero points are numbers and not words of them, as older compressed-tensors has those of int4, too."""
        assert self._zeros is not None
        return self._storage.kind == "plain" or (self._storage.kind == "packed" and self._zeros.dtype == np.int8)

    def _sibling(self, part: str) -> str:
        """The name of the tensor that `part` of `tensor_names` means."""
        return self._name.removesuffix("weight") + part

    def _finite(self, scale: Array, part: str) -> Array:
        """`scale`, of the tensor that `part` of `tensor_names` means. Raises `CheckpointError` if it isn't finite."""
        is_finite = np.isfinite(scale)
        if not is_finite.all():
            raise CheckpointError(
                f"{self._sibling(part)} holds {scale[~is_finite][0]}, but scales must be finite: fetch the file again, "
                "or quantize the model anew"
            )
        return scale

    def _sorted(self, numbers: Array) -> Array:
        return numbers[:, self.order()] if self.fmt.reorders else numbers

    def _per_column(self, of_groups: Array) -> Array:
        return np.repeat(of_groups, self._group, axis=1)[:, : self.shape[1]]

    def _unpacked(self, rows: Rows) -> npt.NDArray[np.int16]:
        """`[R, in]`, less the middle of their range: what the format's dtype holds."""
        bits, num_in = self._storage.bits, self.shape[1]
        inputs = np.arange(num_in)
        if self._storage.kind == "packed":  # [out, in / 8], eight inputs in a word
            spread = _numbers_at(inputs, self._numbers[rows].view(np.uint32), bits)
        elif self._storage.kind == "gptq":  # [in / 8, out]
            spread = _numbers_at(inputs, self._numbers[:, rows].T.view(np.uint32), bits)
        else:  # AWQ: [in, out / 8], eight outputs in a word
            places = _places(np.arange(self.shape[0])[rows], self._storage)
            spread = _numbers_at(places, self._numbers.view(np.uint32), bits).T
        return spread.astype(np.int16, order="C") - (1 << (bits - 1))

    def _check(self) -> None:
        (out, num_in), groups, bits = self.shape, self.num_groups, self._storage.bits
        kind = self._storage.kind
        words = -(-num_in * bits // WORD_BITS)
        expected = {
            "plain": (out, num_in), "packed": (out, words), "gptq": (words, out),
            "awq": (num_in, out * bits // WORD_BITS), **dict.fromkeys((*FP4_NAMES, *MXFP4_PAIRS), (out, num_in // 2)),
        }[kind]  # fmt: skip
        wanted = {
            "plain": ("int8", "float8_e4m3fn"), **dict.fromkeys((*FP4_NAMES, *MXFP4_PAIRS), ("uint8",))
        }.get(kind, _WORDS)  # fmt: skip
        self._refuse_unless(self._numbers.shape == expected, "numbers", self._numbers, expected, wanted)
        rows = -(-out // self._storage.block_rows)
        of_scale: set[tuple[int, ...]] = {(groups, out)} if kind in ("awq", "gptq") else {(rows, groups)}
        if groups == 1 and kind in ("plain", "packed"):
            of_scale |= {(out,), (), (1,), (1, 1)}
        is_float = np.issubdtype(self._scale.dtype, np.floating) or self._scale.dtype.kind == "V"
        is_right = self._scale.dtype == np.uint8 if self._is_mxfp4 else is_float
        self._refuse_unless(
            self._scale.shape in of_scale and is_right, "scales", self._scale, sorted(of_scale)[-1],
            ("uint8", "float8_e8m0fnu") if self._is_mxfp4 else ("floats",),
        )  # fmt: skip
        self._refuse_unless(self._numbers.dtype.name in wanted, "numbers", self._numbers, expected, wanted)
        if self._scale_of_scales is not None:
            self._refuse_unless(
                self._scale_of_scales.size == 1, "scales of scales", self._scale_of_scales, (1,), ("floats",)
            )

    def _check_zeros(self) -> None:
        zeros, (out, _), groups = self._zeros, self.shape, self.num_groups
        if zeros is None:
            return
        words = -(-out * self._storage.bits // WORD_BITS)
        wanted: tuple[str, ...]
        expected = (words, groups) if self._storage.kind == "packed" else (groups, words)
        wanted = ("int8", *_WORDS) if self._storage.kind == "packed" else _WORDS
        fits = zeros.shape == expected and zeros.dtype.name in _WORDS
        if self._has_whole_zeros:
            expected, wanted = (out, groups), ("int8",)
            fits = zeros.dtype.kind in "iu" and zeros.size in (1, out * groups)
        self._refuse_unless(fits, "zero points", zeros, expected, wanted)
        if not self._storage.has_zeros and self.zero(slice(None)).any():
            raise CheckpointError(
                f"{self._name}: quantization_config says symmetric, but the stored zero points differ"
            )

    def _check_order(self) -> None:
        """Raises `CheckpointError` if inputs are in an order that the configuration says nothing of."""
        index = self._tensors.get(order_name(self._storage))
        if self.fmt.reorders or index is None or (index < 0).any():
            return
        if not np.array_equal(index.reshape(-1), np.arange(self.shape[1]) // self._group):
            raise CheckpointError(
                f"{self._sibling(order_name(self._storage))} has inputs in another order than their groups, but "
                'quantization_config says nothing of it: give it desc_act true, or actorder "group" in '
                "compressed-tensors, if the model was quantized so"
            )

    def _refuse_unless(
        self, fits: bool, what: str, tensor: Array, expected: tuple[int, ...], dtypes: tuple[str, ...]
    ) -> None:
        if not fits:
            raise CheckpointError(
                f"{self._name}: {what} are {tensor.dtype} {tensor.shape}, but config.json asks for {expected} of "
                f"{' or '.join(dtypes)} ({self._storage.kind}, {self._storage.bits} bits, groups of {self._group})"
            )


def _mask(bits: int) -> np.uint32:
    return np.uint32((1 << bits) - 1)


def _numbers_at(places: npt.NDArray[np.intp], words: npt.NDArray[np.uint32], bits: int) -> npt.NDArray[np.uint32]:
    """The numbers `[R, C]` at these places of rows of words `[R, W]`, which lie from the lowest bits of a word on."""
    word, shift = np.divmod(places * bits, WORD_BITS)
    numbers = words[:, word] >> shift.astype(np.uint32)
    is_cut = shift + bits > WORD_BITS  # of 3 bits, some end in the next word
    if is_cut.any():
        numbers[:, is_cut] |= words[:, word[is_cut] + 1] << (WORD_BITS - shift[is_cut]).astype(np.uint32)
    return numbers & _mask(bits)


def _places(outputs: npt.NDArray[np.intp], storage: Storage) -> npt.NDArray[np.intp]:
    """The places of outputs' numbers in a row of words."""
    return outputs - outputs % 8 + np.argsort(AWQ_ORDER)[outputs % 8] if storage.kind == "awq" else outputs
