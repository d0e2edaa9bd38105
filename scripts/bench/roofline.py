"""The two ceilings of this device, bytes per second and FLOP/s, measured beside a run, and work counted against them.

`measure_roofline` serves the kernel benchmark: a large copy and a large matrix product, both on random data. `ceilings`
serves whole runs: on a CPU its bytes are only read (a step reads its weights and KV, and writes little), by all cores
that this process may use, and its product is the better of float32 and bfloat16. Never knows how anything is computed.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from bench.kernels.runners import JaxRunner, Prepared, time_all
from bench.processes import num_cores


@dataclasses.dataclass(frozen=True)
class Work:
    """Bytes through device memory and floating-point operations of one call or step."""

    num_bytes: int
    flops: int


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Measured ceilings of this device: bytes per second of a copy, read plus written, and FLOP/s of a matrix
    product."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, work: Work) -> float:
        """Seconds that the work takes at least, at these ceilings."""
        return max(work.num_bytes / self.bytes_per_s, work.flops / self.flops_per_s)

    def bound(self, work: Work) -> str:
        """The ceiling that the floor comes from: "memory" or "compute"."""
        return "memory" if work.num_bytes / self.bytes_per_s >= work.flops / self.flops_per_s else "compute"


# Elements of 2 bytes (bfloat16), or 4 on a CPU: far more than caches hold.
_COPIED, _COPIED_CPU = 1 << 30, 1 << 25
_SIDE, _SIDE_CPU = 8192, 1536


def measure_roofline(platform: str) -> Roofline:
    """Measures copy bandwidth, read plus written, and a bfloat16 matrix product.

    The bandwidth is the better of a copy and a negation. On a CPU the product is the better of bfloat16 and float32,
    both into float32.
    """
    on_cpu = platform == "cpu"
    dtypes = (jnp.float32, jnp.bfloat16) if on_cpu else (jnp.bfloat16,)
    size, side = (_COPIED_CPU, _SIDE_CPU) if on_cpu else (_COPIED, _SIDE)
    x = jax.random.normal(jax.random.key(0), (size,), dtypes[0])
    ways = {"copy": jnp.copy, "negate": jnp.negative}
    copies = {
        name: JaxRunner(Prepared(lambda _, a, way=way: (None, way(a)), [None], [(x,)])) for name, way in ways.items()
    }
    copy_s = min(timing.seconds for timing in time_all(copies, platform, 5).values())
    del x, copies
    products = {jnp.dtype(dtype).name: _product(side, dtype, jnp.float32 if on_cpu else dtype) for dtype in dtypes}
    product_s = min(timing.seconds for timing in time_all(products, platform, 5).values())
    return Roofline(2 * size * jnp.dtype(dtypes[0]).itemsize / copy_s, 2 * side**3 / product_s)


def _product(side: int, dtype: DTypeLike, into: DTypeLike) -> JaxRunner:
    a, b = (jax.random.normal(key, (side, side), dtype) for key in jax.random.split(jax.random.key(1)))
    call = functools.partial(jnp.matmul, preferred_element_type=into)
    return JaxRunner(Prepared(lambda _, a, b: (None, call(a, b)), [None] * 2, [(a, b), (b, a)]))


_READ_FLOATS = 1 << 26  # 256 MB: far more than caches hold
_PRODUCT_SIDE = 1536
_REPEATS = 3


def ceilings(platform: str) -> Roofline:
    """Measures the ceilings for whole runs; takes a few seconds."""
    if platform != "cpu":
        return measure_roofline(platform)
    return Roofline(_bytes_per_s(num_cores()), max(map(_flops_per_s, ("float32", "bfloat16"))))


def best(one: Roofline, other: Roofline) -> Roofline:
    """The higher ceilings of two measurements: other programs of the machine may have slowed down one of them."""
    return Roofline(max(one.bytes_per_s, other.bytes_per_s), max(one.flops_per_s, other.flops_per_s))


def _bytes_per_s(num_cores: int) -> float:
    """Bytes per second that all cores read together, each from its own part of an array."""
    parts = np.split(np.ones(_READ_FLOATS, np.float32), num_cores)
    with ThreadPoolExecutor(num_cores) as pool:
        seconds = _fastest(lambda: list(pool.map(lambda part: np.dot(part, part), parts)))
    return sum(part.nbytes for part in parts) / seconds


def _flops_per_s(dtype: str) -> float:
    shape = (_PRODUCT_SIDE, _PRODUCT_SIDE)
    a, b = (jax.random.normal(key, shape, dtype) for key in jax.random.split(jax.random.key(1)))
    # Into float32, as the engine multiplies on a CPU; XLA has no fast product into bfloat16 there.
    product = jax.jit(partial(jnp.matmul, preferred_element_type=jnp.float32))
    return 2 * _PRODUCT_SIDE**3 / _fastest(lambda: product(a, b).block_until_ready())


def _fastest(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(1 + _REPEATS):
        begin_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin_s)
    return min(seconds[1:])
