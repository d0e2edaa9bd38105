"""Finds a model's folder and makes its sharded parameters, read from safetensors files or drawn at random.

Files are mapped; each tensor is read once, moved to the devices as it is stored, and fused and cast there. Peak memory
is the parameters plus the tensors of one of them. Knows no tensor names: `names.py` says what each parameter is made
of. The engine calls it at start-up.
"""

from __future__ import annotations

import json
import re
import zlib
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open

from jaxsgl.errors import CheckpointError
from jaxsgl.models import ModelArch, Params, abstract_model
from jaxsgl.weights.names import Fuse, Recipe, Source, is_harmless, sizes
from jaxsgl.weights.quantized import recipe_of
from jaxsgl.weights.sharding import check_divisible, param_sharding

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = ("F32", "BF16", "F16")

# Configuration, weights, tokenizer, chat template; no other weight formats, no code.
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
HUB_ID = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*")


def resolve_model_folder(name_or_path: str, revision: str | None = None) -> Path:
    """The local folder of that name, else the hub's snapshot of that id, downloaded or from the hub's cache.

    `revision` is a branch, tag or commit of a hub id (None: its main branch). Raises `CheckpointError`, which says why
    neither was found.
    """
    folder = Path(name_or_path).expanduser()
    if name_or_path and folder.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"--revision is {revision}, but {name_or_path} is a local folder: leave it out, or name a hub id"
            )
        return folder
    tried = f"model {name_or_path}: {folder.absolute()} is not a folder"
    if HUB_ID.fullmatch(name_or_path) is None:
        raise CheckpointError(f"{tried}, and it is not a hub id (owner/name) either")

    from huggingface_hub import snapshot_download  # seconds to import, and a local folder doesn't need it
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(name_or_path, revision=revision, allow_patterns=list(HUB_FILES)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        what = name_or_path if revision is None else f"{name_or_path} at revision {revision}"
        raise CheckpointError(f"{tried}, and fetching hub id {what} failed: {reason}") from error


def load_params(folder: Path, arch: ModelArch, dtype: jnp.dtype, mesh: Mesh) -> Params:
    """The parameters of `folder` in `dtype`, sharded over `mesh`; a tree like `abstract_model`'s.

    Raises `CheckpointError` for files or tensors that are missing, truncated, or of another shape than `arch` asks for.
    """
    check_divisible(arch, mesh)
    _, abstract = abstract_model(arch, dtype)
    params = []
    with ExitStack() as open_files:
        tensors = TensorFiles(folder, open_files)
        for path, param in nnx.to_flat_state(abstract):
            recipe = recipe_of(path, param, arch)
            pieces = tuple(tensors.read(source, arch) for source in recipe.sources)
            params.append((path, param.replace(_place(pieces, recipe, arch, param.dtype, param_sharding(param, mesh)))))
        tensors.refuse_unread(arch)
    return nnx.from_flat_state(params)


class TensorFiles:
    """The tensors of a folder's safetensors files by name; reads one at a time and remembers which were read."""

    def __init__(self, folder: Path, open_files: ExitStack) -> None:
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        self._opened: dict[Path, Any] = {}
        for path in _listed_files(folder):
            try:
                self._opened[path] = open_files.enter_context(safe_open(path, framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{path} is truncated or not a safetensors file ({error}); fetch it again"
                ) from error
            self._file_of.update(dict.fromkeys(self._opened[path].keys(), path))
        self._unread = set(self._file_of)

    def read(self, source: Source, arch: ModelArch) -> npt.NDArray[Any]:
        """The tensor of `source` as it is stored. Raises `CheckpointError` if it is missing or misshapen."""
        if source.name not in self._file_of:
            raise CheckpointError(f"{self.folder}: tensor {source.name} is missing, but {arch.name} needs it")
        path = self._file_of[source.name]
        stored = self._opened[path].get_slice(source.name)
        shape, expected = tuple(stored.get_shape()), tuple(sizes(arch)[axis] for axis in source.axes)
        if shape != expected:
            raise CheckpointError(
                f"{path}: tensor {source.name} has shape {shape}, but config.json asks for {expected}"
            )
        if stored.get_dtype() not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{path}: tensor {source.name} is {stored.get_dtype()}; supported are {', '.join(FLOAT_DTYPES)}"
            )
        self._unread.discard(source.name)
        tensor: npt.NDArray[Any] = self._opened[path].get_tensor(source.name)
        return tensor

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._file_of)

    def scale(self, name: str) -> npt.NDArray[np.float32]:
        """A small tensor of any float dtype and shape, in float32."""
        tensor: npt.NDArray[Any] = self._opened[self._file_of[name]].get_tensor(name)
        return tensor.astype(np.float32)

    def refuse_unread(self, arch: ModelArch) -> None:
        """Raises `CheckpointError` for tensors that no parameter was made of, except harmless ones."""
        unread = sorted(name for name in self._unread if not is_harmless(name, arch))
        if unread:
            more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
            raise CheckpointError(
                f"{self.folder}: tensors that are not part of {arch.name} as config.json describes it: "
                f"{', '.join(unread[:3])}{more}; remove them from the files if the model does without"
            )


