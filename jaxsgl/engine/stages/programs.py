"""The programs of pipeline stages: what differs from those of an engine that has all layers (`step_programs`).

    a stage but the last    forward programs, which return the residual stream, and what writes the page table
    the last stage          all programs of `step_programs`; the forward ones take a stream in the place of token ids

All stages take the same packed buffer of a step. `stages` makes and runs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxsgl.batch.buckets import BucketSet
from jaxsgl.batch.inputs import Bucket, StepInputs, packed_len
from jaxsgl.engine.programs import Program, ProgramKey, ProgramSet
from jaxsgl.engine.state import DeviceState
from jaxsgl.engine.step import FORWARD_DONATES, Passed, make_passing
from jaxsgl.engine.step_programs import SET_PAGES, ProgramSpec, keys_of, step_bytes
from jaxsgl.models.layer_spec import Stage
from jaxsgl.weights.sharding import replicated


@dataclass(frozen=True)
class StageSpec(ProgramSpec):
    """What the programs of one stage share.

    Attributes:
      stage: which one it is.
      hidden_size, activations: D and dtype of the residual stream.
    """

    stage: Stage = field(kw_only=True)
    hidden_size: int = field(kw_only=True)
    activations: jnp.dtype = field(kw_only=True)

    def step(self, bucket: Bucket) -> list[Program]:
        """See `ProgramSpec`; stages but the last choose no tokens."""
        return super().step(bucket) if self.stage.is_last else [self.forward(forward_of(bucket))]

    def forward(self, bucket: Bucket) -> Program:
        """The forward program of `bucket`, which returns `Passed` of a stage but the last.

        The stream is its last argument, after those for adapters and drafts, which are empty.
        """
        stream = () if self.stage.is_first else (self._stream(bucket),)
        if self.stage.is_last:
            program = super().forward(bucket)
            return replace(program, arguments=(*program.arguments, *stream))
        leaves, treedef = jax.tree.flatten(self.params)
        passing = make_passing(self.graphdef, treedef, bucket, self.kernels, self.kv_scales)
        state_shardings = jax.tree.map(lambda array: array.sharding, self.state)
        everywhere: Any = replicated(self.mesh)
        arguments = (leaves, self.state, self._int32(packed_len(bucket)), *stream)
        shardings = Passed(state_shardings, everywhere)
        return Program(ProgramKey("forward", bucket), passing, arguments, shardings, FORWARD_DONATES, self.mesh)

    def host_writes(self) -> list[Program]:
        """See `ProgramSpec`; the last stage alone has edit tables."""
        writes = super().host_writes()
        return writes if self.stage.is_last else [program for program in writes if program.key == SET_PAGES]

    def bytes_of_step(self, programs: ProgramSet, buckets: Iterable[Bucket]) -> int:
        """See `step_bytes`."""
        return step_bytes(programs, self, buckets if self.stage.is_last else set(map(forward_of, buckets)))

    def _stream(self, bucket: Bucket) -> jax.ShapeDtypeStruct:
        return self._placed((bucket.num_tokens, self.hidden_size), self.activations)


def forward_of(bucket: Bucket) -> Bucket:
    """The bucket of the forward program that a step of `bucket` runs."""
    shape = keys_of(bucket)[0].shape
    assert isinstance(shape, Bucket)
    return shape


class PassingRunner:
    """Runs steps on a stage that is not the last one, as `StepRunner` does on that.

    Args:
      programs: of the stage.
      buckets: all.
      params: leaves of the stage's parameters.
      state: before the first step.

    Attributes:
      state: after the steps that were launched.
    """

    def __init__(self, programs: ProgramSet, buckets: BucketSet, params: list[jax.Array], state: DeviceState) -> None:
        self.state = state
        self._params = params
        self._set_pages = programs[SET_PAGES]
        self._of_bucket = {bucket: programs[keys_of(bucket)[0]] for bucket in buckets.all()}

    def launch(self, inputs: StepInputs, stream: tuple[jax.Array, ...] = ()) -> jax.Array:
        """Launches the stage's part of a step, and returns what it passes on, `[T, D]`; never waits for the device."""
        for changes in inputs.table_changes:
            self.state = self.state._replace(page_table=self._set_pages(self.state.page_table, changes))
        out: Passed = self._of_bucket[inputs.bucket](self._params, self.state, inputs.packed, *stream)
        self.state = out.state
        return out.stream
