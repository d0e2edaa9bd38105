"""The engine's real steps on models that people serve, as programs to compile: what `Engine` would compile and run.

A table of models, of batches and of kinds of sampling gives the programs. Few layers are compiled: from the second on
all layers are alike, so `report` reads one layer and multiplies. Called by `compile_for`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh

from bench.models import SHAPES, write_config
from bench.targets.programs import Program, placed
from bench.targets.targets import Target
from jaxsgl.batch.buckets import BucketSet, Capacity, buckets_of
from jaxsgl.batch.inputs import Bucket
from jaxsgl.config import EngineConfig
from jaxsgl.engine.memory import Memory
from jaxsgl.engine.programs import ProgramKey, ProgramSpec, keys_of
from jaxsgl.engine.sizing import KvShape, choose_page_size, kv_shape, plan_capacity
from jaxsgl.engine.state import abstract_state
from jaxsgl.models import ModelArch, abstract_model, resolve_precision

MODELS = ("qwen3-0.6b", "qwen3-8b")  # of `bench.models.SHAPES`; a model more is a line more
COMPILED_LAYERS = 4
MEM_FRACTION = 0.85  # of the chip's memory for weights and pool, as the engine's own default
DECODE_ROWS = (1, 32, 256)
EXTEND_TOKENS, EXTEND_SEQS = 4096, 4
SAMPLINGS = {"greedy": (False, False), "sampled": (True, False), "featured": (True, True)}  # sampled, featured


@dataclasses.dataclass(frozen=True)
class Served:
    """A model as the engine would serve it on a chip: everything that its programs' shapes depend on."""

    name: str
    arch: ModelArch
    page: KvShape
    capacity: Capacity
    buckets: BucketSet

    def bucket(self, kind: str, size: int, sampling: str) -> Bucket:
        """The bucket of a batch of the table."""
        sampled, featured = SAMPLINGS[sampling]
        if kind == "decode":
            return self.buckets.decode(size, sampled, featured)
        return self.buckets.extend(size, EXTEND_SEQS, sampled, featured)

    def table(self) -> Iterator[tuple[str, int, str, list[ProgramKey]]]:
        """Yields kind, size and sampling of each batch of the table, and the programs that it runs."""
        for kind, size in (*(("decode", rows) for rows in DECODE_ROWS), ("extend", EXTEND_TOKENS)):
            for sampling in SAMPLINGS:
                yield kind, size, sampling, keys_of(self.bucket(kind, size, sampling))


def served(name: str, target: Target, folder: Path) -> Served | None:
    """The model on that chip; None where it doesn't fit."""
    home = write_config(name, folder / name)
    config = EngineConfig(model=str(home), chunked_prefill_size=EXTEND_TOKENS)
    arch = ModelArch.from_folder(home)
    platform = "gpu" if target.platform == "cuda" else target.platform
    dtype, _, kv_dtype = resolve_precision(
        config.dtype, config.kv_cache_dtype, arch, platform, cpu_multiplies_bfloat16=lambda: False
    )
    page = kv_shape(arch, choose_page_size(config, arch.head_dim, platform), kv_dtype)
    _, params = abstract_model(arch, dtype)
    weights = sum(leaf.size for leaf in jax.tree.leaves(params)) * dtype.itemsize
    static = int(target.memory_bytes * MEM_FRACTION) - weights
    if static <= 0:
        return None
    capacity = plan_capacity(config, arch, page, Memory(platform, static, target.memory_bytes - weights))
    return Served(name, arch, page, capacity, buckets_of(config, capacity))


def engine_programs(model: Served, backend: str, mesh: Mesh) -> Iterator[Program]:
    """Yields each program of the table once, with few layers."""
    arch = dataclasses.replace(model.arch, num_layers=COMPILED_LAYERS)
    page = dataclasses.replace(model.page, num_layers=COMPILED_LAYERS)
    graphdef, params = abstract_model(arch, page.dtype)
    leaves = nnx.from_flat_state([(path, placed(param, mesh)) for path, param in nnx.to_flat_state(params)])
    state = abstract_state(page, model.capacity, mesh)
    spec = ProgramSpec(graphdef, leaves, state, backend, mesh)
    seen = set()
    for _, _, _, keys in model.table():
        for key in keys:
            if key in seen:
                continue
            seen.add(key)
            yield Program(
                f"{program_name(model.name, key)} {backend}",
                backend,
                functools.partial(spec.trace, key),
                state.kv.k[0],
                num_donated=2 * COMPILED_LAYERS if key.kind == "forward" else 0,
                on_matrix_units=False,
                num_layers=model.arch.num_layers if key.kind == "forward" else None,
                page_table=(key.shape.num_seqs, key.shape.num_pages) if isinstance(key.shape, Bucket) else None,
            )


def program_name(model: str, key: ProgramKey) -> str:
    """Such as "qwen3-0.6b decode 256", or "qwen3-0.6b sampling 256"."""
    if isinstance(key.shape, Bucket):
        return f"{model} {key.shape.kind} {key.shape.num_tokens}"
    return f"{model} {key.kind} {key.shape}"


assert set(MODELS) <= set(SHAPES)
