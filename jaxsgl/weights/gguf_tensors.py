"""The tensors of GGUF files by a checkpoint's names, dequantized row by row as parameters are filled.

llama.cpp gives tensors other names, stacks experts, adds the offset of norms, and reorders rows of q and k where
neighbouring dimensions are to turn together. All that is undone here, so recipes (`names.py`) find what they know. The
`gguf` package has the names and the formats. `loading.py` calls `open_tensors` for every folder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxsgl.errors import CheckpointError
from jaxsgl.json_file import read_object
from jaxsgl.models import ModelArch
from jaxsgl.weights.gguf_config import FAMILIES, IN_GROUPS
from jaxsgl.weights.gguf_file import GgufTensor, gguf_package
from jaxsgl.weights.gguf_folder import TABLE
from jaxsgl.weights.quantized import Rows
from jaxsgl.weights.recipe import Piece, Recipe, Source, Tensor, axes_lengths
from jaxsgl.weights.tensor_files import MappedBytes, MappedFiles, TensorFiles

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
_OF_SCALES = "_scale"  # what follows a matrix's name, as Storage.scale has it
BLOCK, _SCALE_BYTES = 32, 2  # of formats `IN_GROUPS`: numbers of a block, and bytes of the float16 before them
_SUFFIXES = (".weight", ".bias")
_IN_PAIRS = re.compile(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)")
_PLAIN = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
# Factors of ropes, which are in config.json.
_READ_BEFORE = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_OF_LAYER, _OF_LAST_STAGE = re.compile(r"blk\.(\d+)\."), ("output_norm.", "output.")
Indices: TypeAlias = npt.NDArray[np.intp]


class _Matrix(NamedTuple):
    """A matrix of the file, of an expert if it is a stack's: its bytes `[out, bytes of a row]`, and its rows' order."""

    tensor: GgufTensor
    rows: Tensor
    order: Indices  # of the file's rows, which the checkpoint's are


class Blocks:
    """The numbers of a matrix whose format is one of `IN_GROUPS`, without their scales; a row is read when it is cut.

    Attributes:
      shape, dtype: `(out, in)`, int8.
      rows: the bytes of the file.
    """

    dtype = np.dtype(np.int8)

    def __init__(self, matrix: _Matrix) -> None:
        assert matrix.tensor.kind in IN_GROUPS, "gguf_config.py says that all matrices are"
        self.rows, self._order, self._kind = matrix.rows, matrix.order, matrix.tensor.kind
        self.shape = (len(self.rows), matrix.tensor.shape[-1])
        self._blocks = self.rows.reshape(len(self.rows), self.shape[1] // BLOCK, -1)  # [out, G, bytes]

    def __getitem__(self, rows: Any) -> npt.NDArray[np.int8]:
        """`[R, in]` of a slice or of indices `[R]`."""
        stored = self._blocks[self._order[rows]][..., _SCALE_BYTES:]
        if self._kind == "Q4_0":  # the first half of a block has the low bits
            stored = np.concatenate([stored & 15, stored >> 4], axis=-1) - np.uint8(8)
        return np.ascontiguousarray(stored).view(np.int8).reshape(len(stored), -1)

    def scales(self) -> npt.NDArray[np.float16]:
        """`[out, G]`, a view where the rows are in order."""
        scales = self._blocks[..., :_SCALE_BYTES].view(np.float16)[..., 0]
        return scales if (np.diff(self._order) == 1).all() else scales[self._order]


class GgufTensors:
    """The tensors of the folder of a GGUF file; remembers which were asked for."""

    def __init__(self, folder: Path) -> None:
        table = read_object(folder / TABLE)
        self.folder = folder
        self._family = FAMILIES[table["architecture"]]
        self._tensors = {
            name: GgufTensor(file, kind, tuple(shape), start, num_bytes)
            for name, (file, kind, shape, start, num_bytes) in table["tensors"].items()
        }
        self._files = [_mapped(folder / name) for name in table["files"]]
        self._mapped = MappedFiles(self._files)
        for name, tensor in self._tensors.items():
            if tensor.start + tensor.num_bytes > self._files[tensor.file].num_bytes:
                raise CheckpointError(f"{self._path(tensor)} is truncated: tensor {name} lies beyond its end")
        self._gguf = gguf_package()
        blocks = 1 + max((int(name.split(".")[1]) for name in self._tensors if name.startswith("blk.")), default=0)
        arch = next(key for key, word in self._gguf.MODEL_ARCH_NAMES.items() if word == table["architecture"])
        self._names = self._gguf.get_tensor_name_map(arch, blocks)
        self._unread = set(self._tensors)

    def tensor(self, source: Source, arch: ModelArch) -> Tensor:
        """The bytes of the tensor of `source`, mapped. Raises `CheckpointError` if it is missing or misshapen."""
        name, expert = self._stored_name(source.name.removesuffix(_OF_SCALES))
        if name not in self._tensors:
            raise CheckpointError(f"{self.folder}: tensor {name} is missing, but {arch.name} needs it")
        stored = self._tensors[name]
        if source.axes is None:
            self._unread.discard(name)
            blocks = Blocks(self._matrix(source.name.removesuffix(_OF_SCALES), arch))
            part: Any = blocks.scales() if source.name.endswith(_OF_SCALES) else blocks
            return part
        expected = axes_lengths(source, arch)
        shape = stored.shape if expert is None else stored.shape[1:]
        if _without_ones(shape) != _without_ones(expected):
            raise CheckpointError(
                f"{self._path(stored)}: tensor {name} has shape {shape}, but its metadata asks for {expected}"
            )
        self._unread.discard(name)
        return self._bytes(stored)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor; None if there is none of that name."""
        stored = self._tensors.get(self._stored_name(name)[0])
        return None if stored is None else stored.shape

    def names(self) -> list[str]:
        """Names of all tensors, as the files have them."""
        return list(self._tensors)

    def scale(self, name: str) -> npt.NDArray[np.float32]:
        """A small tensor, in float32."""
        return self._numbers(name)

    def pieces(self, recipe: Recipe, arch: ModelArch, found: tuple[Tensor, ...]) -> Iterator[Piece]:
        """What `recipe` makes of its tensors. Of matrices it arranges indices of rows, which are read by these."""
        if recipe.sources[0].axes is None:  # numbers and scales of matrices that stay quantized
            yield from recipe.pieces(arch, found)
            return
        shapes = [axes_lengths(source, arch) for source in recipe.sources]
        if any(len(shape) != 2 or shape[0] == 1 for shape in shapes):
            small = (self._vector(source.name, arch) for source in recipe.sources)
            arrays = tuple(array.reshape(shape) for array, shape in zip(small, shapes, strict=True))
            yield from recipe.pieces(arch, arrays)
            return
        ends = np.cumsum([out for out, _ in shapes])
        indices = tuple(np.arange(end - out, end)[:, None] for end, (out, _) in zip(ends, shapes, strict=True))
        for place, rows in recipe.pieces(arch, indices):
            assert isinstance(rows, np.ndarray)
            which = int(np.searchsorted(ends, rows.flat[0], side="right"))
            out, num_in = shapes[which]
            matrix = self._matrix(recipe.sources[which].name, arch)
            own_rows = rows[..., 0] - (ends[which] - out)
            yield Piece(place, Rows(own_rows, self._reader(matrix), num_in, _dtype_of(matrix.tensor.kind)))

    def release(self, numbers: Any) -> None:
        """Gives back the memory of mapped pages that hold `numbers`; does nothing for an array that isn't mapped."""
        self._mapped.release(numbers.rows if isinstance(numbers, Blocks) else numbers)

    def refuse_unread(self, arch: ModelArch) -> None:
        """Raises `CheckpointError` for tensors that no parameter was made of, except harmless ones."""
        unread = sorted(name for name in self._unread if not _is_harmless(name, arch))
        if unread:
            raise CheckpointError(
                f"{self.folder}: {len(unread)} tensors are not part of {arch.name} as its metadata describes it, as "
                f"{', '.join(unread[:3])}: serve the checkpoint in safetensors that the file was made of"
            )

    def _stored_name(self, name: str) -> tuple[str, int | None]:
        """The file's name of a checkpoint's tensor, and the expert of a stack; the name itself if it has none."""
        match = _EXPERT.fullmatch(name)
        stacked = name if match is None else f"{match[1]}.{match[3]}"
        found = self._names.get_name(stacked, try_suffixes=_SUFFIXES) or name
        return found, None if match is None else int(match[2])

    def _matrix(self, name: str, arch: ModelArch) -> _Matrix:
        stored_name, expert = self._stored_name(name)
        tensor = self._tensors[stored_name]
        rows = self._bytes(tensor).reshape(math.prod(tensor.shape[:-1]), -1)
        count = tensor.shape[-2]
        if expert is not None:
            rows = rows[expert * count : (expert + 1) * count]
        return _Matrix(tensor, rows, self._order(stored_name, count, arch))

    def _order(self, name: str, count: int, arch: ModelArch) -> Indices:
        """The file's row of each of the checkpoint's, of which i and i + H / 2 of a head turn together."""
        order = np.arange(count)
        if not self._family.in_pairs or _IN_PAIRS.fullmatch(name) is None:
            return order
        return order.reshape(-1, arch.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)

    def _reader(self, matrix: _Matrix) -> Callable[[Any], npt.NDArray[Any]]:
        return lambda rows: self._dequantized(matrix.rows[matrix.order[rows]], matrix.tensor.kind)

    def _vector(self, name: str, arch: ModelArch) -> npt.NDArray[np.float32]:
        """A small tensor as the checkpoint has it, in float32."""
        stored_name, _ = self._stored_name(name)
        numbers = self._numbers(stored_name)
        if numbers.ndim == 1:
            numbers = numbers[self._order(stored_name, len(numbers), arch)]
        return numbers - np.float32(arch.norm_offset) if stored_name.endswith("norm.weight") else numbers

    def _numbers(self, name: str) -> npt.NDArray[np.float32]:
        tensor = self._tensors[name]
        return self._dequantized(self._bytes(tensor), tensor.kind).astype(np.float32).reshape(tensor.shape)

    def _bytes(self, tensor: GgufTensor) -> Tensor:
        flat = self._files[tensor.file].part(tensor.start, tensor.num_bytes)
        return flat.reshape(*tensor.shape[:-1], -1)

    def _dequantized(self, rows: Tensor, kind: str) -> npt.NDArray[Any]:
        """Of the bytes of rows their numbers. Raises `CheckpointError` for a format that the package can't read."""
        if kind in _PLAIN:
            return np.ascontiguousarray(rows).view(_PLAIN[kind])
        try:
            return self._gguf.quants.dequantize(rows, self._gguf.GGMLQuantizationType[kind])
        except NotImplementedError as error:
            raise CheckpointError(f"{self.folder}: tensors in {kind} can't be read: {error}") from error

    def _path(self, tensor: GgufTensor) -> Path:
        return self._files[tensor.file].path.resolve()


