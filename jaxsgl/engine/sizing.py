"""Start-up decisions: flags, model and free memory become a `Capacity`. Called by `engine`, before anything big exists.

Where a flag is left out, the default depends on the platform: a CPU step is long, so it takes smaller batches.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxsgl.batch.capacity import Capacity
from jaxsgl.config import EngineConfig
from jaxsgl.engine import edits
from jaxsgl.engine.kv_buffers import KvShape, choose_num_pages
from jaxsgl.errors import ConfigError
from jaxsgl.models import ModelArch

ROWS = {"cpu": 32}
OTHER_ROWS = 256
CHUNK_TOKENS = {"cpu": 512}
OTHER_CHUNK_TOKENS = 2048
UNLIMITED = -1


def kv_shape(arch: ModelArch, page_size: int, dtype: jnp.dtype) -> KvShape:
    """What a page of this model looks like."""
    return KvShape(arch.num_layers, arch.num_kv_heads, arch.head_dim, page_size, dtype)


def plan_capacity(config: EngineConfig, arch: ModelArch, page: KvShape, device: jax.Device) -> Capacity:
    """All sizes of the engine. Raises `ConfigError` for flags that the model or the memory can't satisfy."""
    context_length = _context_length(config, arch)
    num_rows = config.max_running_requests or ROWS.get(device.platform, OTHER_ROWS)
    chunk = config.chunked_prefill_size or CHUNK_TOKENS.get(device.platform, OTHER_CHUNK_TOKENS)
    if chunk == UNLIMITED:
        chunk = context_length
    num_pages = choose_num_pages(
        page,
        device,
        max_total_tokens=config.max_total_tokens,
        mem_fraction_static=config.mem_fraction_static,
        useful_tokens=num_rows * context_length,
        reserved_bytes=edits.table_bytes(num_rows, arch.vocab_size),
    )
    return Capacity(
        page_size=page.page_size,
        num_pages=num_pages,
        num_rows=num_rows,
        context_length=context_length,
        max_extend_tokens=min(chunk, context_length),
        vocab_size=arch.vocab_size,
    )


def _context_length(config: EngineConfig, arch: ModelArch) -> int:
    asked = config.context_length
    if asked is None:
        return arch.max_context
    if asked > arch.max_context:
        raise ConfigError(
            f"--context-length is {asked}, but the model was made for {arch.max_context} tokens: lower it to that"
        )
    return asked
