"""The two ceilings of this device, measured now: a large copy and a large matrix product, both on random data."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kernel_bench.runners import JaxRunner, Prepared, time_all
from kernel_bench.work import Roofline

# Elements of 2 bytes (bfloat16), or 4 on a CPU: far more than caches hold.
_COPIED, _COPIED_CPU = 1 << 30, 1 << 25
_SIDE, _SIDE_CPU = 8192, 1536


def measure_roofline(platform: str) -> Roofline:
    """Copy bandwidth, read plus written, the better of a copy and a negation; bf16 product, float32 on a CPU."""
    on_cpu = platform == "cpu"
    dtype = jnp.float32 if on_cpu else jnp.bfloat16
    size, side = (_COPIED_CPU, _SIDE_CPU) if on_cpu else (_COPIED, _SIDE)
    x = jax.random.normal(jax.random.key(0), (size,), dtype)
    ways = {"copy": jnp.copy, "negate": jnp.negative}
    copies = {
        name: JaxRunner(Prepared(lambda _, a, way=way: (None, way(a)), [None], [(x,)])) for name, way in ways.items()
    }
    copy_s = min(timing.seconds for timing in time_all(copies, platform, 5).values())
    del x, copies
    a, b = (jax.random.normal(key, (side, side), dtype) for key in jax.random.split(jax.random.key(1)))
    product = JaxRunner(Prepared(lambda _, a, b: (None, a @ b), [None] * 2, [(a, b), (b, a)]))
    product_s = time_all({"product": product}, platform, 5)["product"].seconds
    return Roofline(2 * size * jnp.dtype(dtype).itemsize / copy_s, 2 * side**3 / product_s)
