"""Converted checkpoints: fused, sharded parameters in Orbax's format, as `jaxsgl convert` writes them.

Such a folder has the model's config.json, tokenizer and chat template, Orbax's files in `params/`, the scales of a
float8 KV cache as they were, and a manifest. The manifest tells the folder from one in Hugging Face's layout, and holds
the version of the layout of fused parameters and what parameters there are. Parameters are stored by the names that the
model gives them, and read again onto any mesh: each device reads its own part.

Owns the folder's layout. Never knows the names of Hugging Face's tensors. `load_params` calls it for folders that
`is_converted` says are its own. Orbax is imported when it is needed: that takes a while.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save

from jaxsgl.errors import CheckpointError
from jaxsgl.models import ModelArch, Params, abstract_model
from jaxsgl.models.matrix import part_name, without_zeros
from jaxsgl.models.pooling import module_folders
from jaxsgl.models.quantization import AT_LOAD, WeightFormat
from jaxsgl.models.tensor_parallel import TENSOR_AXIS
from jaxsgl.weights.assembly import size
from jaxsgl.weights.gguf_tensors import open_tensors
from jaxsgl.weights.names import with_heads_at
from jaxsgl.weights.quantized import Packed
from jaxsgl.weights.sharding import check_divisible, param_sharding
from jaxsgl.weights.tensor_files import kv_scale_of

# The version of how parameters are named, fused and ordered. Raise it with every change in `families`, `pieces.py` or
# `models/` that gives a parameter another meaning; `tests/weights/test_converted.py` notices most of them.
LAYOUT_VERSION = 1
MANIFEST = "jaxsgl_checkpoint.json"
PARAMS = "params"
KV_SCALES = "kv_scales.safetensors"  # for `load_kv_scales`, as for any other folder
COPIED = ("*.json", "*.jinja", "*.txt", "*.model")  # configuration, tokenizer, chat template
AT_A_TIME_BYTES = 128 << 20  # of parameters that Orbax restores side by side, unless one alone is larger
CHUNK_BYTES = 64 << 20  # stored in one piece; a device reads all of each piece that it needs a part of
CONVERT_AGAIN = "convert the original checkpoint again with jaxsgl convert"

logger = logging.getLogger(__name__)


def is_converted(folder: Path) -> bool:
    """Whether `folder` holds a converted checkpoint."""
    return (folder / MANIFEST).is_file()


def check_finished(folder: Path) -> None:
    """Raises `CheckpointError` for a folder that a conversion was begun in, and not finished."""
    if not is_converted(folder) and [path.name for path in folder.glob("*.safetensors")] == [KV_SCALES]:
        raise CheckpointError(
            f"{folder} is a conversion that was not finished, as it has no {MANIFEST}: remove it, and {CONVERT_AGAIN}"
        )


def make_output(folder: Path) -> None:
    """Makes `folder`, for a converted checkpoint. Raises `CheckpointError` if it has files or can't be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder} can't be made: {error.strerror}; name another folder") from None
    if not is_empty:
        raise CheckpointError(f"{folder} is not empty: name a new folder for the converted checkpoint")


def params_of(folder: Path) -> Callable[[Iterable[Hashable]], bool]:
    """Whether the converted `folder` holds the parameter at a path, as a question; its manifest is read once."""
    names = read_manifest(folder)["params"].keys()
    return lambda path: _name(tuple(path)) in names


def save_converted(source: Path, folder: Path, params: Params) -> None:
    """Writes `params`, and what else a server reads of the folder `source`, to the new or empty folder `folder`.

    Each shard of a parameter is stored by itself. The manifest comes last, so a folder that isn't finished is not taken
    for a converted one. Raises as `make_output`, and `CheckpointError` if it can't be written.
    """
    make_output(folder)
    try:
        _write(source, folder, params)
    except (OSError, ValueError) as error:  # of Orbax, with the specification of its store behind the reason
        reason = str(error).partition("\n")[0].partition(" [")[0]
        raise CheckpointError(
            f"{folder} can't be written: {reason}; remove it, and {CONVERT_AGAIN}, to where there is room"
        ) from error


