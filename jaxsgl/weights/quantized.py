"""Makes the parts of quantized matrices: which tensors they are made of, and how.

Weights that are quantized at load are read as `names.py` says, and a part (`models/matrix.py`) is computed on the
devices from its whole matrix. Of a quantized checkpoint, each row of a part is computed by the host where it is copied
(`stored_matrix.py`); `names.py` and `experts.py` only say which row of which tensor goes where. Experts in a format
that their kernels don't multiply are dequantized there, as is all else that is kept in the model's dtype: what makes
keys and values of a latent, gates, an output head. The loader calls `recipe_of` for every parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.typing import DTypeLike

from jaxsgl.errors import CheckpointError
from jaxsgl.models import ModelArch
from jaxsgl.models.layer_spec import RECURRENT_NETS
from jaxsgl.models.matrix import part_name
from jaxsgl.models.quantization import FLOAT8, WeightFormat
from jaxsgl.weights import names, tower_names
from jaxsgl.weights.experts import ShapeOf, recipe_of_experts, recipe_of_mxfp4
from jaxsgl.weights.recipe import Path, Piece, Place, Recipe, Source, Tensor, axes_lengths
from jaxsgl.weights.stored_matrix import (
    FP4_NAMES,
    PlainMatrix,
    StoredMatrix,
    most_scale_of,
    names_in_stack,
    order_name,
    tensor_names,
)
from pallas_kernels import packed

SHARES_OF_RANGE = (0.95, 0.9, 0.85, 0.8, 0.75)  # that int4's scales try
WEIGHTS = "weights"  # a part that is no parameter of its own: numbers, offsets and scales multiplied out


def recipe_of(path: Path, param: nnx.Param[jax.Array], arch: ModelArch, shape_of: ShapeOf) -> Recipe:
    """The recipe of the (abstract) parameter at `path`, quantized or not; `shape_of` tells the checkpoint's tensors."""
    part = param.get_metadata().get("part")
    if part is None:
        of_experts = recipe_of_experts(path, arch, shape_of)
        if of_experts is not None and path[3:] in (("gate_up",), ("down",)):
            return _dequantized(path, of_experts, "experts", arch, shape_of)
        recipe = tower_names.recipe_of_tower(path, arch) or of_experts or names.recipe_of(path, arch)
        if path[2:] == ("attention", "kv_b"):
            return _dequantized(path, recipe, "kv_b", arch, shape_of)
        return _dequantized_if_stored_so(recipe, _formats_at(path, arch), shape_of)
    fmt: WeightFormat = param.get_metadata("format")
    whole = (*path[:-1], str(path[-1]).removesuffix(part_name("", part)))
    is_arranged = packed.is_arranged(fmt.packing, part)
    if fmt.storage is not None and fmt.storage.kind == "mxfp4":
        recipe = recipe_of_mxfp4(whole, part, most_scale_of(fmt), arch, shape_of)
        return replace(recipe, computed=Packed(part, fmt.packing)) if is_arranged else recipe
    recipe = recipe_of_experts(whole, arch, shape_of) or names.recipe_of(whole, arch)
    if fmt.storage is None:
        return Recipe(recipe.sources, recipe.pieces, QuantizedAtLoad(fmt.numbers, part, fmt.group, fmt.packing))
    stored = _of_stored(recipe, fmt, part, shape_of)
    return replace(stored, computed=Packed(part, fmt.packing)) if is_arranged else stored


def _of_stored(recipe: Recipe, fmt: WeightFormat, part: str, shape_of: ShapeOf) -> Recipe:
    return _of_several(recipe, (fmt,) * len(recipe.sources), part, shape_of)


def _of_several(recipe: Recipe, formats: tuple[WeightFormat | None, ...], part: str, shape_of: ShapeOf) -> Recipe:
    """The part of matrices whose sources are stored in these formats; None: not quantized."""
    sources: list[Source] = []
    parts: list[tuple[str, ...]] = []
    for source, fmt in zip(recipe.sources, formats, strict=True):
        parts.append(() if fmt is None else _names_beside(source, fmt, shape_of))
        if fmt is None:
            sources.append(source)
        else:
            sources += [Source(_stored_name(source, name, fmt, shape_of), None) for name in parts[-1]]
    return Recipe(tuple(sources), StoredPieces(recipe, formats, tuple(parts), part))