def _is_harmless(name: str, arch: ModelArch) -> bool:
    """Whether a tensor may be left unread: factors of ropes, a head beside the embedding that is tied to it, and what
    other pipeline stages read."""
    if name in _READ_BEFORE or (name == "output.weight" and arch.tie_embeddings):
        return True
    before, after = arch.stage.layers_before, arch.stage.layers_after
    of_layer = _OF_LAYER.match(name)
    if of_layer is not None:
        place = int(of_layer[1]) - before
        return -before <= place < 0 or 0 <= place - arch.num_layers < after
    if name == "token_embd.weight":
        return not arch.has_embedding
    return name.startswith(_OF_LAST_STAGE) and after > 0


def open_tensors(folder: Path) -> TensorFiles | GgufTensors:
    """The tensors of a model's folder, whatever files they are in."""
    return GgufTensors(folder) if (folder / TABLE).is_file() else TensorFiles(folder)


def has_tensors(folder: Path) -> bool:
    """Whether the folder has files of tensors. Some have a configuration alone, of which memory is computed."""
    return (folder / TABLE).is_file() or any(folder.glob("*.safetensors"))


def _mapped(path: Path) -> MappedBytes:
    try:
        return MappedBytes(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.resolve()} can't be read: {error}") from error


def _dtype_of(kind: str) -> np.dtype[Any]:
    """Of the numbers that rows in that format are read as."""
    return _PLAIN.get(kind, np.dtype(np.float32))


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(length for length in shape if length != 1)
