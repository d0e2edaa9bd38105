"""Which models have data-parallel attention (`--enable-dp-attention`), and which gain by it.

A rank has pages and rows for itself; what else a model keeps or makes for its requests is not divided among ranks yet.
Called by `engine`, at start. `EngineConfig` refuses the flags that don't go with it.
"""

from __future__ import annotations

from jaxsgl.config.engine import EngineConfig
from jaxsgl.errors import ConfigError
from jaxsgl.models import ModelArch

_WAY_OUT = "leave --enable-dp-attention out: --dp-size alone means whole replicas"


def check_rank_flags(config: EngineConfig, arch: ModelArch) -> None:
    """Raises `ConfigError` if ranks can't serve `arch`, or would gain nothing over heads that devices share."""
    if config.num_ranks == 1:
        return
    if arch.vision is not None:
        raise ConfigError(
            f"--enable-dp-attention does not go with {arch.name}, which sees images, yet: serve text alone with "
            f"--language-only, or {_WAY_OUT}"
        )
    if arch.delta_net is not None:
        raise ConfigError(f"--enable-dp-attention does not go with {arch.name}, which keeps states, yet: {_WAY_OUT}")
    if arch.mixture is None and arch.kv_copies == 1 and arch.num_kv_heads >= config.tp:
        raise ConfigError(
            f"--enable-dp-attention gains nothing: {config.tp} devices can share the {arch.num_kv_heads} kv heads of "
            f"{arch.name}, and it has no experts: {_WAY_OUT}"
        )