def _names_beside(source: Source, fmt: WeightFormat, shape_of: ShapeOf) -> tuple[str, ...]:
    """The tensors of a matrix by `tensor_names`, and an order of inputs that the format says nothing of."""
    assert fmt.storage is not None
    order = order_name(fmt.storage)
    has_order = not fmt.reorders and shape_of(source.name.removesuffix("weight") + order) is not None
    return (*_names_of(fmt), order) if has_order else _names_of(fmt)


def _names_of(fmt: WeightFormat) -> tuple[str, ...]:
    assert fmt.storage is not None
    return tensor_names(fmt.storage, fmt.reorders)


def _stored_name(source: Source, part: str, fmt: WeightFormat, shape_of: ShapeOf) -> str:
    """The tensor of `source` that `part` of `tensor_names` means; a stack and its scales have no "weight" in the names.

    One scale of a tensor in FP8 goes by the name of scales of blocks, too. Raises `CheckpointError` for a stack in a
    format whose stacks are not read.
    """
    assert fmt.storage is not None
    is_stack = len(source.axes or ()) > 2
    if source.is_transposed and not is_stack:
        raise CheckpointError(
            f"tensor {source.name} is a matrix [in, out], of which quantized ones are not read: serve the model as it "
            "was before, with --quantization int8 or fp8"
        )
    names = names_in_stack(source.name, part) if is_stack else (source.name.removesuffix("weight") + part,)
    if part == "weight_scale":
        names += tuple(f"{name}_inv" for name in names)
    found = next((name for name in names if shape_of(name) is not None), None)
    if is_stack and (found is None or (source.is_transposed and fmt.storage.kind not in ("plain", *FP4_NAMES))):
        raise CheckpointError(
            f"tensor {source.name} is a stack of experts, but the files have no tensor {names[0]}: quantization_config "
            f"({fmt.method}) must except it if it is not quantized; stacks [experts, out, in] are supported, and "
            "[experts, in, out] in FP8 and NVFP4"
        )
    return found or names[0]


def _dequantized(path: Path, recipe: Recipe, matrix: str, arch: ModelArch, shape_of: ShapeOf) -> Recipe:
    """What `recipe` makes of the tensors of a layer's matrix, dequantized if the checkpoint has quantized them."""
    assert isinstance(path[1], int)
    fmt = arch.stored_format_of(arch.layers[path[1]], matrix)
    return recipe if fmt is None else _of_stored(recipe, fmt, WEIGHTS, shape_of)


# What `LayerSpec.matrices` calls parameters that have other names.
_MATRICES: dict[Path, str] = {
    ("mlp", "shared"): "shared",
    **{
        (net, name): matrix
        for net in (kind.module for kind in RECURRENT_NETS)
        for name, matrix in (("inputs", "state_inputs"), ("qkvz", "state_inputs"), ("output", "state_output"))
    },
    ("embedding_gate", "gate"): "embedding_gate",
    ("embedding_gate", "out"): "embedding_out",
}


def _formats_at(path: Path, arch: ModelArch) -> tuple[WeightFormat, ...]:
    """The formats that the tensors of the parameter at `path` may be in: its own, or any of the checkpoint's."""
    if path[0] == "layers" and isinstance(path[1], int):
        matrix = _MATRICES.get(path[2:4], str(path[3]))
        own = dict(arch.layers[path[1]].stored_in).get(matrix)
        if own is not None:
            return (own,)
    if path == ("lm_head",) and arch.head_format is not None:
        return (arch.head_format,)
    return tuple(fmt for fmt in arch.stored_formats if fmt.storage is not None)


def _dequantized_if_stored_so(recipe: Recipe, formats: tuple[WeightFormat, ...], shape_of: ShapeOf) -> Recipe:
    """What `recipe` makes of tensors that the checkpoint has quantized or not, whatever its configuration says.

    These are what stays in the model's dtype here: an output head, gates, a tower. Of gates with few outputs the
    configuration may say nothing, since a block has more of them.
    """
    modules = [source.name.removesuffix("weight") for source in recipe.sources]
    found = tuple(_found_format(module, formats, shape_of) for module in modules)
    return _of_several(recipe, found, WEIGHTS, shape_of) if any(found) else recipe


def _found_format(module: str, formats: tuple[WeightFormat, ...], shape_of: ShapeOf) -> WeightFormat | None:
    """The format that has a tensor of each name, of several the one with most names; None: the module has no scales."""

    def is_there(name: str) -> bool:
        others = (f"{name}_inv",) if name.startswith("weight_scale") else ()
        return any(shape_of(module + each) is not None for each in (name, *others))

    fitting = [fmt for fmt in formats if all(map(is_there, _names_of(fmt)))]
    return max(fitting, key=lambda fmt: len(_names_of(fmt)), default=None)


