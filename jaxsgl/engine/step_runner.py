"""`StepRunner`: launches the programs of a step, in order, on the state that stays on the devices between them.

    [tower] -> [page table] -> forward -> [masks] -> choice -> [accepted] -> [settled] -> [drafts]

Owns the `DeviceState` of one mesh: `engine` has one runner, with pipeline stages the last stage has it. Knows which
programs a step runs and no requests; `step_programs` makes them. One thread at a time calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxsgl.batch.inputs import StepFeatures, StepInputs
from jaxsgl.batch.outputs import NO_OUTPUTS
from jaxsgl.batch.patches import EncodeInputs, EncodePart
from jaxsgl.engine.adapters import EngineAdapters
from jaxsgl.engine.drafting.draft import own_layers, with_own_layers
from jaxsgl.engine.encoding import TowerParts
from jaxsgl.engine.launcher import Chosen, DeviceHandle
from jaxsgl.engine.state import DeviceState
from jaxsgl.engine.step import Forwarded
from jaxsgl.engine.step_programs import StepPrograms
from jaxsgl.models import ModelArch


class StepRunner:
    """See the module.

    Args:
      programs: of all buckets.
      arch: the model's shape.
      params: leaves of its parameters; the list may be filled anew between steps.
      state: before the first step.
      adapters: LoRA adapters; None: no flag asks for any.
      draft_leaves: parameters of what drafts; (): nothing does.

    Attributes:
      state: after the steps that were launched.
    """

    def __init__(
        self,
        programs: StepPrograms,
        arch: ModelArch,
        params: list[jax.Array],
        state: DeviceState,
        adapters: EngineAdapters | None = None,
        draft_leaves: Sequence[jax.Array] = (),
    ) -> None:
        self.state = state
        self._programs = programs
        self._params = params
        self._adapters = adapters
        self._draft_leaves = list(draft_leaves)
        taps = () if arch.tower is None else arch.tower.layers.taps
        self._tower_parts = TowerParts(programs.encode_part, taps)

    def launch(self, inputs: StepInputs, stream: tuple[jax.Array, ...] = ()) -> DeviceHandle:
        """Launches one step; never waits for the device. `stream` is what the pipeline stage before passes on.

        Raises `JaxsglError` for a bucket that wasn't compiled, and what XLA raises; after that nothing can go on.
        """
        forward, *after = self._programs.of(inputs.bucket)
        out = self.forward(forward, inputs, stream)
        if inputs.bucket.num_steps > 1:
            return DeviceHandle(inputs, Chosen(out.tokens))
        if inputs.masked:
            choose = partial(self._choose_masked, after, out, inputs)
            return DeviceHandle(inputs, None, out.outputs, choose)
        if inputs.features is not None:
            chosen = self._choose_featured(after[0], out, inputs.features)
        else:
            chosen = self._choose(after[0], out) if after else Chosen(out.tokens)
        return DeviceHandle(inputs, self._completed(after[1:], out, inputs, chosen), out.outputs)

    def _completed(
        self, programs: Sequence[jax.stages.Compiled], forwarded: Forwarded, inputs: StepInputs, chosen: Chosen
    ) -> Chosen:
        """`chosen`, of which `programs` keep what stands, with drafts after it if the step asks for them.

        States move over what stands.
        """
        chosen = self._accepted(programs, forwarded, chosen)
        if forwarded.unsettled is not None:
            settle = self._programs.settle(inputs.bucket)
            running = settle(self._params, self.state.running, forwarded.unsettled, chosen.tokens)
            self.state = self.state._replace(running=running)
        if not inputs.drafts:
            return chosen
        state = self.state
        own, drafts = self._programs.draft(inputs.bucket)(
            self._params,
            self._draft_leaves,
            own_layers(state.kv, self._programs.spec.drafting),
            state.page_table,
            state.last_tokens,
            chosen.tokens,
            forwarded.ends,
        )
        self.state = state._replace(kv=with_own_layers(state.kv, own))
        return chosen._replace(drafts=drafts)

    def _accepted(self, programs: Sequence[jax.stages.Compiled], forwarded: Forwarded, chosen: Chosen) -> Chosen:
        """`chosen`, of which `programs` keep what stands: one if the step verifies drafts, else none."""
        for accept in programs:
            last_tokens, tokens = accept(chosen.tokens, forwarded.runs, self.state.last_tokens)
            self.state = self.state._replace(last_tokens=last_tokens)
            chosen = chosen._replace(tokens=tokens)
        return chosen

    def forward(self, program: jax.stages.Compiled, inputs: StepInputs, stream: tuple[jax.Array, ...] = ()) -> Any:
        """Launches a forward program; returns what it yields, a `Forwarded` or, of several steps, a `Decoded`."""
        pool: Sequence[jax.Array] = ()
        if inputs.bucket.adapter_columns:
            assert self._adapters is not None
            pool = self._adapters.leaves
        for call in inputs.encodes:
            self.encode(call)
        for changes in inputs.table_changes:
            self.state = self.state._replace(page_table=self._programs.set_pages(self.state.page_table, changes))
        out = program(self._params, self.state, inputs.packed, pool, self._draft_leaves, *stream)
        self.state = out.state
        return out

    def _choose(self, program: jax.stages.Compiled, forwarded: Forwarded) -> Chosen:
        last_tokens, tokens = program(forwarded.logits, forwarded.sampling, self.state.last_tokens)
        self.state = self.state._replace(last_tokens=last_tokens)
        return Chosen(tokens)

    def _choose_masked(
        self,
        programs: Sequence[jax.stages.Compiled],
        forwarded: Forwarded,
        inputs: StepInputs,
        masks: npt.NDArray[np.uint32],
    ) -> Chosen:
        program, features = programs[0], inputs.features
        scored = features is not None and features.logprobs
        copy, mask, score = self._programs.masking(inputs.bucket.num_choices)
        own = copy(forwarded.logits) if scored else None
        logits, sampling = mask(forwarded.logits, forwarded.sampling, masks)
        masked = forwarded._replace(logits=logits, sampling=sampling)
        if features is None:
            return self._completed(programs[1:], forwarded, inputs, self._choose(program, masked))
        chosen = self._choose_featured(program, masked, features)
        if own is not None:
            scores = score(own, chosen.tokens, self.state.edit_tables.edits, features.edit_rows)
            chosen = chosen._replace(outputs=scores)
        return self._completed(programs[1:], forwarded, inputs, chosen)

    def _choose_featured(self, program: jax.stages.Compiled, forwarded: Forwarded, features: StepFeatures) -> Chosen:
        state = self.state
        tables = state.edit_tables
        for setup in features.row_setups:
            tables = self._programs.set_row(tables, setup)
        out = program(forwarded.logits, forwarded.sampling, state.last_tokens, tables, features.edit_rows)
        self.state = state._replace(last_tokens=out.last_tokens, edit_tables=out.edit_tables)
        return Chosen(out.tokens, out.outputs if features.logprobs else NO_OUTPUTS)

    def encode(self, call: EncodeInputs | EncodePart) -> jax.Array:
        """Launches a call of the vision tower, or a part of one; returns the pool of embeddings."""
        if isinstance(call, EncodePart):
            assert self.state.images is not None
            images = self._tower_parts.run(self._params, self.state.images, call)
            self.state = self.state._replace(images=images)
            return images
        program = self._programs.encode(call.bucket)
        images = program(self._params, self.state.images, call.pixels, call.columns, call.rows)
        self.state = self.state._replace(images=images)
        return images