def _listed_files(folder: Path) -> list[Path]:
    """The single file, else the files of the index, else every safetensors file of the folder."""
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise CheckpointError(f"{folder} has no *.safetensors files; other weight formats are not supported")
        return found
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} can't be read as an index of safetensors files: {error!r}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(names)} weight files are missing: {', '.join(missing)}"
        )
    return [folder / name for name in names]


def _place(
    pieces: tuple[npt.NDArray[np.generic], ...],
    recipe: Recipe,
    arch: ModelArch,
    dtype: jnp.dtype,
    sharding: NamedSharding,
) -> jax.Array:
    """Moves the stored tensors to the devices and makes the parameter there."""
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    placed: jax.Array = _fuse(jax.device_put(pieces, everywhere), arch, recipe.fuse, dtype, sharding)
    return placed


@partial(jax.jit, static_argnames=("arch", "fuse", "dtype", "sharding"))
def _fuse(
    pieces: tuple[jax.Array, ...], arch: ModelArch, fuse: Fuse, dtype: jnp.dtype, sharding: NamedSharding
) -> jax.Array:
    """Makes a parameter; one program per kind of parameter, the same for all layers."""
    fused: jax.Array = jax.lax.with_sharding_constraint(fuse(arch, pieces).astype(dtype), sharding)
    return fused


def random_params(arch: ModelArch, dtype: jnp.dtype, mesh: Mesh, seed: int) -> Params:
    """Random parameters, for tests and benchmarks of speed: a tree like `abstract_model`'s, made on the devices.

    They keep activations and logits near unit scale. The same seed gives the same values on every mesh (JAX's default
    generator is elementwise, so it can be sharded).
    """
    check_divisible(arch, mesh)
    _, abstract = abstract_model(arch, dtype)
    root = jax.random.key(seed)
    params = []
    for path, param in nnx.to_flat_state(abstract):
        key = jax.random.fold_in(root, zlib.crc32(repr(path).encode()))
        mean, std = param.get_metadata("mean"), param.get_metadata("std")
        value = _draw(key, param.shape, param.dtype, mean, std, param_sharding(param, mesh))
        params.append((path, param.replace(value)))
    return nnx.from_flat_state(params)


@partial(jax.jit, static_argnames=("shape", "dtype", "mean", "std", "sharding"))
def _draw(
    key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype, mean: float, std: float, sharding: NamedSharding
) -> jax.Array:
    """Draws uniform values of the given mean and standard deviation; one program per kind of parameter."""
    half_width = std * 3**0.5
    values = jax.random.uniform(key, shape, jnp.float32, mean - half_width, mean + half_width)
    placed: jax.Array = jax.lax.with_sharding_constraint(values.astype(dtype), sharding)
    return placed