@dataclass(frozen=True)
class Packed:
    """Packs a part of matrices (`pallas_kernels.packed`). Equal ones are one program."""

    part: str
    packing: str

    def __call__(self, arch: ModelArch, of_matrix: jax.Array) -> jax.Array:
        """Of numbers `[..., out, in]` of 4 or 8 bits, or what groups share `[..., out, G]`; of MXFP4 as stored."""
        pack = packed.pack_numbers if self.part == "numbers" else packed.pack_groups
        return pack(self.packing, of_matrix)


@dataclass(frozen=True)
class QuantizedAtLoad:
    """Quantizes with one scale per output, or for each `group` inputs of it. Equal ones are one program."""

    numbers: str
    part: str
    group: int | None = None
    packing: str = ""

    def __call__(self, arch: ModelArch, weights: jax.Array) -> jax.Array:
        """Of `weights [..., in]`, the numbers `[..., in]` or their scales `[..., G]` float32."""
        numbers, scale = quantize(weights, FLOAT8 if self.numbers == "bfloat16" else self.numbers, self.group)
        made = numbers if self.part == "numbers" else scale
        return Packed(self.part, self.packing)(arch, made) if self.packing in packed.SIDES else made


def quantize(weights: jax.Array, numbers: str, group: int | None = None) -> tuple[jax.Array, jax.Array]:
    """The nearest numbers `[..., in]` of that dtype, and scales `[..., G]`; a group's largest number ends the range.

    Of 4 bits, the range ends a little before the largest number where the squares of all errors are less then.
    """
    num_in = weights.shape[-1]
    group = num_in if group is None else group
    padding = [(0, 0)] * (weights.ndim - 1) + [(0, -num_in % group)]
    groups = jnp.pad(weights.astype(jnp.float32), padding).reshape(*weights.shape[:-1], -1, group)
    is_float = jnp.issubdtype(jnp.dtype(numbers), jnp.floating)
    largest = float(jnp.finfo(numbers).max if is_float else jnp.iinfo(numbers).max)
    scale = jnp.max(jnp.abs(groups), axis=-1, keepdims=True) / largest
    scale = jnp.where(scale > 0, scale, 1.0)

    def rounded(scale: jax.Array) -> jax.Array:
        scaled = jnp.clip(groups / scale, -largest, largest)
        return scaled if is_float else jnp.round(scaled)

    def squares(scale: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(rounded(scale) * scale - groups), axis=-1, keepdims=True)

    if numbers == "int4":
        whole, least = scale, squares(scale)
        for share in SHARES_OF_RANGE:
            other = squares(whole * share)
            scale, least = jnp.where(other < least, whole * share, scale), jnp.minimum(other, least)
    made = rounded(scale).reshape(*weights.shape[:-1], -1)[..., :num_in]
    return made.astype(numbers), scale[..., 0]


