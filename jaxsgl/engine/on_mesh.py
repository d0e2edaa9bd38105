"""The one seam between the step's functions and a mesh: a program is traced once, for each device's parts.

On a mesh of several devices, `each_device` runs a program under `shard_map`: every device gets its own parts of
parameters and pages, and what is replicated, and `models/tensor_parallel.py` tells where their results are brought
together. So kernels in C++, Triton and Mosaic run on each device's heads as they do on one, and a program has the
collectives that the model names and no others. On one device a program stays as it is. Called by `programs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding


def each_device(program: Callable[..., Any], mesh: Mesh, arguments: tuple[Any, ...], shardings: Any) -> Any:
    """`program`, run by each device on its own parts.

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
