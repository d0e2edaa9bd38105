"""The static scales of a float8 KV cache: a number of the cache stands for itself times the scale of its layer.

Owns which tensor of a checkpoint scales which layer. Never knows the names (`tensor_files.py`) or what the cache is
made of: the engine, which calls it, hands each layer's scales to the kernels together with its pages.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from jaxsgl.errors import CheckpointError
from jaxsgl.models import ModelArch
from jaxsgl.weights.gguf_tensors import open_tensors
from jaxsgl.weights.tensor_files import kv_scale_of

# One number, one for each kv head `[K]`, or None for 1; float32.
Scale: TypeAlias = npt.NDArray[np.float32] | None

logger = logging.getLogger(__name__)


class KvScales(NamedTuple):
    """The scales of K and of V, by layer that has them."""

    k: tuple[Scale, ...]
    v: tuple[Scale, ...]

    @classmethod
    def of_one(cls, num_layers: int) -> KvScales:
        """A scale of 1 everywhere: nothing is multiplied."""
        return cls((None,) * num_layers, (None,) * num_layers)


def load_kv_scales(folder: Path, arch: ModelArch) -> KvScales:
    """The scales in the checkpoint of `folder`, 1 where it has none. A layer with one for K alone uses it for V, too.

    Raises `CheckpointError` for scales that are not positive, and for a layer with neither one of them nor K.
    """
    found: dict[tuple[int, str], npt.NDArray[np.float32]] = {}
    tensors = open_tensors(folder)
    for name in tensors.names():
        place = kv_scale_of(name)
        if place is not None and place[0] - arch.stage.layers_before in arch.attention_layers:
            found[place[0] - arch.stage.layers_before, place[1]] = _checked(tensors.scale(name), name, folder, arch)
    num_scaled = len({layer for layer, _ in found})
    num_layers = len(arch.attention_layers)
    if num_scaled < num_layers:
        logger.warning(
            "%s has scales of the KV cache for %d of %d layers; the others use 1, and keys and values beyond 448 are "
            "stored as 448",
            folder, num_scaled, num_layers,
        )  # fmt: skip

    def scale(layer: int, parts: tuple[str, ...]) -> Scale:
        first = next((found[layer, part] for part in parts if (layer, part) in found), None)
        return None if first is None or np.all(first == 1) else first

    layers = arch.attention_layers
    return KvScales(
        tuple(scale(layer, ("k", "kv", "v")) for layer in layers),
        tuple(scale(layer, ("v", "kv", "k")) for layer in layers),
    )


def _checked(scale: npt.NDArray[np.float32], name: str, folder: Path, arch: ModelArch) -> npt.NDArray[np.float32]:
    if scale.size not in (1, arch.stored_kv_heads):
        raise CheckpointError(
            f"{folder}: tensor {name} has shape {scale.shape}; a scale of the KV cache must be one number, or one for "
            f"each of the {arch.stored_kv_heads} kv heads"
        )
    if not np.all((scale > 0) & np.isfinite(scale)):
        raise CheckpointError(
            f"{folder}: tensor {name} holds {scale.ravel()[0]}; a scale of the KV cache must be a positive number: "
            "calibrate again, or serve with --kv-cache-dtype bfloat16"
        )
    return scale.reshape(()) if scale.size == 1 else np.repeat(scale.reshape(-1), arch.kv_copies)
