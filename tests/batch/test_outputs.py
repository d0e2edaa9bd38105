"""The table of what steps yield besides tokens: every part that follows it gets the same arrays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.build import empty_step
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.outputs import (
    NO_OUTPUTS,
    OUTPUTS,
    HostOutputs,
    StepOutputs,
    check_outputs,
    of_forward,
    on_host,
    wanted,
)
from jaxsgl.requests.outputs import PoolingSpec, StatesSpec

SIZES = Capacity(
    4, 200, 8, 128, 128, 1000, pooling=PoolingSpec(dimension=3), states=StatesSpec(True, True, 3, num_layers=2, top_k=2)
)
AXES = {"A": 32, "T": 32, "S": 8, "C": 8, "K": 20, "D": 3, "pooled": 3, "L": 16, "layers": 2, "k": 2}


def padded(inputs: StepInputs) -> HostOutputs:
    """What a device yields of a step of `AXES`."""
    arrays = {name: OUTPUTS[name] for name in wanted(inputs)}
    return StepOutputs(**{name: np.zeros([AXES[axis] for axis in o.shape], o.dtype) for name, o in arrays.items()})


def test_the_table_has_a_row_for_each_field_in_their_order() -> None:
    assert tuple(OUTPUTS) == StepOutputs._fields


def test_each_bucket_yields_what_its_batches_may_ask_for_and_nothing_else() -> None:
    seen = set()
    for bucket in BucketSet.derive(SIZES, decode_steps=4).all():
        names = set(wanted(empty_step(bucket, SIZES.num_rows, SIZES.vocab_size)))
        seen |= names
        assert ("prompt_logprobs" in names) == (bucket.kind == "score")
        assert ("pooled" in names) == ("label_logits" in names) == bucket.pools
        assert ("hidden" in names) == ("experts" in names) == bucket.states
        assert ("logprobs" in names) == bucket.featured
        forward = of_forward(bucket, True)._asdict()
        assert {name for name, is_made in forward.items() if is_made} == {
            name for name in names if OUTPUTS[name].made_by == "forward"
        }
    assert seen == set(OUTPUTS)


def test_the_host_gets_tokens_and_sequences_without_padding() -> None:
    inputs = next(
        replace(empty_step(bucket, 8, 1000), num_tokens=9, num_seqs=2)
        for bucket in BucketSet.derive(SIZES).all()
        if (bucket.kind, bucket.num_tokens, bucket.featured, bucket.states) == ("score", 32, True, True)
    )
    device = padded(inputs)
    of_choice = [name for name, output in OUTPUTS.items() if output.made_by == "choice"]
    chosen = StepOutputs(**{name: getattr(device, name) for name in of_choice})
    forward = device._replace(**dict.fromkeys(of_choice))
    host = on_host((forward, chosen), inputs)
    check_outputs(host, inputs)
    assert host.prompt_top_ids is not None and host.prompt_top_ids.shape == (9, 20)
    assert host.logprobs is not None and host.logprobs.shape == (2,)
    for broken in (host._replace(hidden=None), host._replace(pooled=np.zeros((9, 3), np.float32)), NO_OUTPUTS):
        with pytest.raises(AssertionError):
            check_outputs(broken, inputs)


def test_ranks_without_a_vocabulary_head_share_steps_that_pool() -> None:
    """Such a model yields logits of no labels."""
    bucket = next(bucket for bucket in BucketSet.derive(SIZES).all() if bucket.pools)
    one = replace(empty_step(bucket, 8, 1000), num_tokens=3, num_seqs=1)
    inputs = replace(one, of_ranks=(one, replace(one, num_seqs=2)))
    device = NO_OUTPUTS._replace(
        pooled=np.repeat(np.arange(2, dtype=np.float32), bucket.num_seqs)[:, None],
        label_logits=np.zeros((2 * bucket.num_seqs, 0), np.float32),
    )
    host = on_host((device,), inputs)
    assert host.pooled is not None and host.pooled.tolist() == [[0.0], [1.0], [1.0]]
    assert host.label_logits is not None and host.label_logits.shape == (3, 0)
