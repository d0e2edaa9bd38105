"""The two ceilings of this device, measured now: a large copy and a large matrix product, both on random data."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from bench.kernels.runners import JaxRunner, Prepared, time_all
from bench.kernels.work import Roofline

# Elements of 2 bytes (bfloat16), or 4 on a CPU: far more than caches hold.
_COPIED, _COPIED_CPU = 1 << 30, 1 << 25
_SIDE, _SIDE_CPU = 8192, 1536


def measure_roofline(platform: str) -> Roofline:
    """Copy bandwidth, read plus written, the better of a copy and a negation; bf16 product, on a CPU the better of that
    and a float32 one, both into float32."""
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
