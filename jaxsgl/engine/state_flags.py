"""Which flags don't go with models whose layers keep states instead of keys and values (`models/delta_net.py`).

A state holds all tokens before it: it can't go back, and it isn't in pages. Called by `engine`, at start.
"""

from __future__ import annotations

from jaxsgl.cache.pages import ends_page
from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.sizing import STATE_PAGE_SIZE
from jaxsgl.errors import ConfigError
from jaxsgl.models import ModelArch


def check_flags(config: EngineConfig, arch: ModelArch) -> None:
    """Raises `ConfigError` if the layers of `arch` keep states and a flag, or its checkpoint, doesn't go with them."""
    if arch.delta_net is None:
        return
    refused = (
        (config.speculation.is_on, "--speculative-algorithm", "a state can't go back to the drafts that stand"),
        (config.host_kv.is_on, "--host-kv-gib or --enable-hierarchical-cache", "host memory holds pages, not states"),
        (config.disaggregation.is_on, "--disaggregation-mode", "pages travel between servers, not states"),
        (config.scheduling.enable_mixed_chunk, "--enable-mixed-chunk", "each decode would take a block of 64 tokens"),
        (config.lora.is_on, "--lora-paths or --enable-lora", "adapters of its layers are not served"),
        (config.quantization is not None, "--quantization", "its layers are not quantized"),
    )
    for is_on, flags, reason in refused:
        if is_on:
            raise ConfigError(f"{flags} does not go with {arch.name}, which keeps states: {reason}: leave it out")
    page_size = config.page_size
    if not config.disable_radix_cache and isinstance(page_size, int) and not ends_page(page_size, STATE_PAGE_SIZE):
        raise ConfigError(
            f"--page-size is {page_size}, but cached prefixes of {arch.name} end at states, which are made every "
            f"{STATE_PAGE_SIZE} tokens: give 64, 128, 192 or 256, leave it out, or add --disable-radix-cache"
        )
    if arch.weight_format is not None:
        raise ConfigError(
            f"{config.model} has quantized weights, which are not served for {arch.name}: use a checkpoint in bfloat16"
        )
