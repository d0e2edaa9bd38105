"""A step in flight on the device, and what the host reads of it. Made by `engine`; knows no program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import numpy.typing as npt

from jaxsgl.batch.engine_api import PooledRows, StatesRows, StepScores, TokenScores
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.engine.pooling import PooledSeqs, TokenArrays
from jaxsgl.engine.sampler import Logprobs


class Chosen(NamedTuple):
    """The tokens of a step, `[S]` or `[num_steps, S]`, and their log-probabilities if they are wanted."""

    tokens: jax.Array
    scores: Logprobs | None = None


Choose: TypeAlias = Callable[[npt.NDArray[np.uint32]], Chosen]


class DeviceHandle:
    """A step in flight: the device computes it, and copies to the host what the host will read."""

    def __init__(
        self,
        inputs: StepInputs,
        chosen: Chosen | None,
        prompt: Logprobs | None = None,
        pooled: PooledSeqs | None = None,
        has_classes: bool = False,
        choose: Choose | None = None,
        states: TokenArrays | None = None,
    ) -> None:
        """`chosen` are tokens and their scores; None: `choose` tells them once there are masks."""
        self._inputs = inputs
        self._chosen = chosen
        self._prompt = prompt
        self._pooled, self._has_classes = pooled, has_classes
        self._choose, self._states = choose, states
        for array in jax.tree.leaves((chosen, prompt, pooled, states)):
            array.copy_to_host_async()

    def choose(self, masks: npt.NDArray[np.uint32]) -> None:
        """Launches the choice of a `masked` step's tokens; never waits for the device. See `MaskedHandle`."""
        assert self._choose is not None and self._chosen is None, "the step needs no masks, or has got them"
        self._chosen = self._choose(masks)
        for array in jax.tree.leaves(self._chosen):
            array.copy_to_host_async()

    def tokens(self) -> npt.NDArray[np.int32]:
        """Waits for the step; sampled ids `[num_seqs]`, of several steps `[num_steps, num_seqs]`.

        Raises what the device raised, if the step failed.
        """
        assert self._chosen is not None, "the step waits for masks"
        return np.asarray(self._chosen.tokens)[..., : self._inputs.num_seqs]

    def scores(self) -> StepScores:
        """Waits for the step; what the batch asked for beside tokens."""
        assert self._chosen is not None, "the step waits for masks"
        sampled, prompt, pooled, num_seqs = self._chosen.scores, self._prompt, self._pooled, self._inputs.num_seqs
        rows = None
        if pooled is not None:
            hidden, logits, total = jax.tree.map(lambda x: np.asarray(x)[:num_seqs], tuple(pooled))
            rows = PooledRows(hidden, logits, total, self._has_classes)
        return StepScores(
            None if sampled is None else TokenScores(*(np.asarray(x)[:num_seqs] for x in sampled)),
            None if prompt is None else TokenScores(*(np.asarray(x)[: self._inputs.num_tokens] for x in prompt)),
            rows,
            None if self._states is None else StatesRows(*self._of_tokens(self._states)),
        )

    def _of_tokens(self, arrays: TokenArrays) -> Any:
        """Waits for `arrays`; without padding."""
        return jax.tree.map(lambda x: np.asarray(x)[: self._inputs.num_tokens], tuple(arrays))
