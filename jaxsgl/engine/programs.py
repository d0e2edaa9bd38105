"""Programs as data: `Program` says what is compiled, `ProgramSet` holds what was, for all parts of an engine.

    a part of the engine    exports Programs: a key, a function, shapes and places of its arguments, what it donates
    ProgramSet.add          traces, lowers and compiles those that it lacks, in parallel
    ProgramSet[key]         finds one to run: a shape that was not compiled raises, it never compiles

Steps, sampling, masks and the vision tower (step_programs.py), pages and rows of images (page_io.py) and adapters
(adapters.py) export their programs. `each_device` is the one seam between their functions and a mesh: on
several devices every device gets its own parts of parameters and pages, and what is replicated, and
`models/tensor_parallel.py` says where their results are brought together. So kernels in C++, Triton and Mosaic run on
each device's heads as they do on one, and a program has the collectives that the model names and no others. Never
knows the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from jaxsgl.batch.inputs import Bucket
from jaxsgl.batch.patches import EncodeBucket
from jaxsgl.engine.start.warmup import Compilation, compile_all
from jaxsgl.errors import JaxsglError
from pallas_kernels.order import fixed_order


class ProgramKey(NamedTuple):
    """Names a program of an engine: what it does, and the shape that it was compiled for, if it has several.

    Such as ("forward", a bucket), ("sampled", a number of sequences), ("gather", a number of pages) or ("set_row", 0).
    """

    kind: str
    shape: Bucket | EncodeBucket | int = 0


@dataclass(frozen=True)
class Program:
    """A program to compile.

    Attributes:
      key: its name.
      function: what it computes.
      arguments: trees of arrays, or of `jax.ShapeDtypeStruct`s with shardings.
      shardings: of the result: a tree like it, or like the beginning of it.
      donated: numbers of the arguments whose memory the result takes.
      mesh: each device runs `function` on its own parts; None: XLA cuts it up as `shardings` ask.
    """

    key: ProgramKey
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    shardings: Any
    donated: tuple[int, ...] = ()
    mesh: Mesh | None = None

    def trace(self, *, in_fixed_order: bool = False) -> jax.stages.Traced:
        """Traces it; compiles nothing."""
        function = _ordered(self.function) if in_fixed_order else self.function
        if self.mesh is not None:
            function = each_device(function, self.mesh, self.arguments, self.shardings)
        return jax.jit(function, donate_argnums=self.donated, out_shardings=self.shardings).trace(*self.arguments)


class StageBytes(NamedTuple):
    """Device memory of a program: what it leaves until its step has ended, and what it takes while it runs."""

    kept: int
    temporary: int


class ProgramSet:
    """The compiled programs of an engine.

    Args:
      progress: whether to show on stderr how far compiling is.
      in_fixed_order: whether programs add in one order, whatever the number of rows.
      threads: that compile; None: one for each processor.
    """

    def __init__(self, *, progress: bool = False, in_fixed_order: bool = False, threads: int | None = None) -> None:
        self._progress, self._in_fixed_order = progress, in_fixed_order
        self._threads = threads
        self._compilations: dict[ProgramKey, Compilation] = {}
        self._bytes: dict[ProgramKey, StageBytes] = {}

    def __len__(self) -> int:
        return len(self._compilations)

    def __getitem__(self, key: ProgramKey) -> jax.stages.Compiled:
        try:
            return self._compilations[key].compiled
        except KeyError:
            raise JaxsglError(
                f"no program was compiled for {key.kind} [{key.shape}]; the {len(self)} programs of warm-up are the "
                "only ones that may run"
            ) from None

    @property
    def compilations(self) -> Mapping[ProgramKey, Compilation]:
        """By key, with the time that each took."""
        return self._compilations

    def add(self, programs: Iterable[Program]) -> None:
        """Compiles those of `programs` that are not in the set."""
        missing = {program.key: program for program in programs if program.key not in self._compilations}
        order = self._in_fixed_order
        lowerings = {
            key: lambda program=program: program.trace(in_fixed_order=order).lower() for key, program in missing.items()
        }
        self._compilations |= compile_all(lowerings, progress=self._progress, threads=self._threads)

    def forget(self, keys: Iterable[ProgramKey]) -> None:
        """Drops programs, which are to be compiled for other sizes of the state."""
        for key in keys:
            del self._compilations[key]
            self._bytes.pop(key, None)

    def bytes_of(self, key: ProgramKey) -> StageBytes:
        """Device memory of a program; zeros if the platform doesn't report it."""
        if key not in self._bytes:  # XLA takes 2 ms to say it, and each program is part of many steps
            self._bytes[key] = _bytes_of(self[key])
        return self._bytes[key]


def _bytes_of(program: jax.stages.Compiled) -> StageBytes:
    memory = program.memory_analysis()
    if memory is None:
        return StageBytes(0, 0)
    return StageBytes(memory.output_size_in_bytes - memory.alias_size_in_bytes, memory.temp_size_in_bytes)


def _ordered(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it is traced in fixed order. Not the same one twice, as JAX keeps what it has traced by it."""

    def ordered(*arguments: Any) -> Any:
        with fixed_order():
            return function(*arguments)

    return ordered


def each_device(program: Callable[..., Any], mesh: Mesh, arguments: tuple[Any, ...], shardings: Any) -> Any:
    """`program`, run by each device on its own parts under `shard_map`; on one device it stays as it is.

    Args:
      program: takes `arguments` as one device has them.
      mesh: of all devices.
      arguments: trees of arrays, or of shapes with shardings.
      shardings: a tree like the program's result, or like the beginning of it, with a `NamedSharding` for each part.
    """
    if mesh.size == 1:
        return program
    return jax.shard_map(
        program,
        mesh=mesh,
        in_specs=jax.tree.map(lambda array: array.sharding.spec, arguments),
        out_specs=jax.tree.map(lambda sharding: sharding.spec, shardings, is_leaf=_is_sharding),
        check_vma=False,  # it would want to be told of each kernel what its results have in common
    )


def _is_sharding(value: Any) -> bool:
    return isinstance(value, NamedSharding)
