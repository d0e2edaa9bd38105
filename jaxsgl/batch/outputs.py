"""What a device step yields besides tokens: `StepOutputs`, and the table `OUTPUTS` of the arrays that a bucket has.

A new output begins here, with a field and a row of the table. The programs' results and where they lie
(`engine/sampling/outputs.py`, `engine/step_programs.py`), the copy to the host, the dry run and the fake engine follow
the table. Knows nothing about requests: `scheduler/outputs.py` hands the arrays out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from jaxsgl.batch.inputs import Axis, Bucket, StepInputs

ArrayT = TypeVar("ArrayT")
LeafT = TypeVar("LeafT")


class StepOutputs(NamedTuple, Generic[ArrayT]):
    """Arrays by token and by sequence: JAX arrays that programs return, then NumPy arrays without padding.

    None where the bucket, or the model, has no such array. K is `request.MAX_TOP_LOGPROBS`, or the vocabulary's size if
    that is less; A is `request.MAX_LOGPROB_TOKEN_IDS`, C is `Bucket.num_choices`. Log-probabilities are natural ones by
    the model's own logits.

    Attributes:
      prompt_logprobs: `[T]` float32, of the `targets` of a "score" step.
      prompt_top_ids: `[T, K]` int32, the most likely tokens in the targets' places, best first.
      prompt_top_logprobs: `[T, K]` float32, of `prompt_top_ids`.
      pooled: `[S, D]` float32, the hidden state of a token of each sequence, or the sum over its tokens, or what a
        folder's matrices make of that.
      label_logits: `[S, L]` float32, of its `label_ids`, or of the labels of a classification head.
      log_total: `[S]` float32, see `Pooled`; None if the server doesn't generate.
      hidden: `[T, D]` float32, the hidden state of each token after the last norm.
      experts: `[T, layers, k]` int32, -1 in layers without experts; None if the model has none.
      logprobs, top_ids, top_logprobs: `[C]`, `[C, K]` and `[C, K]`, as those of the prompt, of the chosen tokens.
      named_logprobs: `[C, A]` float32, in their places, of the tokens that the request names.
    """

    prompt_logprobs: ArrayT | None = None
    prompt_top_ids: ArrayT | None = None
    prompt_top_logprobs: ArrayT | None = None
    pooled: ArrayT | None = None
    label_logits: ArrayT | None = None
    log_total: ArrayT | None = None
    hidden: ArrayT | None = None
    experts: ArrayT | None = None
    logprobs: ArrayT | None = None
    top_ids: ArrayT | None = None
    top_logprobs: ArrayT | None = None
    named_logprobs: ArrayT | None = None


HostOutputs: TypeAlias = StepOutputs[npt.NDArray[Any]]
NO_OUTPUTS: StepOutputs[Any] = StepOutputs()


@dataclass(frozen=True)
class Output:
    """A row of the table: an array that steps may yield.

    Attributes:
      shape: its axes; the first one is "T", padded tokens, "S", padded sequences, or "C", padded tokens to choose.
      dtype: its numbers.
      when: whether steps of a bucket yield it.
      made_by: the program that returns it: "forward", or "choice", which chooses the tokens of a featured bucket.
      depends_on_model: whether it is left out where the server generates nothing, or the model has no such thing.
    """

    shape: tuple[str, ...]
    dtype: type[np.generic]
    when: Callable[[Bucket], bool]
    made_by: Literal["forward", "choice"] = "forward"
    depends_on_model: bool = False

    @property
    def axis(self) -> Axis:
        """The first of `shape`."""
        return cast(Axis, self.shape[0])


def _scores(bucket: Bucket) -> bool:
    return bucket.kind == "score"


def _pools(bucket: Bucket) -> bool:
    return bucket.pools


def _states(bucket: Bucket) -> bool:
    return bucket.states


def _featured(bucket: Bucket) -> bool:
    return bucket.featured


OUTPUTS: dict[str, Output] = {
    "prompt_logprobs": Output(("T",), np.float32, _scores),
    "prompt_top_ids": Output(("T", "K"), np.int32, _scores),
    "prompt_top_logprobs": Output(("T", "K"), np.float32, _scores),
    "pooled": Output(("S", "pooled"), np.float32, _pools),
    "label_logits": Output(("S", "L"), np.float32, _pools),
    "log_total": Output(("S",), np.float32, _pools, depends_on_model=True),
    "hidden": Output(("T", "D"), np.float32, _states),
    "experts": Output(("T", "layers", "k"), np.int32, _states, depends_on_model=True),
    "logprobs": Output(("C",), np.float32, _featured, "choice"),
    "top_ids": Output(("C", "K"), np.int32, _featured, "choice"),
    "top_logprobs": Output(("C", "K"), np.float32, _featured, "choice"),
    "named_logprobs": Output(("C", "A"), np.float32, _featured, "choice"),
}


def of_forward(bucket: Bucket, leaf: LeafT) -> StepOutputs[LeafT]:
    """`leaf` in the place of each array that the forward program of `bucket` may return."""
    made = (output.made_by == "forward" and output.when(bucket) for output in OUTPUTS.values())
    return StepOutputs(*(leaf if is_made else None for is_made in made))


def wanted(inputs: StepInputs) -> list[str]:
    """The arrays of a step that its requests may ask for; what chooses tokens yields some in vain."""
    logprobs = inputs.features is not None and inputs.features.logprobs
    return [
        name
        for name, output in OUTPUTS.items()
        if output.when(inputs.bucket) and (logprobs or output.made_by == "forward")
    ]


def on_host(parts: Iterable[StepOutputs[Any]], inputs: StepInputs) -> HostOutputs:
    """NumPy arrays of all `parts` of a step of `inputs`, without padding; waits for the device."""
    return StepOutputs(
        **{
            name: inputs.without_padding(np.asarray(array), OUTPUTS[name].axis)
            for part in parts
            for name, array in part._asdict().items()
            if array is not None
        }
    )


def by_rank(outputs: HostOutputs, inputs: StepInputs) -> list[HostOutputs]:
    """The part of each of `inputs.of_ranks`, of arrays without padding."""
    parts = []
    first: dict[Axis, int] = {"T": 0, "S": 0, "C": 0}
    for rank in inputs.of_ranks:
        stop = {axis: first[axis] + rank.count(axis) for axis in first}
        arrays = (
            None if array is None else array[first[output.axis] : stop[output.axis]]
            for output, array in zip(OUTPUTS.values(), outputs, strict=True)
        )
        parts.append(StepOutputs(*arrays))
        first = stop
    return parts


def check_outputs(outputs: HostOutputs, inputs: StepInputs) -> None:
    """Raises AssertionError unless `outputs`, without padding, are those that the table gives to `inputs`."""
    names = wanted(inputs)
    sizes = {"T": inputs.num_tokens, "S": inputs.num_seqs, "C": inputs.num_choices}
    for (name, output), array in zip(OUTPUTS.items(), outputs, strict=True):
        if array is None:
            assert name not in names or output.depends_on_model, f"a step of [{inputs.bucket}] yields no {name}"
            continue
        assert name in names, f"a step of [{inputs.bucket}] yields {name}"
        assert array.dtype == output.dtype, f"{name} is {array.dtype}"
        of_axes = dict(zip(output.shape, array.shape, strict=True))
        assert all(sizes.setdefault(axis, size) == size for axis, size in of_axes.items()), f"{name}: {array.shape}"
