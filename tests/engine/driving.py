"""Builds steps by hand, without a scheduler: row r owns pages 1 + r P .. (r + 1) P."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partialmethod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxsgl.batch import buckets
from jaxsgl.batch.buckets import Capacity
from jaxsgl.batch.build import BatchBuilder, Work
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.batch.sampling import SamplingRows
from jaxsgl.cache.pages import PageTable
from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.models import StepContext, abstract_model, arch_from_folder
from jaxsgl.weights import random_params
from tests.grids import NIGHTLY
from tests.plain_model import causal_attend, mesh_of


class Driver:
    """Extends and decodes rows of an engine, each row's sequence being its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        capacity = engine.capacity
        self.sampling = SamplingRows(capacity.num_rows)
        self.table = PageTable(capacity.num_rows, capacity.max_pages_per_seq)
        self.table.pages[:] = own_pages(capacity)
        self.builder = BatchBuilder(engine.buckets, self.table, self.sampling, capacity.page_size)

    def extend(self, *parts: tuple[int, Sequence[int], int], sample: bool = True) -> StepInputs:
        """`parts` are (row, token ids, tokens before them)."""
        works = [Work(row, np.array(ids, np.int32), start, sample) for row, ids, start in parts]
        return self.builder.extend(works)

    def decode(self, positions: dict[int, int], steps: Sequence[int] | None = None) -> StepInputs:
        """The rows' last sampled tokens, which stand at `positions[row]`; or `steps` of each from there on."""
        rows, places = (np.array(list(part), np.int32) for part in (positions.keys(), positions.values()))
        return self.builder.decode(rows, places, None if steps is None else np.array(steps, np.int32))

    def run(self, inputs: StepInputs) -> list[int]:
        return self.engine.submit(inputs).tokens().tolist()

    def generate(self, prompts: Mapping[int, Sequence[int]], num_tokens: int, chunk: int = 16) -> dict[int, list[int]]:
        """Extends prompts in chunks, row after row; then all rows decode together, launched ahead of reading."""
        out = {}
        for row, prompt in prompts.items():
            for start in range(0, len(prompt), chunk):
                part = prompt[start : start + chunk]
                inputs = self.extend((row, part, start), sample=start + len(part) == len(prompt))
                out[row] = self.run(inputs)
        handles = [
            self.engine.submit(self.decode({row: len(prompt) + i for row, prompt in prompts.items()}))
            for i in range(num_tokens - 1)
        ]
        for handle in handles:
            for row, token in zip(prompts, handle.tokens().tolist(), strict=True):
                out[row].append(token)
        return out


def own_pages(capacity: Capacity) -> np.ndarray:
    """The pages of every row."""
    width = capacity.max_pages_per_seq
    return 1 + np.arange(capacity.num_rows * width, dtype=np.int32).reshape(capacity.num_rows, width)


class Plain:
    """The same random model without pages, buckets or batches: the oracle."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.arch = arch_from_folder(folder)
        self._seed = seed

    @cached_property
    def _run(self):
        graphdef, _ = abstract_model(self.arch, jnp.dtype("float32"))
        model = nnx.merge(graphdef, random_params(self.arch, jnp.dtype("float32"), mesh_of(), self._seed))
        positions = jnp.arange(self.arch.max_context)
        context = StepContext(causal_attend(self.arch))
        return jax.jit(lambda token_ids: model.logits(model(token_ids, positions, context)))

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """`[T, V]`; padded to one length, which the causal mask hides, so that one program serves all."""
        padded = [*token_ids, *[0] * (self.arch.max_context - len(token_ids))]
        return np.asarray(self._run(np.array(padded, np.int32)))[: len(token_ids)]

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy tokens."""
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]


def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines compile greedy steps alone; of those that verify, by day, the largest alone."""
    few_sizes(monkeypatch)
    greedy_programs(monkeypatch)


def greedy_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines compile greedy steps alone, by day none that scores a prompt: for tests whose requests are greedy."""
    monkeypatch.setattr(buckets, "VARIANTS", (buckets.GREEDY,))
    no_scores_of_prompts(monkeypatch)


def no_scores_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines compile no step that scores a prompt, a third of an engine's larger programs, unless it is night."""
    for name in () if NIGHTLY else ("_all_without_images", "_largest_without_images"):
        every = getattr(buckets.BucketSet, name)
        monkeypatch.setattr(buckets.BucketSet, name, partialmethod(_unscored, every))


def _unscored(of: buckets.BucketSet, every: Callable[[buckets.BucketSet], Any]) -> Any:
    found = every(of)
    return type(found)(bucket for bucket in found if bucket.kind != "score")


@contextmanager
def greedy_engine(config: EngineConfig, **options: Any) -> Iterator[Engine]:
    """An engine that runs greedy steps alone, which is closed in the end."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        greedy_programs(monkeypatch)
        engine = Engine(config, progress=False, **options)
    try:
        yield engine
    finally:
        engine.close()


def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines compile the largest of the steps that verify alone, unless it is night."""
    if not NIGHTLY:
        all_sizes = buckets._verify_sizes
        monkeypatch.setattr(buckets, "_verify_sizes", lambda *sizes: all_sizes(*sizes)[-1:])
