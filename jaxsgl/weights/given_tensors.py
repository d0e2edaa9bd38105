"""Tensors in memory under the names of a checkpoint, in the place of a folder's files: what a trainer hands over.

`loading.py` reads them as it reads `tensor_files.TensorFiles`. Knows names, but not what parameters are made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxsgl.errors import CheckpointError
from jaxsgl.models import ModelArch
from jaxsgl.weights.names import Source, sizes, with_model_prefix
from jaxsgl.weights.other_tensors import is_harmless


class GivenTensors:
    """Tensors by name; remembers which were asked for. Arrays on other devices are copied to the host."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = {name: tensors[given] for name, given in with_model_prefix(tensors).items()}
        self._unread = set(self._tensors)

    def tensor(self, source: Source, arch: ModelArch) -> npt.NDArray[Any]:
        """The tensor of `source` as it is. Raises `CheckpointError` if it is missing, misshapen or deleted."""
        name = source.name
        if source.axes is None:
            raise CheckpointError(f"tensor {name} is of a quantized checkpoint; give {arch.name}'s weights as a folder")
        expected = tuple(sizes(arch)[axis] for axis in source.axes)
        if name not in self._tensors:
            raise CheckpointError(f"tensor {name} is missing, but {arch.name} needs it")
        given = self._tensors[name]
        if isinstance(given, jax.Array) and given.is_deleted():
            raise CheckpointError(f"tensor {name} is deleted; was it donated to a jitted function?")
        if given.shape != expected or not jnp.issubdtype(given.dtype, jnp.floating):
            raise CheckpointError(
                f"tensor {name} is {given.dtype} of shape {given.shape}, but must be floats of shape {expected}"
            )
        self._unread.discard(name)
        return np.asarray(given)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor; None if there is none of that name."""
        return tuple(self._tensors[name].shape) if name in self._tensors else None

    def release(self, numbers: npt.NDArray[Any]) -> None:
        """Nothing to give back: the tensors are the trainer's."""

    def refuse_unread(self, arch: ModelArch) -> None:
        """Raises `CheckpointError` for tensors that no parameter was made of, except harmless ones."""
        unread = sorted(name for name in self._unread if not is_harmless(name, arch))
        if unread:
            raise CheckpointError(f"{len(unread)} tensors are not part of {arch.name}, as {', '.join(unread[:3])}")
