"""`EngineWeightStore`: the parameters that an engine serves, which may be exchanged or released, and its KV pool.

    stage    reads and checks: a checkpoint into the host's memory (where the device is another one), a tree into copies
    swap     puts the staged leaves where the old ones were, one after the other

Programs take the parameters as a list of leaves of fixed shapes, dtypes and places, so a swap compiles nothing. Owns
that list and the version of the weights. Never knows steps or requests: the scheduler's loop has none in flight when it
calls anything but `stage_weights`. Implements `scheduler.orders.weights.WeightStore`; made by `engine`, called by the
scheduler's loop and by the offline `LLM`.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.start.sizing import choose_context_length
from jaxsgl.engine.start.warmup import CompileCounter
from jaxsgl.engine.weight_formats import as_kept
from jaxsgl.errors import CheckpointError
from jaxsgl.messages.orders import MemoryTag
from jaxsgl.models import ModelArch, Params, arch_from_folder
from jaxsgl.models.arch import serve_as
from jaxsgl.models.quantization import weight_format
from jaxsgl.weights import (
    KvScales,
    as_stored,
    load_kv_scales,
    load_params,
    random_params,
    resolve_model_folder,
)
from jaxsgl.weights.converted import is_converted
from jaxsgl.weights.finite import is_finite
from jaxsgl.weights.sharding import make_mesh, model_on_devices

# What may differ between checkpoints that are served one after the other: the server keeps what it began with.
_FREE_FIELDS = (
    "dtype", "names_dtype", "eos_token_ids", "kv_cache_dtype", "max_context", "folder_pooling", "pooling", "next_layer",
)  # fmt: skip

Tree: TypeAlias = Params | Mapping[Any, Any] | Sequence[Any]

logger = logging.getLogger(__name__)


def arch_of_folder(config: EngineConfig, folder: Path) -> ModelArch:
    """The model of `folder` by its configuration, and by its tensors if they are loaded. Raises `StartupError`."""
    arch = arch_from_folder(folder)
    return arch if config.load_format == "dummy" else as_stored(arch, folder)


def read_arch(config: EngineConfig, folder: Path) -> ModelArch:
    """The model of `folder`, as flags have it served. Raises `StartupError`."""
    arch = serve_as(
        arch_of_folder(config, folder),
        is_embedding=config.is_embedding,
        enable_embeddings=config.enable_embeddings,
        matryoshka=config.matryoshka,
    )
    if config.vision.language_only:
        arch = dataclasses.replace(arch, tower=None)
    if arch.tower is not None and config.disaggregation.disaggregation_mode == "decode":
        arch = dataclasses.replace(arch, tower=dataclasses.replace(arch.tower, has_tower=False))
    arch = arch.for_context(choose_context_length(config, arch))
    arch = model_on_devices(arch, config.tp, by_experts=config.ep, num_ranks=config.num_ranks)
    if is_converted(folder) and (arch.weight_format or arch.expert_format) is not None:
        arch = dataclasses.replace(arch, may_pack=False)
    return dataclasses.replace(arch, weight_format=weight_format(config.quantization, arch.weight_format))


def read_params(
    config: EngineConfig, source: Path | Mapping[str, Any], arch: ModelArch, dtype: jnp.dtype, mesh: Mesh
) -> Params:
    """The parameters of a folder, or of tensors by name; with --load-format dummy random ones in a folder's place.

    Raises `CheckpointError`.
    """
    if config.load_format == "dummy" and isinstance(source, Path):
        return random_params(arch, dtype, mesh, config.made_up_seed)
    return load_params(source, arch, dtype, mesh)


def abstract_params(params: Params) -> Params:
    """Shapes, dtypes and places of `params`, in the place of arrays."""
    abstract: Params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    return abstract


@dataclasses.dataclass
class Staged:
    """Checked leaves in the order of the parameters.

    Attributes:
      folder: where they can be read again; None: nowhere.
      made_up: they were drawn, as --load-format dummy has it, and in the place of the folder's.
    """

    leaves: list[Any]
    folder: Path | None
    made_up: bool = False


class EngineWeightStore:
    """See the module.

    Args:
      config: flags.
      arch, dtype, mesh: of the model that is served.
      kv_scales: of a float8 KV cache, constants of the programs.
      params, folder: the first parameters and where they come from.
      compiles: leaves out what loading compiles.
      set_pool: gives the KV pool's memory back (False) or takes it again (True).

    Attributes:
      leaves: the parameters as programs take them; empty while they are released.
      weight_version, released: see `WeightStore`.
      num_updates: how often other weights took the place of those before.
    """

    def __init__(
        self,
        config: EngineConfig,
        arch: ModelArch,
        dtype: jnp.dtype,
        mesh: Mesh,
        kv_scales: KvScales | None,
        params: Params,
        folder: Path,
        compiles: CompileCounter,
        set_pool: Callable[[bool], None],
    ) -> None:
        self.leaves: list[jax.Array] = jax.tree.leaves(params)
        self.weight_version = config.weight_version
        self.released: frozenset[MemoryTag] = frozenset()
        self._abstract = abstract_params(params)
        self._places: list[jax.ShapeDtypeStruct] = jax.tree.leaves(self._abstract)
        assert all(map(operator.is_, _by_path(self._abstract).values(), self._places)), "paths are in another order"
        self._config, self._arch, self._dtype, self._mesh = config, arch, dtype, mesh
        self._kv_scales = kv_scales
        self._folder: Path | None = folder
        self._made_up = config.load_format == "dummy"
        self._backup: list[Any] | None = None
        self._compiles = compiles
        self._set_pool = set_pool
        self.num_updates = 0

    @property
    def params(self) -> Params:
        """The parameters as a tree, for a trainer to begin with; a tree like this one can be staged."""
        self._check_present()
        params: Params = jax.tree.unflatten(jax.tree.structure(self._abstract), self.leaves)
        return params

    def stage_weights(self, source: str | Path | Tree | None) -> Staged:
        """Reads parameters of the same model, ready for `swap_weights`; may run in a thread while steps run.

        Args:
          source: a model folder, a hub id, a tree like `params` or tensors by the names of a checkpoint, in any float
            dtype, or None for the weights that were released.

        Raises:
          CheckpointError: they can't be read, are those of another model or not finite; nothing has changed.
        """
        with self._compiles.not_counting():
            if source is None:
                return self._restaged()
            if isinstance(source, str | Path):
                staged = self._read(resolve_model_folder(str(source)), made_up=False)
            elif _is_named(source):
                _check_arrays(source)
                staged = Staged(jax.tree.leaves(self._params_of(source, self._config)), None)
            else:
                staged = Staged(self._copied(source), None)
            self._check_finite(staged)
            return staged

    def swap_weights(self, staged: object, version: str | None = None) -> None:
        """Serves what `stage_weights` returned from now on; see `WeightStore`."""
        assert isinstance(staged, Staged)
        self._fill(staged)
        self.num_updates += 1
        self.weight_version = str(self.num_updates) if version is None else version

    def release_memory(self, tag: MemoryTag) -> None:
        """Gives the memory of the weights or of the KV pool back. See --enable-weights-cpu-backup for the weights."""
        if tag in self.released:
            return
        if tag is MemoryTag.WEIGHTS:
            if self._config.enable_weights_cpu_backup:
                self._backup = [np.array(leaf) for leaf in self.leaves]
            self.leaves.clear()
        else:
            self._set_pool(False)
        gc.collect()  # JAX lets go of buffers that NumPy has allocated then, as those of weights on a CPU
        self.released |= {tag}

    def resume_memory(self, tag: MemoryTag, staged: object = None) -> None:
        """Takes the memory of the weights again, filled with `staged`, or that of the KV pool."""
        if tag not in self.released:
            return
        if tag is MemoryTag.WEIGHTS:
            assert isinstance(staged, Staged)
            self._fill(staged)
        else:
            with self._compiles.not_counting():
                self._set_pool(True)
            self.released -= {tag}

    def _fill(self, staged: Staged) -> None:
        """Puts each staged leaf into the place of the old one, whose memory comes free before.

        The weights count as released meanwhile, and so they do if this fails, since they are of neither model then.
        """
        old, new = self.leaves, staged.leaves
        self.released |= {MemoryTag.WEIGHTS}
        for index, place in enumerate(self._places):
            leaf, new[index] = new[index], None
            del old[index : index + 1]  # none is there if the weights were released
            old.insert(index, jax.device_put(leaf, place.sharding))
        jax.block_until_ready(old)
        self._folder, self._made_up, self._backup = staged.folder, staged.made_up, None
        self.released -= {MemoryTag.WEIGHTS}

    def _check_present(self) -> None:
        if MemoryTag.WEIGHTS in self.released:
            raise CheckpointError("the weights are released: resume or update them first")

    def _restaged(self) -> Staged:
        if self._backup is not None:
            return Staged(list(self._backup), self._folder, self._made_up)
        if self._folder is None:
            raise CheckpointError(
                "the weights that were released came from memory, and there is no copy of them: update them, or start "
                "with --enable-weights-cpu-backup"
            )
        return self._read(self._folder, self._made_up)

    def _read(self, folder: Path, made_up: bool) -> Staged:
        """Reads a folder, into host memory if there are weights on another device that must serve on if this fails.

        `made_up`: random weights come in the place of the folder's, as at the start.
        """
        platform = self._mesh.devices.flat[0].platform
        config = self._config if made_up else dataclasses.replace(self._config, load_format="auto")
        arch = read_arch(config, folder)
        served = self._arch.weight_format
        arch = as_kept(
            arch,
            self._dtype,
            platform,
            self._mesh.size,
            weight_only=self._config.weight_only,
            rounds_rows=served is not None and served.groups_of_experts,
        )
        _check_same_model(arch, self._arch, folder)
        if self._kv_scales is not None and not _equal_scales(load_kv_scales(folder, self._arch), self._kv_scales):
            raise CheckpointError(
                f"{folder}: the scales of its KV cache differ from those that the programs were compiled for: start a "
                "server with it"
            )
        params = self._params_of(folder, config)
        self._check_leaves(_by_path(params), str(folder))
        return Staged(jax.tree.leaves(params), folder, made_up)

    def _params_of(self, source: Path | Mapping[str, Any], config: EngineConfig) -> Params:
        mesh = self._mesh if MemoryTag.WEIGHTS in self.released else _staging_mesh(self._mesh)
        params: Params = jax.block_until_ready(read_params(config, source, self._arch, self._dtype, mesh))
        return params

    def _copied(self, tree: Tree) -> list[Any]:
        """Copies of a tree's leaves in our dtypes: the trainer goes on to change or donate its own."""
        given, paths = _by_path(tree), _by_path(self._abstract)
        if not given.keys() & paths.keys():
            raise CheckpointError(
                f"the weights are a {_kind_of(tree)} that holds no parameter of the model: give a folder, a dict of "
                "arrays by the names of a checkpoint (as model.norm.weight), or a tree like llm.params"
            )
        _check_arrays({".".join(path): leaf for path, leaf in given.items()})
        self._check_leaves(given, "the tree", cast=True)
        staged = []
        for path, place in paths.items():
            leaf = given[path]
            if not isinstance(leaf, jax.Array):
                leaf = np.array(leaf, place.dtype)  # a CPU's device may take NumPy's memory as it is
            elif leaf.dtype != place.dtype:
                leaf = leaf.astype(place.dtype)
            staged.append(jax.device_put(leaf, place.sharding, may_alias=False))
        return list(jax.block_until_ready(staged))

    def _check_leaves(self, given: Mapping[tuple[str, ...], Any], what: str, cast: bool = False) -> None:
        """Raises `CheckpointError` unless there is one leaf for each parameter, of its shape and a dtype that fits."""
        wanted = _by_path(self._abstract)
        for name, paths in (("misses", wanted.keys() - given.keys()), ("has", given.keys() - wanted.keys())):
            if paths:
                few = ", ".join(sorted(map(".".join, paths))[:3])
                rest = "" if name == "misses" else ", which the model has not"
                raise CheckpointError(f"{what} {name} {len(paths)} parameters, as {few}{rest}")
        for path, place in wanted.items():
            leaf = given[path]
            if getattr(leaf, "is_deleted", bool)():
                raise CheckpointError(f"{what}: {'.'.join(path)} is deleted; was it donated to a jitted function?")
            if leaf.shape != place.shape:
                raise CheckpointError(f"{what}: {'.'.join(path)} has shape {leaf.shape}, but must have {place.shape}")
            both_float = jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.issubdtype(place.dtype, jnp.floating)
            if leaf.dtype != place.dtype and not (cast and both_float):
                raise CheckpointError(f"{what}: {'.'.join(path)} is {leaf.dtype}, but must be {place.dtype}")

    def _check_finite(self, staged: Staged) -> None:
        """Raises `CheckpointError` unless all numbers are finite: a training that diverged would be served silently."""
        for path, leaf in zip(_by_path(self._abstract), staged.leaves, strict=True):
            if not is_finite(leaf):
                what = staged.folder or "the update"
                raise CheckpointError(f"{what}: {'.'.join(path)} holds NaN or infinity: update with finite weights")


