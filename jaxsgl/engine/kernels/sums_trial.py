"""The process that adds up over devices, as layers do: whether sums are right, and what each takes.

XLA_FLAGS say by what, and the request how that is called. Each sum goes on from the one before it, and all are of small
whole numbers, exact in bfloat16 in any order. Started by `sums`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxsgl.models.tensor_parallel import TENSOR_AXIS
from jaxsgl.weights.sharding import make_mesh
from pallas_kernels.selftest.process import Say, answer
from pallas_kernels.selftest.report import PASSED, RAISED, WRONG, Begun, Ended, Request, Verdict

NUM_SUMS = 32  # one after the other, as of 16 layers
NUM_RUNS = 20
MAX_NOTE = 300  # characters of an error


def test(request: Request, say: Say) -> None:
    """Tries the sums of a request: `num_devices` in `num_ranks`, each with `rows` of `hidden_size` numbers."""
    ((op, backend),) = request.choice.items()
    number = request.shapes["num_devices"]
    devices = jax.devices()
    if devices[0].platform != request.platform or len(devices) < number:
        say(Ended(f"JAX found {len(devices)} {devices[0].platform}s in place of {number} {request.platform}s"))
        return
    mesh = make_mesh(devices[:number], request.shapes["num_ranks"])
    us: list[float] = []
    try:
        for rows in request.shapes["rows"]:
            say(Begun(op, backend, f"{rows} rows"))
            took = microseconds(mesh, (rows, request.shapes["hidden_size"]))
            if took is None:
                say(Verdict(op, backend, WRONG, f"sums of {rows} rows are wrong"))
                return
            us.append(took)
    except Exception as error:  # compilers and drivers raise errors of any class
        say(Verdict(op, backend, RAISED, f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_NOTE]))
        return
    say(Verdict(op, backend, PASSED, us=tuple(us)))
    say(Ended())


def microseconds(mesh: Mesh, shape: tuple[int, int]) -> float | None:
    """What one of `NUM_SUMS` sums takes, in the fastest of `NUM_RUNS` runs; None if any run's numbers are wrong."""
    numbers_TD = np.random.default_rng(0).integers(-2, 3, shape)
    wanted_TD = _chained(numbers_TD, mesh.shape[TENSOR_AXIS])
    replicated = PartitionSpec()
    chain = jax.jit(jax.shard_map(_chain, mesh=mesh, in_specs=replicated, out_specs=replicated, check_vma=False))
    x_TD = jax.device_put(numbers_TD.astype(jnp.bfloat16), jax.NamedSharding(mesh, replicated))
    found = [_timed(chain, x_TD) for _ in range(1 + NUM_RUNS)]  # the first compiles
    are_right = all(np.array_equal(part, wanted_TD) for _, out_TD in found for part in _parts(out_TD))
    return min(seconds for seconds, _ in found[1:]) / NUM_SUMS * 1e6 if are_right else None


def _chain(x_TD: jax.Array) -> jax.Array:
    """Sums over devices one after the other, each of the last one's numbers, turned by the device's own index."""
    index = jax.lax.axis_index(TENSOR_AXIS)
    for _ in range(NUM_SUMS):
        x_TD = jax.lax.psum(jnp.roll(x_TD, index, axis=1), TENSOR_AXIS) % 5 - 2
    return x_TD


def _chained(x_TD: np.ndarray, num_devices: int) -> np.ndarray:
    """What `_chain` must make."""
    for _ in range(NUM_SUMS):
        x_TD = np.sum([np.roll(x_TD, index, axis=1) for index in range(num_devices)], axis=0) % 5 - 2
    return x_TD


def _timed(chain: jax.stages.Wrapped, x_TD: jax.Array) -> tuple[float, jax.Array]:
    begin = time.perf_counter()
    out_TD = jax.block_until_ready(chain(x_TD))
    return time.perf_counter() - begin, out_TD


def _parts(x_TD: jax.Array) -> Iterator[np.ndarray]:
    """What each device holds of a replicated array."""
    for shard in x_TD.addressable_shards:
        yield np.asarray(shard.data).astype(np.int64)


if __name__ == "__main__":
    answer(test)
