"""Finds a model's folder, and makes its sharded parameters: read from files or drawn at random.

Parameters are made one after another, a few small ones at a time: the host never holds more than `IN_FLIGHT_BYTES` or
one parameter besides what the devices hold, on a CPU nothing besides the parameters. Knows no tensor names
(`names.py`), no file formats (`tensor_files.py`) and no threads (`assembly.py`). The engine calls it at start-up:
`resolve_model_folder` first.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import deque
from collections.abc import Hashable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxsgl.errors import CheckpointError
from jaxsgl.models import ModelArch, Params, abstract_model
from jaxsgl.models.heads import abstract_next_layer
from jaxsgl.weights.assembly import Assembler, Progress, Unfinished
from jaxsgl.weights.converted import check_finished, is_converted, restore_params
from jaxsgl.weights.experts import with_padded_units
from jaxsgl.weights.gguf_folder import folder_of_gguf, gguf_of
from jaxsgl.weights.gguf_tensors import GgufTensors, open_tensors
from jaxsgl.weights.names import path_in_model, with_heads_at
from jaxsgl.weights.quantized import recipe_of
from jaxsgl.weights.recipe import Computed, Piece, Tensor, shape_of
from jaxsgl.weights.sharding import check_divisible, param_sharding
from jaxsgl.weights.tensor_files import GivenTensors, TensorFiles

IN_FLIGHT_BYTES = 512 << 20  # of parameters that are read at the same time, unless one alone is larger

AnyTensors: TypeAlias = TensorFiles | GgufTensors | GivenTensors


class _Made(NamedTuple):
    """A parameter, and what it is made of; shape and dtype are those of what is read, before anything is computed."""

    path: tuple[Hashable, ...]
    param: nnx.Param[jax.Array]  # abstract
    tensors: tuple[Tensor, ...]
    pieces: tuple[Piece, ...]
    computed: Computed | None
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def load_params(source: Path | Mapping[str, Any], arch: ModelArch, dtype: jnp.dtype, mesh: Mesh) -> Params:
    """The parameters of `source` in `dtype`, sharded over `mesh`; a tree like `abstract_model`'s.

    `source` is a folder, or the tensors themselves by the names of a checkpoint, which are copied. Finds every tensor
    before it reads the first one; a converted checkpoint is restored by `converted.py`. Raises `CheckpointError` for
    files or tensors that are missing, truncated, of another shape than `arch` asks for, or not part of it.
    """
    if isinstance(source, Path) and is_converted(source):
        return restore_params(source, arch, dtype, mesh)
    check_divisible(arch, mesh)
    tensors = open_tensors(source) if isinstance(source, Path) else GivenTensors(source)
    _, abstract = abstract_model(arch, dtype)
    plan = _find_all(abstract, tensors, arch)
    tensors.refuse_unread(arch)
    return _filled(plan, tensors, arch, mesh)


def load_next_layer(folder: Path, arch: ModelArch, dtype: jnp.dtype, mesh: Mesh) -> Params:
    """The parameters of the layer of `arch`, a `next_arch`, in `folder`; a tree like `abstract_next_layer`'s.

    Its copies of the model's embedding and head are left unread. Errors as of `load_params`.
    """
    tensors = TensorFiles(folder)
    _, abstract = abstract_next_layer(arch, dtype, dtype)
    return _filled(_find_all(abstract, tensors, arch), tensors, arch, mesh)


def _find_all(abstract: Params, tensors: AnyTensors, arch: ModelArch) -> list[_Made]:
    return [_find(path, param, tensors, arch) for path, param in nnx.to_flat_state(abstract)]


def _filled(plan: list[_Made], tensors: AnyTensors, arch: ModelArch, mesh: Mesh) -> Params:
    """Reads what was found."""
    progress = Progress(sum(piece.numbers.nbytes for made in plan for piece in made.pieces))
    params: list[Any] = []
    in_flight: deque[tuple[_Made, Unfinished]] = deque()

    def finish_first() -> None:
        made, unfinished = in_flight.popleft()
        array = unfinished.finish()
        for tensor in made.tensors:
            tensors.release(tensor)
        if made.computed is not None:
            array = _compute(array, arch, made.computed, made.param.dtype, param_sharding(made.param, mesh))
        params.append((made.path, made.param.replace(array)))

    with Assembler(progress, tensors.release) as assembler:
        for made in plan:
            num_bytes = math.prod(made.shape) * made.dtype.itemsize
            while in_flight and num_bytes + sum(each.num_bytes for _, each in in_flight) > IN_FLIGHT_BYTES:
                finish_first()
            sharding = param_sharding(made.param, mesh)
            in_flight.append((made, assembler.start(made.pieces, made.shape, made.dtype, sharding)))
        while in_flight:
            finish_first()
    progress.finish()
    return nnx.from_flat_state(params)


def _find(
    path: tuple[Hashable, ...],
    param: nnx.Param[jax.Array],
    tensors: AnyTensors,
    arch: ModelArch,
) -> _Made:
    """Says what the (abstract) parameter at `path` is made of; reads nothing."""
    recipe = recipe_of(path, param, arch, tensors.shape)
    found = tuple(tensors.tensor(source, arch) for source in recipe.sources)
    pieces = tuple(tensors.pieces(recipe, with_heads_at(path, arch), found))
    if arch.vocab_padding and param.get_metadata("axes")[0] == "vocab":
        pieces = _with_vocab_padding(pieces, arch)
    pieces = with_padded_units(path, pieces, arch)
    shape = shape_of(pieces)
    if recipe.computed is not None:
        return _Made(path, param, found, pieces, recipe.computed, shape, pieces[0].numbers.dtype)
    assert shape == param.shape, f"parameter {path} is filled with shape {shape}, but has {param.shape}"
    return _Made(path, param, found, pieces, None, shape, param.dtype)


def _with_vocab_padding(pieces: tuple[Piece, ...], arch: ModelArch) -> tuple[Piece, ...]:
    """The piece that is all rows of the vocabulary, and rows of zeros after it."""
    ((_, numbers),) = pieces
    zeros = np.broadcast_to(np.zeros((), numbers.dtype), (arch.vocab_padding, *numbers.shape[1:]))
    return Piece((slice(arch.vocab_size),), numbers), Piece((slice(arch.vocab_size, arch.vocab_rows),), zeros)


@partial(jax.jit, static_argnames=("arch", "computed", "dtype", "sharding"))
def _compute(
    stored: jax.Array, arch: ModelArch, computed: Computed, dtype: jnp.dtype, sharding: NamedSharding
) -> jax.Array:
    """Makes a parameter of what was read; one program per kind of parameter, the same for all layers."""
    made: jax.Array = jax.lax.with_sharding_constraint(computed(arch, stored).astype(dtype), sharding)
    return made


def random_params(arch: ModelArch, dtype: jnp.dtype, mesh: Mesh, seed: int) -> Params:
    """Random parameters, for tests and benchmarks of speed: a tree like `abstract_model`'s, made on the devices.

    They keep activations and logits near unit scale. The same seed gives the same values on every mesh (JAX's default
    generator is elementwise, so it can be sharded), unless it has more devices than kv heads: copies of these differ.
    """
    check_divisible(arch, mesh)
    return _drawn(abstract_model(arch, dtype)[1], arch, mesh, seed)


def random_next_layer(arch: ModelArch, dtype: jnp.dtype, mesh: Mesh, seed: int) -> Params:
    """Likewise of the layer of a `next_arch`."""
    return _drawn(abstract_next_layer(arch, dtype, dtype)[1], arch, mesh, seed)


def _drawn(abstract: Params, arch: ModelArch, mesh: Mesh, seed: int) -> Params:
    root = jax.random.key(seed)
    params = []
    for path, param in nnx.to_flat_state(abstract):
        key = jax.random.fold_in(root, zlib.crc32(repr(path_in_model(path, arch)).encode()))
        mean, std = param.get_metadata("mean"), param.get_metadata("std")
        value = _draw(key, param.shape, param.dtype, mean, std, param_sharding(param, mesh))
        params.append((path, param.replace(value)))
    return nnx.from_flat_state(params)


@partial(jax.jit, static_argnames=("shape", "dtype", "mean", "std", "sharding"))
def _draw(
    key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype, mean: float, std: float, sharding: NamedSharding
) -> jax.Array:
    """Draws uniform values of the given mean and deviation; words without a mean, packed numbers, have any bits.

    One program per kind of parameter.
    """
    half_width = std * 3**0.5
    if dtype == jnp.uint32 and not mean:
        values = jax.random.bits(key, shape, jnp.uint32)
    else:
        values = jax.random.uniform(key, shape, jnp.float32, mean - half_width, mean + half_width)
    placed: jax.Array = jax.lax.with_sharding_constraint(values.astype(dtype), sharding)
    return placed


# Configuration, weights, tokenizer, chat template; no other weight formats, no code.
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
# The same weights once more, in other layouts.
NOT_FROM_HUB = ("original/*", "metal/*", "consolidated*")
HUB_ID = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*")


def resolve_model_folder(name_or_path: str, revision: str | None = None) -> Path:
    """The local folder of that name, else the hub's snapshot of that id, downloaded or from the hub's cache.

    Of a GGUF file, or a folder with one and no other weights, it is a folder that is made of the file.

    `revision` is a branch, tag or commit of a hub id (None: its main branch). With `HF_HUB_OFFLINE` set, only the cache
    is looked into. Raises `CheckpointError`, which says why neither was found.
    """
    folder = Path(name_or_path).expanduser()
    if name_or_path and folder.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"--revision is {revision}, but {name_or_path} is a local folder: leave it out, or name a hub id"
            )
        check_finished(folder)
        gguf = gguf_of(folder)
        return folder if gguf is None else folder_of_gguf(gguf, beside=folder)
    if folder.suffix == ".gguf" and folder.is_file():
        return folder_of_gguf(folder)
    if folder.is_file():
        raise CheckpointError(
            f"{name_or_path} is a file: name a GGUF file, a folder with a checkpoint in safetensors, or a hub id"
        )
    tried = f"model {name_or_path}: {folder.absolute()} is not a folder"
    if HUB_ID.fullmatch(name_or_path) is None:
        what = "there is no such file" if folder.suffix == ".gguf" else "and it is not a hub id (owner/name) either"
        raise CheckpointError(f"{tried}, {what}: check the path")

    from huggingface_hub import snapshot_download  # seconds to import, and a local folder doesn't need it
    from huggingface_hub.errors import HfHubHTTPError

    try:
        allowed, ignored = list(HUB_FILES), list(NOT_FROM_HUB)
        return Path(snapshot_download(name_or_path, revision=revision, allow_patterns=allowed, ignore_patterns=ignored))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        what = name_or_path if revision is None else f"{name_or_path} at revision {revision}"
        raise CheckpointError(f"{tried}, and fetching hub id {what} failed: {reason}") from error
