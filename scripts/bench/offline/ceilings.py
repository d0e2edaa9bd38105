"""The two ceilings of this machine: bytes and floating-point operations per second, measured beside a run.

On accelerators they are those of the kernel benchmark. On a CPU the bytes are read only (a step reads its weights and
KV, and writes little), by all cores that this process may use; the product is the better of float32 and bfloat16.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.roofline import measure_roofline
from bench.kernels.work import Roofline

_READ_FLOATS = 1 << 26  # 256 MB: far more than caches hold
_SIDE = 1536
_REPEATS = 3


def ceilings(platform: str) -> Roofline:
    """Measures; a few seconds."""
    if platform != "cpu":
        return measure_roofline(platform)
    return Roofline(_bytes_per_s(len(os.sched_getaffinity(0))), max(map(_flops_per_s, ("float32", "bfloat16"))))


def best(one: Roofline, other: Roofline) -> Roofline:
    """The higher ceilings: what other programs took from one measurement, they may have left to the other."""
    return Roofline(max(one.bytes_per_s, other.bytes_per_s), max(one.flops_per_s, other.flops_per_s))


def _bytes_per_s(num_cores: int) -> float:
    """Bytes that all cores read, each a part of one array."""
    parts = np.split(np.ones(_READ_FLOATS, np.float32), num_cores)
    with ThreadPoolExecutor(num_cores) as pool:
        seconds = _fastest(lambda: list(pool.map(lambda part: np.dot(part, part), parts)))
    return sum(part.nbytes for part in parts) / seconds


def _flops_per_s(dtype: str) -> float:
    a, b = (jax.random.normal(key, (_SIDE, _SIDE), dtype) for key in jax.random.split(jax.random.key(1)))
    # Into float32, as the engine multiplies on a CPU; XLA has no fast product into bfloat16 there.
    product = jax.jit(partial(jnp.matmul, preferred_element_type=jnp.float32))
    return 2 * _SIDE**3 / _fastest(lambda: product(a, b).block_until_ready())


def _fastest(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(1 + _REPEATS):
        begin_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin_s)
    return min(seconds[1:])