def _write(source: Path, folder: Path, params: Params) -> None:
    for pattern in COPIED:
        for path in source.glob(pattern):
            if not path.name.endswith(".safetensors.index.json"):
                shutil.copyfile(path, folder / path.name)
    for module in module_folders(source):
        (folder / module.name).mkdir()
        for path in module.glob("*.json"):
            shutil.copyfile(path, folder / module.name / path.name)
    tensors = open_tensors(source)
    scales = {name: tensors.scale(name) for name in tensors.names() if kv_scale_of(name) is not None}
    (folder / KV_SCALES).write_bytes(save(scales))
    arrays = {_name(path): param[...] for path, param in nnx.to_flat_state(params)}

    import orbax.checkpoint as ocp

    save_args = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in arrays}
    handler = ocp.PyTreeCheckpointHandler(
        use_compression=False, save_device_host_concurrent_gb=_concurrent_gb(arrays.values())
    )
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save((folder / PARAMS).absolute(), args=ocp.args.PyTreeSave(arrays, save_args=save_args))
    described = {name: {"shape": list(array.shape), "dtype": array.dtype.name} for name, array in arrays.items()}
    manifest = {"layout_version": LAYOUT_VERSION, "params": described}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def restore_params(folder: Path, arch: ModelArch, dtype: jnp.dtype, mesh: Mesh) -> Params:
    """The parameters of the converted `folder` in `dtype`, sharded over `mesh`; a tree like `abstract_model`'s.

    Raises `CheckpointError` for another version of the layout, other parameters than `arch` asks for, broken files, and
    weights that are to be quantized at load.
    """
    check_divisible(arch, mesh)
    stored = read_manifest(folder)["params"]
    if arch.weight_format is not None and arch.weight_format.method == AT_LOAD:
        raise CheckpointError(
            f"{folder} is a converted checkpoint, and --quantization works on checkpoints in safetensors files only: "
            "leave it out, or give the folder that was converted"
        )
    kept = dict(nnx.to_flat_state(abstract_model(arch, dtype)[1]))
    if arch.weight_format is not None:
        arch = replace(arch, weight_format=arch.weight_format.without_packing)
    flat = dict(nnx.to_flat_state(abstract_model(arch, dtype)[1]))
    as_stored = dict(nnx.to_flat_state(abstract_model(arch.on_devices(1, by_experts=arch.by_experts), dtype)[1]))
    abstract = {_name(path): _place(as_stored[path], param, mesh) for path, param in flat.items()}
    formats = _without_their_zeros(flat)
    for name in formats:
        scale = abstract[part_name(name, "scale")]
        abstract[part_name(name, "zero")] = jax.ShapeDtypeStruct(scale.shape, jnp.int8, sharding=scale.sharding)
    _check_params(folder, {name: array.shape for name, array in abstract.items()}, stored, arch)
    start_s = time.monotonic()
    arrays = _restore(folder / PARAMS, abstract)
    for name, fmt in formats.items():
        zero = arrays.pop(part_name(name, "zero"))
        arrays[name] = _subtract(arrays[name], zero, fmt.group_of(arrays[name].shape[-1]), abstract[name].sharding)
    seconds, num_bytes = time.monotonic() - start_s, sum(array.nbytes for array in arrays.values())
    logger.info("weights: %s restored in %.1f s, %.2f GB/s", size(num_bytes), seconds, num_bytes / 1e9 / seconds)
    params = []
    for path, param in flat.items():
        array = arrays.pop(_name(path))
        if array.shape != param.shape:
            axes, sharding = param.get_metadata("axes"), param_sharding(param, mesh)
            if axes[0] == "vocab":
                array = _pad_rows(array, param.shape[0], sharding)
            else:
                array = _copy_kv_heads(array, with_heads_at(path, arch), axes.index("kv_heads"), sharding)
        params.append((path, kept[path].replace(_packed(array, kept[path], arch, mesh))))
    return nnx.from_flat_state(params)


def _packed(array: jax.Array, param: nnx.Param[Any], arch: ModelArch, mesh: Mesh) -> jax.Array:
    """A stored parameter as it is kept: packed, if it is a part of a matrix that is."""
    metadata = param.get_metadata()
    part, fmt = metadata.get("part", "order"), metadata.get("format")
    if fmt is None or not fmt.packing or part == "order":
        return array
    return _pack(array, Packed(part, fmt.packing), arch, param_sharding(param, mesh))


@partial(jax.jit, static_argnames=("pack", "arch", "sharding"))
def _pack(array: jax.Array, pack: Packed, arch: ModelArch, sharding: NamedSharding) -> jax.Array:
    placed: jax.Array = jax.lax.with_sharding_constraint(pack(arch, array), sharding)
    return placed