@dataclass(frozen=True)
class StoredPieces:
    """The pieces of a part of matrices that are stored quantized, in the format of each source of `whole`.

    `parts_of` are each source's tensors by `tensor_names`, () of one that is not quantized.

    `whole` arranges the rows of a matrix. It is asked to arrange their indices, and the rows are computed by these.
    """

    whole: Recipe
    formats: tuple[WeightFormat | None, ...]
    parts_of: tuple[tuple[str, ...], ...]
    part: str

    def __call__(self, arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
        """The pieces, which compute rows when they are read."""
        matrices: list[StoredMatrix | PlainMatrix] = []
        indices: list[npt.NDArray[np.intp]] = []
        first, left = 0, iter(tensors)
        for source, fmt, parts in zip(self.whole.sources, self.formats, self.parts_of, strict=True):
            if fmt is None:
                matrices.append(PlainMatrix(next(left)))
                indices.append(np.arange(first, first + matrices[-1].shape[0])[:, None])
                first += matrices[-1].shape[0]
                continue
            *stack, num_rows, num_columns = axes_lengths(source, arch)
            named = dict(zip(parts, left, strict=False))
            found = [named] if not stack else _of_each_matrix(named, stack[0], source, fmt)
            shape = (num_columns, num_rows) if source.is_transposed else (num_rows, num_columns)
            matrices += [StoredMatrix(fmt, each, shape, source.name) for each in found]
            of_source = np.arange(first, first + len(found) * shape[0]).reshape(*stack, shape[0], 1)
            indices.append(of_source.swapaxes(-1, -2) if source.is_transposed else of_source)
            first += of_source.size
        if self.part == "order":
            yield Piece((), _common_order([each for each in matrices if isinstance(each, StoredMatrix)], self.whole))
            return
        ends = np.cumsum([matrix.shape[0] for matrix in matrices])
        for place, rows in self.whole.pieces(arch, tuple(indices)):
            assert isinstance(rows, np.ndarray)
            for each_place, each in _by_matrix(place, rows, len(matrices) > len(indices)):
                which = int(np.searchsorted(ends, each.flat[0], side="right"))
                of_matrix = each[..., 0] - (ends[which] - matrices[which].shape[0])
                yield Piece(each_place, self._rows(matrices[which], of_matrix))

    def _rows(self, matrix: StoredMatrix | PlainMatrix, rows: npt.NDArray[np.intp]) -> Rows:
        if self.part == WEIGHTS:
            return Rows(rows, matrix.weights, matrix.shape[1], jnp.float32)
        assert isinstance(matrix, StoredMatrix), "what isn't quantized has weights alone"
        if self.part == "numbers":
            return Rows(rows, matrix.numbers, matrix.num_columns, matrix.dtype)
        compute, dtype = (matrix.scale, matrix.scale_dtype) if self.part == "scale" else (matrix.zero, jnp.int8)
        return Rows(rows, compute, matrix.num_groups, dtype)


def _of_each_matrix(named: dict[str, Tensor], count: int, source: Source, fmt: WeightFormat) -> list[dict[str, Tensor]]:
    """The tensors of each matrix of a stack, `[out, ...]`; what is one number all have.

    Raises `CheckpointError` for stacks of other lengths.
    """
    assert fmt.storage is not None
    named = {name: np.broadcast_to(each.reshape(()), count) if each.size == 1 else each for name, each in named.items()}
    different = {name: tensor.shape for name, tensor in named.items() if tensor.shape[:1] != (count,)}
    if different:
        raise CheckpointError(f"{source.name}: {different} must have {count} matrices, one of each expert")
    if not source.is_transposed:
        return [{name: tensor[i, ...] for name, tensor in named.items()} for i in range(count)]
    if fmt.storage.kind == "plain" and fmt.storage.block_rows != (fmt.group or 1):
        raise CheckpointError(
            f"{source.name} is [experts, in, out] in blocks of {fmt.storage.block_rows} by {fmt.group}, but blocks of "
            "such stacks must be square: name each expert's tensors singly"
        )
    return [{name: tensor[i, ...].T for name, tensor in named.items()} for i in range(count)]


def _by_matrix(place: Place, rows: Tensor, has_stacks: bool) -> Iterator[tuple[Place, Tensor]]:
    """A piece cut into those of single matrices, if it may be of a stack, whose axis comes first."""
    if not has_stacks:
        yield place, rows
        return
    for i in range(len(rows)):
        yield (slice(i, i + 1), *place[1:]), rows[i : i + 1]


class Rows:
    """Rows of a matrix, computed as they are read. Implements `recipe.Numbers`.

    Args:
      rows: `[...]`, the indices of the rows.
      compute: returns the rows `[R, C]` of a slice or of indices `[R]`.
      num_columns, dtype: C, and the dtype of a number.
    """

    def __init__(
        self, rows: npt.NDArray[np.intp], compute: Callable[[Any], npt.NDArray[Any]], num_columns: int, dtype: DTypeLike
    ) -> None:
        self._rows, self._compute = rows, compute
        self.shape, self.dtype = (*rows.shape, num_columns), jnp.dtype(dtype)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, box: tuple[slice, ...], /) -> npt.NDArray[Any]:
        """Rows of a part, cut."""
        num_axes = self._rows.ndim
        wanted = self._rows[box[:num_axes]]
        flat = wanted.reshape(-1)
        in_order = len(flat) > 0 and bool((np.diff(flat) == 1).all())
        values = self._compute(slice(int(flat[0]), int(flat[-1]) + 1) if in_order else flat)
        shaped = values.reshape(*wanted.shape, -1)
        return shaped[..., box[num_axes]] if len(box) > num_axes else shaped


def _common_order(matrices: list[StoredMatrix], whole: Recipe) -> npt.NDArray[np.int32]:
    """The order of columns that all matrices of a parameter have. Raises `CheckpointError` if they have several."""
    first, *others = (matrix.order() for matrix in matrices)
    if any((other != first).any() for other in others):
        raise CheckpointError(
            f"{', '.join(source.name for source in whole.sources)} are multiplied at once, but their g_idx differ: "
            "quantize them with one order of inputs, or without desc_act"
        )
    return first
