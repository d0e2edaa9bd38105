"""Which backend each kernel of an engine runs on, as flags say.

Never knows which backends can run: `pallas_kernels.dispatch` does. Called by `engine`, at start.
"""

from __future__ import annotations

from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.kernels import OP_OF_NAME, read_kernels
from jaxsgl.errors import ConfigError
from jaxsgl.models import ModelArch
from jaxsgl.models.quantization import FLOAT8
from pallas_kernels import KernelChoice
from pallas_kernels.choice import XLA


def asked_kernels(config: EngineConfig, arch: ModelArch) -> KernelChoice:
    """The choice that flags make. Raises `ConfigError` for kernels of what the model doesn't have."""
    chosen = read_kernels(config.kernels)
    fmt = arch.weight_format
    if chosen.get(OP_OF_NAME["quantized"], "auto") != "auto" and (fmt is None or not fmt.is_in_groups):
        raise ConfigError(
            f"--kernels names quantized, but {arch.name} has no weights whose scales are those of groups: leave it out"
        )
    if chosen.get(OP_OF_NAME["experts"], "auto") != "auto" and arch.mixture is None:
        raise ConfigError(f"--kernels names experts, but {arch.name} has none: leave them out")
    if chosen.get(OP_OF_NAME["states"], "auto") != "auto" and arch.delta_net is None:
        raise ConfigError(f"--kernels names states, but the layers of {arch.name} keep none: leave it out")
    if chosen.get(OP_OF_NAME["float8"], "auto") != "auto" and (fmt is None or fmt.numbers != FLOAT8):
        raise ConfigError(f"--kernels names float8, but {arch.name} has no weights in float8: leave it out")
    if config.weight_only and fmt is not None and fmt.numbers == FLOAT8:
        chosen.setdefault(OP_OF_NAME["float8"], XLA)
    return KernelChoice.of_attention(config.attention_backend).with_backends(chosen)


def kernel_flags(config: EngineConfig) -> str:
    """The flags that name kernels, for errors; empty if none does."""
    flags = [] if config.attention_backend == "auto" else [f"--attention-backend {config.attention_backend}"]
    return " ".join(flags + ([f"--kernels {','.join(config.kernels)}"] if config.kernels else []))
