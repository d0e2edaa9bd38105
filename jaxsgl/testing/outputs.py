"""What a fake step yields besides tokens: each array of the table `OUTPUTS`, made of the sequences that it rebuilt.

`testing.engine.FakeEngine` calls it; tests compute what they expect with the same functions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxsgl.batch.buckets import Capacity
from jaxsgl.batch.inputs import StepArrays, StepInputs
from jaxsgl.batch.outputs import OUTPUTS, HostOutputs, StepOutputs, check_outputs, wanted
from jaxsgl.cache.pages import IntArray
from jaxsgl.requests.request import MAX_TOP_LOGPROBS

_RANKS = range(MAX_TOP_LOGPROBS)


class FakeStep(NamedTuple):
    """A step that has run: its sequences as its page table says, and what it has chosen and named `[num_choices]`."""

    capacity: Capacity
    inputs: StepInputs
    arrays: StepArrays[npt.NDArray[Any]]
    sequences: Sequence[IntArray]
    tokens: npt.NDArray[np.int32]
    named_ids: IntArray  # `[num_choices, A]`

    @property
    def prefixes(self) -> Iterator[IntArray]:
        """Each sequence up to each token of the step, that token included."""
        for sequence, count in zip(self.sequences, np.diff(self.arrays.query_offsets), strict=False):
            for end in range(len(sequence) - count, len(sequence)):
                yield sequence[: end + 1]

    @property
    def targets(self) -> Iterator[tuple[IntArray, int]]:
        """The sequence up to each token, and the prompt's next token."""
        assert self.arrays.targets is not None
        return zip(self.prefixes, self.arrays.targets.tolist(), strict=False)

    @property
    def chosen(self) -> Iterator[tuple[IntArray, int]]:
        """Each sequence, in a verify step up to each of its tokens, and the token chosen after it."""
        after = self.prefixes if self.inputs.bucket.kind == "verify" else self.sequences
        return zip(after, self.tokens.tolist(), strict=True)


def hidden_state(sequence: Sequence[int] | IntArray) -> float:
    """The hidden state `[1]` of the last token of `sequence`: a hash of all of it."""
    return float(zlib.crc32(np.asarray(sequence, dtype=np.int32).tobytes()) % 1000)


def label_logit(sequence: Sequence[int] | IntArray, token_id: int) -> float:
    """The logit of `token_id` after `sequence`."""
    return hidden_state([*sequence, token_id])


def logprob(sequence: Sequence[int] | IntArray, token: int) -> float:
    """The log-probability of `token` after `sequence`; it is the best one, and the i-th best one's is less by i."""
    return -hidden_state([*sequence, token])


def _pooled(step: FakeStep) -> list[list[float]]:
    assert step.capacity.pooling is not None
    takes_mean = step.capacity.pooling.kind == "mean"
    found = []
    for sequence, count in zip(step.sequences, np.diff(step.arrays.query_offsets), strict=False):
        first = len(sequence) - (count if takes_mean else 1)
        found.append([sum(hidden_state(sequence[: end + 1]) for end in range(first, len(sequence)))])
    return found


def _label_logits(step: FakeStep) -> list[list[float]]:
    assert step.arrays.label_ids is not None
    labels = zip(step.sequences, step.arrays.label_ids.tolist(), strict=False)
    return [[label_logit(sequence, token) for token in ids] for sequence, ids in labels]


_MAKERS: dict[str, Callable[[FakeStep], Sequence[Any] | None]] = {
    "prompt_logprobs": lambda step: [logprob(*pair) for pair in step.targets],
    "prompt_top_ids": lambda step: [[token + rank for rank in _RANKS] for _, token in step.targets],
    "prompt_top_logprobs": lambda step: [[logprob(*pair) - rank for rank in _RANKS] for pair in step.targets],
    "pooled": _pooled,
    "label_logits": _label_logits,
    "log_total": lambda _: None,
    "hidden": lambda step: [[hidden_state(prefix)] for prefix in step.prefixes],
    "experts": lambda step: [[[len(prefix) - 1, int(prefix[-1])]] for prefix in step.prefixes],  # position and token
    "logprobs": lambda step: [logprob(*pair) for pair in step.chosen],
    "top_ids": lambda step: [[token + rank for rank in _RANKS] for _, token in step.chosen],
    "top_logprobs": lambda step: [[logprob(*pair) - rank for rank in _RANKS] for pair in step.chosen],
    "named_logprobs": lambda step: [
        [logprob(sequence, named) for named in ids]
        for (sequence, _), ids in zip(step.chosen, step.named_ids.tolist(), strict=True)
    ],
}


def outputs_of(step: FakeStep) -> HostOutputs:
    """The arrays that the table gives to the step."""
    made = {name: _MAKERS[name](step) for name in wanted(step.inputs)}
    arrays = {name: np.array(rows, OUTPUTS[name].dtype) for name, rows in made.items() if rows is not None}
    outputs: HostOutputs = StepOutputs(**arrays)
    check_outputs(outputs, step.inputs)
    return outputs
