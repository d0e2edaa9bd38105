"""Warm-up compiles the shapes that the scheduler can ask for, and no others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxsgl.batch.buckets import BucketSet, Capacity, buckets_of
from jaxsgl.batch.inputs import Bucket
from jaxsgl.config.engine import EngineConfig, SchedulingConfig
from jaxsgl.config.features import SpeculationConfig
from jaxsgl.engine.layer_state import layer_states
from jaxsgl.engine.start.memory import Memory
from jaxsgl.engine.start.sizing import choose_page_size, plan_capacity
from jaxsgl.models import arch_from_folder
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.scheduler.speculation.drafter import Drafter, DrafterOf
from tests.engine.conftest import MODEL

CONTEXT, ROWS = 200, 11  # more rows than the fewest sequences of an extend program


def capacity_of(config: EngineConfig, folder: Path) -> Capacity:
    (folder / "config.json").write_text(json.dumps(MODEL | {"max_position_embeddings": CONTEXT}))
    arch = arch_from_folder(folder)
    states = layer_states(arch, choose_page_size(config, "cpu", arch.num_kv_heads, arch.head_dim), jnp.dtype("float32"))
    return plan_capacity(config, arch, states, Memory("cpu", 1 << 40, 1 << 40))


def scheduler_with(
    config: EngineConfig, capacity: Capacity, buckets: BucketSet, decodes: int
) -> tuple[Scheduler, list[Bucket]]:
    """A scheduler in which `decodes` requests decode, and the buckets of its steps so far."""
    scheduler = Scheduler(capacity, buckets, (), config.scheduling, radix_cache=False)
    scheduler.receive([request(f"decode-{i}", 1) for i in range(decodes)])
    buckets_used = []
    for _ in range(2 if decodes else 0):
        inputs = scheduler.launch()
        assert inputs is not None
        buckets_used.append(inputs.bucket)
        scheduler.collect([1] * inputs.num_seqs)
    return scheduler, buckets_used


def request(name: str, length: int, *, scored: bool = False) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=CONTEXT - length, prompt_logprobs=0 if scored else None)
    return Request(name, [2] * length, params)


class Proposing(Drafter):
    """Proposes so many tokens at any time."""

    def __init__(self, count: int) -> None:
        self._count = count

    def propose(self, most: int) -> tuple[int, ...]:
        return (3,) * min(self._count, most)


def proposing(total: int, decodes: int) -> DrafterOf:
    """Drafters that propose `total` tokens for all of `decodes` requests, whose names are numbers."""
    return lambda asked: Proposing((total + int(asked.request_id)) // decodes)


def verifying_steps(config: EngineConfig, capacity: Capacity, buckets: BucketSet) -> Iterator[Bucket]:
    """The buckets of decode steps in which requests propose so many drafts in all."""
    for decodes in range(1, ROWS + 1):
        for total in range(1, decodes * buckets.max_drafts + 1):
            drafter_of = proposing(total, decodes)
            scheduler = Scheduler(capacity, buckets, (), config.scheduling, drafter_of=drafter_of)
            scheduler.receive([request(f"{i}", 1) for i in range(decodes)])
            for _ in range(2):
                inputs = scheduler.launch()
                assert inputs is not None
                if inputs.bucket.kind == "verify":
                    yield inputs.bucket
                    break
                scheduler.collect([1] * inputs.num_seqs)


def lengths_of(prompts: int, tokens: int) -> list[int] | None:
    """Lengths of prompts that have `tokens` tokens together; the last ones are short and so have no tail to shed."""
    if not prompts <= tokens <= prompts * (CONTEXT - 1):
        return None
    lengths = [1] * prompts
    left = tokens - prompts
    for i in range(prompts):
        lengths[i] += min(left, CONTEXT - 2)
        left -= lengths[i] - 1
    return lengths


def steps(config: EngineConfig, capacity: Capacity, buckets: BucketSet) -> Iterator[Bucket]:
    """The buckets of many steps: some requests decode, then some prompts arrive with so many tokens in all."""
    edges = sorted({size + 1 for size in buckets.extend_sizes[:-1]} | {*buckets.extend_sizes, CONTEXT - 1, 1000})
    for scored, decodes, prompts in product((False, True), (0, 1, 9, ROWS - 1), (1, 2, 9, ROWS)):
        for tokens in edges if decodes + prompts <= ROWS else ():
            lengths = lengths_of(prompts, tokens - decodes)
            if lengths is None:
                continue
            scheduler, used = scheduler_with(config, capacity, buckets, decodes)
            yield from used
            scheduler.receive([request(f"{i}", length, scored=scored) for i, length in enumerate(lengths)])
            inputs = scheduler.launch()
            assert inputs is not None
            yield inputs.bucket
    for decodes in range(1, ROWS + 1):
        yield from scheduler_with(config, capacity, buckets, decodes)[1]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"chunked_prefill_size": 64},
        {"chunked_prefill_size": 64, "max_prefill_tokens": 40},
        {"chunked_prefill_size": 512},
        {"chunked_prefill_size": -1, "max_prefill_tokens": 40},
        {"chunked_prefill_size": -1, "max_prefill_tokens": 300},
        {"chunked_prefill_size": 64, "decode_buckets": (4, 11, 30), "extend_buckets": (50, 230, 600)},
        {"chunked_prefill_size": -1, "max_prefill_tokens": 40, "extend_buckets": (50, 230, 600)},
    ],
    ids=lambda settings: " ".join(f"{name}={value}" for name, value in settings.items()),
)
def test_compiled_shapes_are_those_that_steps_can_have(tmp_path: Path, settings: dict[str, Any], mixed: bool) -> None:
    settings = dict(settings)
    scheduling = SchedulingConfig(
        enable_mixed_chunk=mixed, max_prefill_tokens=settings.pop("max_prefill_tokens", 16384)
    )
    config = EngineConfig(max_running_requests=ROWS, page_size=4, scheduling=scheduling, **settings)
    capacity = capacity_of(config, tmp_path)
    buckets = buckets_of(config, capacity)
    compiled = {replace(bucket, sampled=False, featured=False, filtered=False) for bucket in buckets.all()}
    assert set(steps(config, capacity, buckets)) == compiled


@pytest.mark.parametrize("sizes", [(), (4, 11, 30)])
@pytest.mark.parametrize("num_drafts", [1, 3, 8])
def test_compiled_shapes_for_drafts_are_those_that_steps_can_have(
    tmp_path: Path, num_drafts: int, sizes: tuple[int, ...]
) -> None:
    config = EngineConfig(
        max_running_requests=ROWS,
        page_size=4,
        decode_buckets=sizes,
        speculation=SpeculationConfig("NGRAM", num_drafts),
    )
    capacity = capacity_of(config, tmp_path)
    buckets = buckets_of(config, capacity)
    compiled = {bucket for bucket in buckets.all() if bucket.kind == "verify" and not bucket.sampled}
    assert set(verifying_steps(config, capacity, buckets)) == compiled