def _staging_mesh(mesh: Mesh) -> Mesh:
    """The host, if the weights are on other devices and JAX has a backend for it; otherwise where the weights are."""
    if mesh.devices.flat[0].platform == "cpu":
        return mesh
    try:
        return make_mesh(jax.devices("cpu")[:1])
    except RuntimeError:
        logger.warning("JAX has no CPU backend here (JAX_PLATFORMS), so new weights are loaded beside the old ones")
        return mesh


def _is_named(tree: Tree) -> TypeGuard[Mapping[str, Any]]:
    """Whether these are tensors by the names of a checkpoint, as model.norm.weight."""
    return isinstance(tree, Mapping) and all(isinstance(name, str) and "." in name for name in tree)


def _check_arrays(given: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` for anything else by a name, as PyTorch's tensors."""
    for name, leaf in given.items():
        if not _is_array(leaf):
            raise CheckpointError(
                f"{name} is a {_kind_of(leaf)}, but must be an array of NumPy or JAX: "
                "jax.dlpack.from_dlpack(tensor.detach().contiguous()) makes one of a PyTorch tensor"
            )


def _is_array(value: Any) -> bool:
    """Whether NumPy can read it: flax's variables, too."""
    try:
        np.dtype(value.dtype)
    except (AttributeError, TypeError):
        return False
    return True


def _kind_of(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _check_same_model(arch: ModelArch, served: ModelArch, folder: Path) -> None:
    for field in dataclasses.fields(ModelArch):
        theirs, ours = getattr(arch, field.name), getattr(served, field.name)
        if theirs != ours and field.name not in _FREE_FIELDS:
            name, theirs, ours = _difference(field.name, theirs, ours)
            raise CheckpointError(
                f"{folder} is another model: its {name} is {theirs!s:.200}, but {ours!s:.200} is served: start a "
                "server with it"
            )


def _difference(name: str, theirs: Any, ours: Any) -> tuple[str, Any, Any]:
    """Where two values that differ do so first, and what stands there: a model has dozens of layers."""
    if isinstance(theirs, tuple) and isinstance(ours, tuple):
        if len(theirs) != len(ours):
            return f"number of {name}", len(theirs), len(ours)
        index = next(index for index, pair in enumerate(zip(theirs, ours, strict=True)) if pair[0] != pair[1])
        return _difference(f"{name}[{index}]", theirs[index], ours[index])
    if dataclasses.is_dataclass(ours) and type(theirs) is type(ours):
        fields = (field.name for field in dataclasses.fields(ours))
        part = next(field for field in fields if getattr(theirs, field) != getattr(ours, field))
        return _difference(f"{name}.{part}", getattr(theirs, part), getattr(ours, part))
    return name, theirs, ours


def _equal_scales(a: KvScales, b: KvScales) -> bool:
    def equal(x: Any, y: Any) -> bool:
        return bool(np.array_equal(1 if x is None else x, 1 if y is None else y))

    return all(map(equal, a.k, b.k)) and all(map(equal, a.v, b.v))


def _by_path(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """The arrays of nested mappings, sequences and NNX states, by path, in the order of `jax.tree.leaves`."""
    if isinstance(tree, nnx.Variable):
        return {path: jax.tree.leaves(tree)[0]}
    if isinstance(tree, Mapping | nnx.State):
        try:
            items = sorted(tree.items())
        except TypeError:
            items = list(tree.items())
    elif isinstance(tree, list | tuple):
        items = list(enumerate(tree))
    else:
        return {path: tree}
    return {key: leaf for name, part in items for key, leaf in _by_path(part, (*path, str(name))).items()}
