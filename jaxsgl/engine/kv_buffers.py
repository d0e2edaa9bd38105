"""The KV cache on the device: how many pages fit, and the buffers themselves. Called by `engine` at start-up.

Layer-major, one array for K and one for V per layer, `[num_pages, K, page_size, H]`: separate donated buffers, each
written in place by its layer. Knows nothing about which page belongs to whom.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxsgl.cache.pages import pages_for, tokens_in
from jaxsgl.engine.memory import free_bytes
from jaxsgl.engine.mesh import kv_sharding
from jaxsgl.errors import ConfigError

MIN_REQUEST_TOKENS = 2  # one of the prompt and one new
CPU_FRACTION = 0.25  # of free host memory: other programs live there too


class KvBuffers(NamedTuple):
    """All pages of all layers, a pytree that the step takes and returns (donated)."""

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]


@dataclass(frozen=True)
class KvShape:
    """What one page looks like.

    Attributes:
      num_layers, num_kv_heads, head_dim: of the model; K and H.
      page_size: tokens.
      dtype: of keys and values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: jnp.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page id over all layers, K and V together."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_token * tokens_in(1, self.page_size)


def choose_num_pages(
    shape: KvShape,
    device: jax.Device,
    *,
    max_total_tokens: int | None,
    mem_fraction_static: float,
    useful_tokens: int,
    reserved_bytes: int,
) -> int:
    """Pages of the pool, the dummy page included.

    Args:
      shape: of a page.
      device: where the pool goes; weights are there already.
      max_total_tokens: asked for, else as many as fit.
      mem_fraction_static: share of an accelerator's memory for weights and pool together.
      useful_tokens: more than all rows can fill; bounds the pool on CPU, where memory is shared with everything else.
      reserved_bytes: that other tables will take.

    Raises:
      ConfigError: the pool doesn't fit into memory, or can't hold one request of one prompt token.
    """
    memory = free_bytes(device, mem_fraction_static) - reserved_bytes
    if max_total_tokens is not None:
        return _asked_pages(shape, max_total_tokens, memory)
    if device.platform == "cpu":
        memory = int(memory * CPU_FRACTION)
    num_pages = memory // shape.page_bytes
    if device.platform == "cpu":
        num_pages = min(_steady(num_pages), 1 + pages_for(useful_tokens, shape.page_size))
    least = 1 + pages_for(MIN_REQUEST_TOKENS, shape.page_size)
    if num_pages < least:
        raise ConfigError(
            f"{memory / 2**20:.0f} MiB are free for the KV pool, but {least} pages of {shape.page_bytes / 2**20:.2f} "
            "MiB are the least: raise --mem-fraction-static, or use a smaller model or --page-size"
        )
    return num_pages


def _steady(num_pages: int) -> int:
    """The next 2^k or 3 x 2^k below: free memory differs a little at each start, but programs are compiled for one
    number of pages, so another number would not find them in the compilation cache."""
    grain = 1 << max(num_pages.bit_length() - 2, 0)
    return num_pages // grain * grain


def _asked_pages(shape: KvShape, max_total_tokens: int, memory: int) -> int:
    if max_total_tokens < MIN_REQUEST_TOKENS:
        raise ConfigError(
            f"--max-total-tokens is {max_total_tokens}, but must be {MIN_REQUEST_TOKENS} and more: a prompt token "
            "and a new one"
        )
    num_pages = 1 + pages_for(max_total_tokens, shape.page_size)
    if num_pages * shape.page_bytes > memory:
        raise ConfigError(
            f"--max-total-tokens {max_total_tokens} needs {num_pages * shape.page_bytes / 2**20:.0f} MiB, but "
            f"{memory / 2**20:.0f} MiB are free: lower it, or leave it out to take what fits"
        )
    return num_pages


def allocate(shape: KvShape, num_pages: int, mesh: Mesh) -> KvBuffers:
    """Zeroed buffers, made on the device. Raises `ConfigError` if the mesh can't split the kv heads."""
    if shape.num_kv_heads % mesh.size:
        raise ConfigError(
            f"{shape.num_kv_heads} kv heads can't be split over {mesh.size} devices: use a number that divides them"
        )
    dims = (num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
    zeros = jax.jit(lambda: jnp.zeros(dims, shape.dtype), out_shardings=kv_sharding(mesh))
    layers = range(shape.num_layers)
    return KvBuffers(tuple(zeros() for _ in layers), tuple(zeros() for _ in layers))
