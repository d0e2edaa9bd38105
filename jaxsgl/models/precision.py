"""Which number formats a model runs in: of weights, of activations, of the KV cache. Called by the engine at start-up.

Accelerators use one format for all. A CPU multiplies 16 bit weights with float32 accumulation (see `layers.product`),
but does everything else in float32: XLA has no vector code for 16 bit arithmetic there, and so widens and narrows
around each operation. The KV cache is read more than anything but the weights: it is float16 there, which XLA moves as
it is, while it widens a whole bfloat16 cache in order to write a row of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

from jaxsgl.models.arch import ModelArch

BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}  # in Linux' list of what a processor can


class Precision(NamedTuple):
    """The formats of one engine."""

    weights: jnp.dtype
    activations: jnp.dtype
    kv: jnp.dtype


def resolve_precision(flag: str, arch: ModelArch, platform: str, *, cpu_multiplies_bfloat16: bool) -> Precision:
    """The formats for the `--dtype` flag on a platform ("cpu", "gpu", "tpu").

    auto: the checkpoint's; on a CPU float32, unless the checkpoint is bfloat16 and the processor multiplies that.
    """
    if flag == "auto":
        native = platform != "cpu" or (arch.dtype == "bfloat16" and cpu_multiplies_bfloat16)
        flag = arch.dtype if native else "float32"
    weights = jnp.dtype(flag)
    if platform != "cpu" or weights.itemsize > 2:
        return Precision(weights, weights, weights)
    return Precision(weights, jnp.dtype(jnp.float32), jnp.dtype(jnp.float16))


def cpu_multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's processor has products of bfloat16, as far as Linux tells."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    return any(BFLOAT16_FLAGS & set(line.split()) for line in text.splitlines() if line.startswith("flags"))
