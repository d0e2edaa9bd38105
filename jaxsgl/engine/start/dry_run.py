"""Runs every compiled program once before the engine is ready: what can't run fails at start, not under a client.

A step of padding writes the dummy page and the dummy row only, so the state afterwards is as good as new. Called by
`engine`; `step_failure` also names the way out for what XLA raises while it compiles. Knows nothing about requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.build import empty_step
from jaxsgl.batch.engine_api import StepHandle
from jaxsgl.batch.inputs import Bucket, StepInputs
from jaxsgl.batch.joint import joined
from jaxsgl.batch.outputs import check_outputs
from jaxsgl.batch.patches import EncodeInputs, EncodePart, empty_call
from jaxsgl.engine.programs import ProgramKey
from jaxsgl.engine.start.memory import OUT_OF_MEMORY
from jaxsgl.engine.step_programs import StepPrograms, keys_of, mask_sizes
from jaxsgl.errors import StartupError

MAX_REASON = 400  # characters of XLA's message


def run_all(
    submit: Callable[[StepInputs], StepHandle],
    buckets: Iterable[Bucket],
    capacity: Capacity,
    account: str,
    *,
    drafts: bool = False,
    num_ranks: int = 1,
) -> None:
    """Runs a step of padding in so many of `buckets` that each of their programs has run, and waits for each.

    `account` says where memory went, for the error. With `drafts` each step is followed by its draft program.

    Raises:
      StartupError: a program can't be launched, or fails on the device.
    """
    for bucket in covering(buckets):
        with step_failure(f"the program for [{bucket}] can't run", account):
            inputs = replace(empty_step(bucket, capacity.num_rows, capacity.vocab_size), drafts=drafts)
            if num_ranks > 1:
                inputs = joined(bucket, [inputs] * num_ranks, capacity.num_rows, capacity.vocab_size)
            step = submit(inputs)
            step.tokens()
            if drafts:
                step.drafts()
            check_outputs(step.outputs(), inputs)


def run_passing(
    submit: Callable[[StepInputs], StepHandle], buckets: Iterable[Bucket], capacity: Capacity, account: str
) -> None:
    """Runs the steps of `run_all` where another host has the last pipeline stage, and so their outputs."""
    for bucket in covering(buckets):
        with step_failure(f"the program for [{bucket}] can't run", account):
            submit(empty_step(bucket, capacity.num_rows, capacity.vocab_size)).tokens()


def run_masks(programs: StepPrograms, account: str) -> None:
    """Runs the programs for masks on zeros, if there are any, and waits for them. Errors as of `run_all`."""
    for num_seqs in mask_sizes(programs.buckets) if programs.spec.masks else ():
        with step_failure(f"the programs for masks of {num_seqs} sequences can't run", account):
            wanted = programs.spec.masking(num_seqs)
            for program, compiled in zip(wanted, programs.masking(num_seqs), strict=True):
                jax.block_until_ready(compiled(*(_zeros(array) for array in program.arguments)))


def _zeros(array: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(np.zeros(array.shape, array.dtype), array.sharding)


def run_tower(
    encode: Callable[[EncodeInputs | EncodePart], jax.Array], buckets: BucketSet, capacity: Capacity, account: str
) -> None:
    """Runs a call of the vision tower on padding in each shape, and one in parts; waits for each.

    Errors as of `run_all`.
    """
    for bucket in buckets.encode:
        assert capacity.tower is not None
        with step_failure(f"the vision tower can't encode {bucket.num_patches} patches", account):
            call, num_layers = empty_call(bucket, capacity.tower), capacity.tower.shape.num_layers
            jax.block_until_ready(encode(call))
            if bucket in buckets.encode_in_parts:
                jax.block_until_ready(encode(EncodePart(call, 0, num_layers, num_layers)))


def covering(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Buckets that together run every program of `buckets`; a program that several need runs in its smallest step."""
    chosen: list[Bucket] = []
    seen: set[ProgramKey] = set()
    for bucket in sorted(buckets, key=lambda bucket: (bucket.num_tokens, not bucket.featured, not bucket.sampled)):
        keys = keys_of(bucket)
        if not seen.issuperset(keys):
            chosen.append(bucket)
            seen.update(keys)
    return chosen


@contextmanager
def step_failure(what: str, account: str) -> Iterator[None]:
    """Turns what XLA raises inside into a `StartupError` that says which flags to change.

    `account` says where memory went (`Memory.account`); it is empty if the device doesn't tell.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())[:MAX_REASON]
        if OUT_OF_MEMORY in reason:
            way_out = f"{account}: " if account else ""
            way_out += (
                "lower --chunked-prefill-size or --max-running-requests, which make steps smaller, or "
                "--mem-fraction-static or --max-total-tokens, which make the KV pool smaller"
            )
        else:
            way_out = "try another --attention-backend or other --kernels, or a lower --chunked-prefill-size or "
            way_out += "--max-running-requests"
        raise StartupError(f"{what}: {reason}: {way_out}") from error
