"""Which number formats a model runs in: of weights, of activations, of the KV cache. Called by the engine at start-up.

Accelerators use one format for all. A CPU multiplies 16 bit weights with float32 accumulation (see `layers.product`),
but does everything else in float32: XLA has no vector code for 16 bit arithmetic there, and so widens and narrows
around each operation. The KV cache has 16 bits there too: it is read as much as the weights. For bfloat16 those are
kept as uint16 (`pallas_kernels.bfloat16_bits`), since XLA would widen the whole cache in order to write a row of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

from jaxsgl.models.arch import ModelArch
from pallas_kernels.bfloat16_bits import DTYPE as BITS
from pallas_kernels.native import library as native
from pallas_kernels.target import CPUINFO, processor_flags

BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}  # in Linux' list of what a processor can


class Precision(NamedTuple):
    """The formats of one engine."""

    weights: jnp.dtype
    activations: jnp.dtype
    kv: jnp.dtype


def resolve_precision(
    flag: str, arch: ModelArch, platform: str, *, cpu_multiplies_bfloat16: Callable[[], bool]
) -> Precision:
    """The formats for the `--dtype` flag on a platform ("cpu", "gpu", "tpu").

    auto: the checkpoint's; on a CPU float32, unless the checkpoint is bfloat16 and that is multiplied fast there. Asks
    for the latter only if it matters, as it may have kernels compiled.
    """
    if flag == "auto":
        keeps = platform != "cpu" or (arch.dtype == "bfloat16" and cpu_multiplies_bfloat16())
        flag = arch.dtype if keeps else "float32"
    weights = jnp.dtype(flag)
    if platform != "cpu" or weights.itemsize > 2:
        return Precision(weights, weights, weights)
    return Precision(weights, jnp.dtype(jnp.float32), BITS if weights == jnp.bfloat16 else weights)


def cpu_multiplies_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether bfloat16 weights are fast: Linux lists products of them for the processor, or our kernels run on it."""
    return not BFLOAT16_FLAGS.isdisjoint(processor_flags(cpuinfo)) or native.load() is None
