"""A device that computes nothing: every step takes the time that `cost.py` gives, on the simulated clock.

`SimulatedEngine` is the `StepEngine` of the real serving loop. A step starts when it has been submitted and the step
before has ended. The host's time for a step passes before the step is submitted, so the loop decides what overlaps.
`SimulatedDevice` stands in for `jax.Device` when the real sizing code plans the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from bench.simulation.cost import Costs, Hardware, equal_pairs, weight_bytes
from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.build import Work
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.outputs import NO_OUTPUTS, HostOutputs
from jaxsgl.batch.sampling import SamplingRows
from jaxsgl.bench.requests import OUTPUT_TOKEN
from jaxsgl.cache.pages import IntArray, PageTable
from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.start.memory import GPU_SHARE, free_memory
from jaxsgl.engine.start.sizing import choose_states, plan_capacity
from jaxsgl.models import ModelArch

_NOTHING = np.empty(0, dtype=np.int32)


@dataclass(slots=True)
class Clock:
    """Simulated seconds since the start."""

    now_s: float = 0.0


@dataclass(frozen=True)
class SimulatedDevice:
    """The part of `jax.Device` that the real sizing code uses."""

    hardware: Hardware
    arch: ModelArch
    platform: str = "gpu"

    def memory_stats(self) -> dict[str, int]:
        """The memory after the weights have been loaded."""
        limit = int(GPU_SHARE * self.hardware.memory_bytes)
        return {"bytes_limit": limit, "bytes_in_use": weight_bytes(self.arch)}


def capacity_on(hardware: Hardware, arch: ModelArch, config: EngineConfig) -> Capacity:
    """The capacity that the real engine would plan on this hardware. Raises `ConfigError` as it does."""
    device: Any = SimulatedDevice(hardware, arch)
    states = choose_states(config, arch, device.platform, jnp.dtype(jnp.bfloat16))
    return plan_capacity(config, arch, states, free_memory(device, config.mem_fraction_static, GPU_SHARE))


@dataclass(frozen=True)
class StepSizes(StepInputs):
    """A step of which only the sizes are known: its time depends on nothing else.

    Attributes:
      kv_tokens, pairs: see cost.py; for a mixed step, without its decodes.
      decode_kv_tokens: KV tokens that the decodes of a mixed step read.
    """

    kv_tokens: int = 0
    pairs: float = 0.0
    decode_kv_tokens: int = 0


class SizesBuilder:
    """Replaces `BatchBuilder` and makes no arrays: no engine reads them, and they would take most of a run's time.

    The sizes are those of `BatchBuilder` for greedy requests without log-probabilities; all simulated requests are
    such.
    """

    def __init__(self, buckets: BucketSet, table: PageTable, sampling: SamplingRows, page_size: int) -> None:
        self._buckets = buckets

    def decode(
        self, rows: IntArray, positions: IntArray, steps: IntArray | None = None, token_ids: IntArray | None = None
    ) -> StepSizes:
        """See `BatchBuilder`."""
        n = len(rows)
        bucket = self._buckets.decode(n, num_steps=1 if steps is None else self._buckets.decode_steps)
        counts = np.ones_like(positions) if steps is None else steps
        kv_tokens = int((counts * (2 * positions + counts + 1)).sum()) // 2
        return StepSizes(bucket, _NOTHING, n, int(counts.sum()), kv_tokens=kv_tokens, pairs=kv_tokens)

    def extend(self, works: Sequence[Work]) -> StepSizes:
        """See `BatchBuilder`."""
        num_tokens = kv_tokens = decode_kv_tokens = 0
        pairs = 0.0
        for work in works:
            count = len(work.token_ids)
            end = work.start + count
            num_tokens += count
            if work.token_ids[0] < 0:  # a placeholder for a token not known yet: the sequence decodes
                decode_kv_tokens += end
            else:
                kv_tokens += end
                pairs += equal_pairs(count, 1, end)
        bucket = self._buckets.extend(num_tokens, len(works))
        return StepSizes(
            bucket, _NOTHING, len(works), num_tokens,
            kv_tokens=kv_tokens, pairs=pairs, decode_kv_tokens=decode_kv_tokens,
        )  # fmt: skip

    def verify(self, works: Sequence[Work]) -> StepSizes:
        """See `BatchBuilder`; simulated requests don't speculate."""
        raise NotImplementedError


@dataclass(slots=True)
class KindCounts:
    """Counts of one kind of step, where several steps in one program count as one. `real` and `padded` are tokens."""

    steps: int = 0
    real: int = 0
    padded: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulatedHandle:
    """A launched step that ends at `ready_at_s`."""

    clock: Clock
    ready_at_s: float
    shape: tuple[int, int]

    def tokens(self) -> npt.NDArray[np.int32]:
        """Moves the clock to the end of the step."""
        self.clock.now_s = max(self.clock.now_s, self.ready_at_s)
        return np.full(self.shape, OUTPUT_TOKEN, dtype=np.int32)

    def outputs(self) -> HostOutputs:
        """No scores."""
        return NO_OUTPUTS

    def drafts(self) -> npt.NDArray[np.int32]:
        """Nothing drafts."""
        return np.zeros((0, 0), np.int32)


@dataclass
class SimulatedEngine:
    """Runs steps in the order of `submit`.

    Attributes:
      arch, capacity, buckets: as the real engine has them.
      costs: how long steps take.
      clock: the simulated clock.
      host_step_s, host_seq_s: seconds of the host for a step, and for each of its sequences on top.
      counts: counts by kind of step.
      recompiles: always 0.
    """

    arch: ModelArch
    capacity: Capacity
    buckets: BucketSet
    costs: Costs
    clock: Clock
    host_step_s: float
    host_seq_s: float
    counts: dict[str, KindCounts] = field(default_factory=dict)
    recompiles: int = 0
    _free_at_s: float = 0.0

    def submit(self, inputs: StepInputs) -> SimulatedHandle:
        """Launches a step: the host's time passes at once, the step's time when its tokens are read."""
        assert isinstance(inputs, StepSizes)
        bucket, clock = inputs.bucket, self.clock
        clock.now_s += self.host_step_s + self.host_seq_s * inputs.num_seqs
        cost = self.costs["decode" if bucket.kind == "decode" else "extend"]
        seconds = cost.seconds(bucket.num_tokens, inputs.kv_tokens, inputs.pairs, bucket.num_steps)
        seconds += self.costs["decode"].kv_token_s * inputs.decode_kv_tokens
        self._free_at_s = max(self._free_at_s, clock.now_s) + seconds
        counts = self.counts.setdefault(bucket.kind, KindCounts())
        counts.steps += 1
        counts.real += inputs.num_tokens
        counts.padded += bucket.padded_tokens
        counts.busy_s += seconds
        return SimulatedHandle(clock, self._free_at_s, (bucket.num_steps, inputs.num_seqs))

    def start_profile(self, folder: str) -> None:
        """Does nothing: a simulated device has no profile."""

    def stop_profile(self) -> None:
        """Does nothing, see `start_profile`."""
