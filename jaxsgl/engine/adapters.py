"""`EngineAdapters`: LoRA adapters in host memory, and the pool of columns on the device from which steps read them.

    stage    reads a folder into the host form: blocks of columns, ready for the device; may run while steps run
    keep     holds a staged adapter under the number of its loading, until `drop`
    place    writes a kept adapter into columns of the pool, between steps, in the order of the steps

The pool's arrays have fixed shapes, and one compiled program writes a block of columns into all of them in place, so
neither loading nor placing compiles anything. Owns the pool and the host forms. Never knows names, requests or which
columns are free: the scheduler decides that (`scheduler/resources/adapters.py`). Made by `engine`, if a flag asks for
it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsgl.batch.engine_api import PlaceAdapter
from jaxsgl.config.features import ALL_MODULES, LoraConfig
from jaxsgl.engine.programs import Program, ProgramKey, ProgramSet
from jaxsgl.engine.start.sizing import PoolSize
from jaxsgl.errors import CheckpointError, ConfigError
from jaxsgl.models import ModelArch
from jaxsgl.models.lora import MODULES, PoolArray, adaptable_modules, pool_arrays
from jaxsgl.models.tensor_parallel import mesh_axes
from jaxsgl.weights import resolve_model_folder
from jaxsgl.weights.adapters import AdapterFolder
from jaxsgl.weights.sharding import replicated

PLACE = ProgramKey("place_adapter")
BLOCK = 16  # columns that one launch writes
DEFAULT_RANK = 16  # if neither a flag nor an adapter at the start says more

Leaves: TypeAlias = list[jax.Array]
HostLeaves: TypeAlias = list[npt.NDArray[Any]]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StagedAdapter:
    """An adapter in its host form.

    Attributes:
      folder: where it was read.
      rank: its columns.
      digest: of its numbers.
      blocks: leaves like the pool's with `BLOCK` columns each; the last one is padded.
    """

    folder: str
    rank: int
    digest: str
    blocks: tuple[HostLeaves, ...]


@dataclass(frozen=True)
class AdapterPlan:
    """What the pool can hold.

    Attributes:
      modules: that adapters may change.
      max_rank: columns of an adapter at most.
      max_adapters: adapters in the pool at most.
    """

    modules: frozenset[str]
    max_rank: int
    max_adapters: int

    @property
    def size(self) -> PoolSize:
        """Of the pool: columns for `max_adapters` of the highest rank."""
        return PoolSize(self.max_adapters, self.max_rank * self.max_adapters)


def _folder_at_the_start(name: str, folder: str, arch: ModelArch) -> AdapterFolder:
    """Raises `CheckpointError`, which names the flag."""
    try:
        return AdapterFolder(resolve_model_folder(folder), arch)
    except CheckpointError as error:
        raise CheckpointError(f"--lora-paths {name}={folder}: {error}") from error


def plan_adapters(config: LoraConfig, arch: ModelArch) -> AdapterPlan | None:
    """The pool that flags and the adapters at the start ask for; None if there is to be none.

    Raises `StartupError` for an adapter that can't be served, or flags that don't fit the model or the adapters.
    """
    if not config.is_on:
        return None
    if arch.latent is not None:
        raise ConfigError(f"{arch.name} attends over a latent, for which adapters are not served: leave LoRA flags out")
    folders = [_folder_at_the_start(name, folder, arch) for name, folder in config.adapters.items()]
    possible = adaptable_modules(arch)
    asked = config.lora_target_modules
    if asked == (ALL_MODULES,) or not (asked or folders):
        modules = possible
    else:
        modules = frozenset(asked).union(*(folder.modules for folder in folders))
    if not modules <= possible:
        raise ConfigError(
            f"--lora-target-modules are {','.join(sorted(modules))}, but adapters of {arch.name} may change "
            f"{','.join(module for module in MODULES if module in possible)}"
        )
    highest = max((folder.rank for folder in folders), default=0)
    max_rank = config.max_lora_rank or highest or DEFAULT_RANK
    if highest > max_rank:
        raise ConfigError(f"--max-lora-rank is {max_rank}, but an adapter has rank {highest}: raise it to that")
    return AdapterPlan(modules, max_rank, config.max_loras_per_batch)


class EngineAdapters:
    """See the module.

    Args:
      plan: sizes of the pool.
      arch, dtype, mesh: of the model; `dtype` is that of activations.
      programs: where the program that writes columns is compiled.

    Attributes:
      plan: see above.
      leaves: of the pool, as programs take them.
      abstract: the pool's tree, with shapes and places instead of arrays.
    """

    def __init__(self, plan: AdapterPlan, arch: ModelArch, dtype: jnp.dtype, mesh: Mesh, programs: ProgramSet) -> None:
        self.plan = plan
        self._arch, self._dtype, self._mesh = arch, dtype, mesh
        self._num_columns = plan.size.num_columns
        self.abstract = abstract_pool(arch, plan.modules, self._num_columns, dtype, mesh)
        self._axes = [
            array.column_axis
            for layer in range(arch.num_layers)
            for _, array in sorted(self._arrays(layer, BLOCK).items())  # as leaves of a dict are ordered
        ]
        self.leaves: Leaves = [_zeros(leaf) for leaf in jax.tree.leaves(self.abstract)]
        self._kept: dict[int, StagedAdapter] = {}
        programs.add([self._writing()])
        self._write = programs[PLACE]
        self._write_block(self._empty_block(), ())  # what can't run fails now
        jax.block_until_ready(self.leaves)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def stage(self, folder: str) -> StagedAdapter:
        """Reads the adapter in `folder`, a folder or hub id. Raises `StartupError` if it can't be served."""
        found = AdapterFolder(resolve_model_folder(folder), self._arch)
        if found.rank > self.plan.max_rank:
            raise ConfigError(
                f"{folder} has rank {found.rank}, but adapters may have {self.plan.max_rank} here: start the server "
                f"with --max-lora-rank {found.rank}"
            )
        whole: HostLeaves = jax.tree.leaves(found.columns(self.plan.modules, self._dtype))
        blocks = []
        for first in range(0, found.rank, BLOCK):
            block = self._empty_block()
            for leaf, of_adapter, axis in zip(block, whole, self._axes, strict=True):
                part = of_adapter[_at(axis, slice(first, first + BLOCK))]
                leaf[_at(axis, slice(0, part.shape[axis]))] = part
            blocks.append(block)
        return StagedAdapter(folder, found.rank, found.digest(), tuple(blocks))

    def keep(self, number: int, staged: StagedAdapter) -> None:
        """Holds a staged adapter as loading `number`."""
        self._kept[number] = staged

    def drop(self, number: int) -> None:
        """Forgets a loading. Its columns of the pool are read no more, or are written for another one."""
        del self._kept[number]

    def drop_all(self) -> None:
        """Forgets all of them."""
        self._kept.clear()

    def kept(self, number: int) -> StagedAdapter:
        """What is held as loading `number`."""
        return self._kept[number]

    def place(self, op: PlaceAdapter) -> None:
        """Writes an adapter into columns of the pool, after the steps before."""
        for place, block in enumerate(self._kept[op.number].blocks):
            self._write_block(block, op.columns[place * BLOCK : (place + 1) * BLOCK])

    def close(self) -> None:
        """Frees the pool's memory."""
        for leaf in self.leaves:
            leaf.delete()

    def _write_block(self, block: HostLeaves, columns: Sequence[int]) -> None:
        places = np.full(BLOCK, self._num_columns, np.int32)  # beyond the pool: not written
        places[: len(columns)] = columns
        self.leaves = self._write(self.leaves, block, places)

    def _empty_block(self) -> HostLeaves:
        return [np.zeros(leaf.shape, leaf.dtype) for leaf in self.abstract_block()]

    def abstract_block(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and places of the leaves of a block."""
        return jax.tree.leaves(abstract_pool(self._arch, self.plan.modules, BLOCK, self._dtype, self._mesh))

    def _writing(self) -> Program:
        """The program that writes a block of columns into the pool."""

        def write(pool: Leaves, block: Leaves, columns: jax.Array) -> Leaves:
            return [
                leaf.at[_at(axis, columns)].set(part, mode="drop")
                for leaf, part, axis in zip(pool, block, self._axes, strict=True)
            ]

        pool = jax.tree.leaves(self.abstract)
        columns = jax.ShapeDtypeStruct((BLOCK,), jnp.int32, sharding=replicated(self._mesh))
        return Program(PLACE, write, (pool, self.abstract_block(), columns), [leaf.sharding for leaf in pool], (0,))

    def _arrays(self, layer: int, num_columns: int) -> dict[str, PoolArray]:
        return pool_arrays(self._arch, layer, self.plan.modules, num_columns)


def abstract_pool(
    arch: ModelArch, modules: frozenset[str], num_columns: int, dtype: jnp.dtype, mesh: Mesh
) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """Shapes and places of a pool of `num_columns`, by layer."""

    def placed(array: PoolArray) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec(*(mesh_axes(axis, mesh) for axis in array.axes))
        return jax.ShapeDtypeStruct(array.shape, dtype, sharding=NamedSharding(mesh, spec))

    return [
        {name: placed(array) for name, array in pool_arrays(arch, layer, modules, num_columns).items()}
        for layer in range(arch.num_layers)
    ]


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    zeros: jax.Array = jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=leaf.sharding)()
    return zeros


def _at(axis: int, index: Any) -> tuple[Any, ...]:
    """What indexes `axis` with `index`: all of the axes before it and of those after it."""
    return (*[slice(None)] * axis, index)
