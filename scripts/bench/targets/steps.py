"""The engine's real steps on models that people serve, as programs to compile: what `Engine` would compile and run.

A table of models, of batches and of kinds of sampling gives the programs. Few layers are compiled: from the second on
all layers are alike, so `report` reads one layer and multiplies. Called by `compile_for`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from bench.models import write_config
from bench.targets.programs import Program, placed, weights_read
from bench.targets.targets import Target
from jaxsgl.batch.buckets import BucketSet, Capacity, buckets_of
from jaxsgl.batch.inputs import Bucket
from jaxsgl.config import EngineConfig
from jaxsgl.engine.memory import Memory
from jaxsgl.engine.programs import ProgramKey, ProgramSpec, keys_of
from jaxsgl.engine.sizing import KvShape, choose_page_size, kv_shape, plan_capacity
from jaxsgl.engine.state import abstract_state
from jaxsgl.models import ModelArch, abstract_model, resolve_precision
from jaxsgl.models.layer_spec import MoeMlp

MODELS = ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b")  # of `bench.models`; a model more is a line more
COMPILED_LAYERS = 4
MEM_FRACTION = 0.85  # of the chip's memory for weights and pool, as the engine's own default
DECODE_ROWS = (1, 32, 256)
EXTEND_TOKENS, EXTEND_SEQS = 4096, 4
# Fields of the bucket by the name of the sampling.
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"sampled": True},
    "filtered": {"sampled": True, "filtered": True},
    "featured": {"sampled": True, "featured": True},
}


@dataclasses.dataclass(frozen=True)
class Served:
    """A model as the engine would serve it on a chip: everything that its programs' shapes depend on."""

    name: str
    arch: ModelArch
    dtype: jnp.dtype
    page: KvShape
    capacity: Capacity
    buckets: BucketSet

    def bucket(self, kind: str, size: int, sampling: str) -> Bucket:
        """The bucket of a batch of the table."""
        buckets = self.buckets
        greedy = buckets.decode(size, False) if kind == "decode" else buckets.extend(size, EXTEND_SEQS, False)
        return dataclasses.replace(greedy, **SAMPLINGS[sampling])

    def table(self) -> Iterator[tuple[str, list[ProgramKey]]]:
        """Yields the steps of the table, such as "decode 256 greedy", each with the programs that it runs."""
        for kind, size in (*(("decode", rows) for rows in DECODE_ROWS), ("extend", EXTEND_TOKENS)):
            for sampling in SAMPLINGS:
                yield f"{kind} {size} {sampling}", keys_of(self.bucket(kind, size, sampling))

    def facts(self) -> dict[str, int]:
        """What a prediction needs to know of the model."""
        arch = self.arch
        _, params = abstract_model(arch, self.dtype)
        mixtures = [layer.mlp for layer in arch.layers if isinstance(layer.mlp, MoeMlp)]
        return {
            "num_layers": arch.num_layers,
            "num_heads": arch.num_heads,
            "num_kv_heads": arch.num_kv_heads,
            "head_dim": arch.head_dim,
            "hidden_size": arch.hidden_size,
            "vocab_size": arch.vocab_size,
            "weights_read": weights_read(arch, params),
            "weight_itemsize": jnp.dtype(self.dtype).itemsize,
            "kv_itemsize": self.page.dtype.itemsize,
            "page_size": self.page.page_size,
            "expert_weights": sum(3 * each.num_experts * each.ffn_size * arch.hidden_size for each in mixtures),
            "num_experts": mixtures[0].num_experts if mixtures else 0,
            "experts_per_token": mixtures[0].router.top_k if mixtures else 0,
        }


def served(name: str, target: Target, folder: Path, kv_cache_dtype: str = "auto") -> Served | None:
    """The model on that chip, `kv_cache_dtype` as the engine's flag; None where it doesn't fit."""
    home = write_config(name, folder / name)
    config = EngineConfig(model=str(home), chunked_prefill_size=EXTEND_TOKENS, kv_cache_dtype=kv_cache_dtype)
    arch = ModelArch.from_folder(home)
    platform = target.engine_platform
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
    return Served(name, arch, dtype, page, capacity, buckets_of(config, capacity))


def engine_programs(model: Served, backend: str, mesh: Mesh) -> Iterator[Program]:
    """Yields each program of the table once, with few layers."""
    arch = dataclasses.replace(model.arch, layers=model.arch.layers[:COMPILED_LAYERS])
    page = dataclasses.replace(model.page, num_layers=COMPILED_LAYERS)
    graphdef, params = abstract_model(arch, model.dtype)
    leaves = nnx.from_flat_state([(path, placed(param, mesh)) for path, param in nnx.to_flat_state(params)])
    state = abstract_state(page, model.capacity, mesh)
    spec = ProgramSpec(graphdef, leaves, state, backend, mesh)
    facts = model.facts()
    pages: Any = state.kv.k[0]  # a description in the place of an array
    steps: dict[ProgramKey, list[str]] = {}
    for step, keys in model.table():
        for key in keys:
            steps.setdefault(key, []).append(f"{model.name} {backend} {step}")
    for key, names in steps.items():
        yield Program(
            program_name(model, key, backend),
            backend if isinstance(key.shape, Bucket) else "any",
            functools.partial(spec.trace, key),
            pages,
            num_donated=2 * COMPILED_LAYERS if key.kind == "forward" else 0,
            on_matrix_units=False,
            num_layers=model.arch.num_layers if key.kind == "forward" else None,
            page_table=(key.shape.num_seqs, model.capacity.max_pages_per_seq)
            if isinstance(key.shape, Bucket)
            else None,
            steps=tuple(names),
            facts=facts,
            weight_bytes=facts["weights_read"] * facts["weight_itemsize"] if key.kind == "forward" else 0,
        )


def programs_of_models(target: Target, mesh: Mesh, folder: Path, kv_cache_dtype: str = "auto") -> list[Program]:
    """Each program of the table once; those that only sample depend on the vocabulary and serve several models."""
    found: dict[str, Program] = {}
    for name in MODELS:
        model = served(name, target, folder, kv_cache_dtype)
        if model is None:
            continue
        for backend in target.backends:
            for each in engine_programs(model, backend, mesh):
                before = found.get(each.name)
                found[each.name] = dataclasses.replace(each, steps=(*before.steps, *each.steps)) if before else each
    return list(found.values())


def program_name(model: Served, key: ProgramKey, backend: str) -> str:
    """Such as "qwen3-0.6b decode 256 triton", or "sampled 256 of 151936"."""
    if isinstance(key.shape, Bucket):
        return f"{model.name} {key.shape.kind} {key.shape.num_tokens} {backend}"
    return f"{key.kind} {key.shape} of {model.arch.vocab_size}"