def _place(stored: nnx.Param[Any], param: nnx.Param[Any], mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Where a stored parameter is read to: its place; parts along the last axis if heads are copied or rows padded."""
    sharding = param_sharding(param, mesh)
    if stored.shape != param.shape:
        axis = TENSOR_AXIS if stored.shape[-1] % mesh.size == 0 else None
        sharding = NamedSharding(mesh, PartitionSpec(*(None for _ in stored.shape[1:]), axis))
    return jax.ShapeDtypeStruct(stored.shape, param.dtype, sharding=sharding)


@partial(jax.jit, static_argnames=("num_rows", "sharding"))
def _pad_rows(stored: jax.Array, num_rows: int, sharding: NamedSharding) -> jax.Array:
    """`[num_rows, ..]`: the stored rows, then zeros."""
    padding = ((0, num_rows - stored.shape[0]), *((0, 0) for _ in stored.shape[1:]))
    placed: jax.Array = jax.lax.with_sharding_constraint(jnp.pad(stored, padding), sharding)
    return placed


@partial(jax.jit, static_argnames=("arch", "axis", "sharding"))
def _copy_kv_heads(stored: jax.Array, arch: ModelArch, axis: int, sharding: NamedSharding) -> jax.Array:
    """`[.., K, rows, ..]` for our K of the stored K, which is `axis`.

    Rows are a kv head's G query heads, then its key and its value; or scales of norms, G of queries or one of keys.
    """
    groups, copies = arch.num_heads // arch.stored_kv_heads, arch.kv_copies
    heads = jnp.moveaxis(stored, axis, 0)
    rows = jnp.moveaxis(heads, axis + 1, 1)  # [K, rows, ..]
    num_queries = groups if rows.shape[1] > 1 else 0
    queries, others = rows[:, :num_queries], rows[:, num_queries:]
    shared = queries.reshape(arch.num_kv_heads, num_queries // copies, *rows.shape[2:])
    made = jnp.concatenate([shared, jnp.repeat(others, copies, axis=0)], axis=1)
    placed: jax.Array = jax.lax.with_sharding_constraint(
        jnp.moveaxis(jnp.moveaxis(made, 1, axis + 1), 0, axis), sharding
    )
    return placed


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest. Raises `CheckpointError` for another version of the layout."""
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["layout_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} can't be read as a manifest: {error!r}; {CONVERT_AGAIN}") from error
    if version != LAYOUT_VERSION:
        raise CheckpointError(
            f"{path}: the parameters have layout version {version}, but this version of jaxsgl reads {LAYOUT_VERSION}: "
            f"{CONVERT_AGAIN}"
        )
    return manifest


def _check_params(
    folder: Path, wanted: Mapping[str, tuple[int, ...]], stored: Mapping[str, Any], arch: ModelArch
) -> None:
    different = [
        name for name in sorted({*wanted, *stored})
        if name not in wanted or name not in stored or tuple(stored[name]["shape"]) != wanted[name]
    ]  # fmt: skip
    if different:
        raise CheckpointError(
            f"{folder}: {len(different)} parameters are not those that config.json asks for, {different[0]} among "
            f"them: {arch.name} wants shape {wanted.get(different[0])}, the folder has "
            f"{(stored.get(different[0]) or {}).get('shape')}; {CONVERT_AGAIN}"
        )


def _without_their_zeros(flat: Mapping[Any, Any]) -> dict[str, WeightFormat]:
    """The formats, by name, of matrices that were converted with zero points and are kept without (on a CPU)."""
    numbers = {_name(path): param for path, param in flat.items() if param.get_metadata().get("part") == "numbers"}
    formats: dict[str, WeightFormat] = {name: param.get_metadata("format") for name, param in numbers.items()}
    return {
        name: fmt
        for name, fmt in formats.items()
        if fmt.storage is not None and fmt.storage.has_zeros and not fmt.has_zeros
    }


@partial(jax.jit, static_argnames=("group", "sharding"), donate_argnames="numbers")
def _subtract(numbers: jax.Array, zero: jax.Array, group: int, sharding: NamedSharding) -> jax.Array:
    made: jax.Array = jax.lax.with_sharding_constraint(without_zeros(numbers, zero, group), sharding)
    return made


def restore_groups(num_bytes: Mapping[str, int], most: int = AT_A_TIME_BYTES) -> list[list[str]]:
    """The names in groups of up to `most` bytes, or of one that has more; the largest come first.

    What is restored at a time is in memory twice. For the largest that is while there is little else.
    """
    groups: list[list[str]] = []
    left = 0
    for name in sorted(num_bytes, key=lambda name: (-num_bytes[name], name)):
        if num_bytes[name] > left:
            groups.append([])
            left = most
        groups[-1].append(name)
        left -= num_bytes[name]
    return groups


def _restore(folder: Path, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    import orbax.checkpoint as ocp

    arrays: dict[str, jax.Array] = {}
    try:
        for names in restore_groups({name: _num_bytes(array) for name, array in abstract.items()}):
            group = {name: abstract[name] for name in names}
            restore_args = ocp.checkpoint_utils.construct_restore_args(group)
            handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=_concurrent_gb(group.values()))
            with ocp.Checkpointer(handler) as checkpointer:
                args = ocp.args.PyTreeRestore(group, restore_args=restore_args, partial_restore=True)
                arrays |= jax.block_until_ready(checkpointer.restore(folder.absolute(), args=args))
        return arrays
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} can't be restored ({str(error).splitlines()[0]}); {CONVERT_AGAIN}") from error


def _concurrent_gb(arrays: Iterable[jax.Array | jax.ShapeDtypeStruct]) -> int:
    """What Orbax may hold besides the parameters: as little as it accepts, twice the largest one and a byte."""
    largest = max(map(_num_bytes, arrays))
    return math.ceil((2 * largest + 1) / 1e9)


def _num_bytes(array: jax.Array | jax.ShapeDtypeStruct) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _name(path: tuple[Hashable, ...]) -> str:
    return ".".join(map(str, path))
