"""What drafts from weights, as programs to compile: the step that keeps what it reads, and the chain after a step.

    EAGLE-3 heads      `HEADS` of `bench.models`
    next layers        `NEXT_LAYERS`, whose checkpoints have a layer after the last one
    smaller models     `SMALLER`, by those that they draft for

Of the model, and of a smaller one, few layers are compiled, so that no figure is multiplied. Called by `compile_for`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from bench.models import HEADS, SMALLER, write_config, write_head_config
from bench.targets.programs import Program, on_one_device, placed
from bench.targets.steps import (
    COMPILED_LAYERS,
    DECODE_ROWS,
    NUM_DRAFTS,
    VERIFY_TOKENS,
    Served,
    placed_params,
    served,
    with_few_layers,
)
from bench.targets.targets import Target
from jaxsgl.batch.inputs import Bucket
from jaxsgl.engine.drafting.draft import Drafting, own_layers
from jaxsgl.engine.drafting.drafters import with_drafting, with_head, with_model, with_next_layer
from jaxsgl.engine.layer_state import LayerStates
from jaxsgl.engine.programs import Program as EngineProgram
from jaxsgl.engine.state import abstract_state
from jaxsgl.engine.step_programs import ProgramSpec
from jaxsgl.engine.weight_formats import as_kept
from jaxsgl.models import Params, Precision, arch_from_folder
from jaxsgl.models.heads import EagleArch, abstract_head, abstract_next_layer

NEXT_LAYERS = ("glm-4.7-flash", "glm-4.5-air")  # over a latent; over keys and values
ALL = (*HEADS, *NEXT_LAYERS, *SMALLER)
# What drafts for a model of which few layers are compiled, whose layers keep these states.
MakesDrafting = Callable[[Served, LayerStates], Drafting]


def drafting_programs(target: Target, mesh: Mesh, folder: Path, models: Collection[str] = ALL) -> Iterator[Program]:
    """Yields the programs of all that drafts for those of `models` that fit the target.

    A head's are compiled on all backends, with what follows a verify step; the others' on the one that is taken first.
    """

    def head(model: Served, states: LayerStates) -> Drafting:
        home = write_head_config(model.name, folder / f"{model.name}-head")
        taps = tuple(range(1, COMPILED_LAYERS))  # of the layers that are compiled
        arch = dataclasses.replace(EagleArch.from_folder(home, model.arch), taps=taps)
        _, params = abstract_head(arch, model.dtype, model.dtype)
        return with_head(arch, _on(mesh, params), _precision(model), states, NUM_DRAFTS)

    def next_layer(model: Served, states: LayerStates) -> Drafting:
        arch = model.arch.next_arch
        assert arch is not None, f"{model.name} has no next layer"
        _, params = abstract_next_layer(arch, model.dtype, model.dtype)
        return with_next_layer(arch, _on(mesh, params), _precision(model), states, NUM_DRAFTS)

    def smaller_model(model: Served, states: LayerStates) -> Drafting:
        name = SMALLER[model.name]
        whole = arch_from_folder(write_config(name, folder / name))
        arch = dataclasses.replace(whole, layers=whole.layers[:COMPILED_LAYERS])
        arch = as_kept(arch, model.dtype, target.engine_platform, mesh.size)
        params = placed_params(arch, model.dtype, mesh)
        return with_model(arch, params, _precision(model), states, NUM_DRAFTS, target.engine_platform)

    kinds: tuple[tuple[str, tuple[str, ...], MakesDrafting], ...] = (
        ("eagle3", tuple(HEADS), head),
        ("nextn", NEXT_LAYERS, next_layer),
        ("standalone", tuple(SMALLER), smaller_model),
    )
    for kind, names, make in kinds:
        for name in filter(models.__contains__, names):
            model = served(name, target, mesh, folder)
            if model is None:
                continue
            backends = model.backends(target)
            for backend in backends if kind == "eagle3" else backends[-1:]:
                yield from _programs(model, kind, make, backend)


def _programs(model: Served, kind: str, make: MakesDrafting, backend: str) -> Iterator[Program]:
    """Yields a verify step that keeps what drafting reads, and the programs that draft after steps."""
    spec = with_few_layers(model, backend)
    states = dataclasses.replace(model.states, layers=model.states.layers[: model.layers.compiled])
    drafting = make(model, states)
    state = abstract_state(with_drafting(states, drafting, model.capacity.num_rows), model.capacity, model.mesh)
    spec = dataclasses.replace(spec, state=state, drafting=drafting)
    verify, decode = model.buckets.verify(VERIFY_TOKENS), model.buckets.decode(DECODE_ROWS[1])
    name = f"{model.name} {kind}"
    yield _program(f"{name} verify {VERIFY_TOKENS}", spec.forward(verify), spec, verify, backend, spec.state.kv)
    own = own_layers(spec.state.kv, drafting)
    after = (verify, decode) if kind == "eagle3" else (decode,)
    for bucket in after:
        each = spec.draft(bucket)
        yield _program(f"{name} {each.key.kind} {bucket.num_choices}", each, spec, bucket, backend, own)


def _program(name: str, each: EngineProgram, spec: ProgramSpec, bucket: Bucket, backend: str, kv: Any) -> Program:
    arrays = [on_one_device(array) for array in jax.tree.leaves(kv)]
    return Program(
        f"{name} {backend}",
        backend,
        each.trace,
        min(arrays, key=lambda array: array.size),
        num_donated=len(arrays),
        on_matrix_units=False,
        page_table=(bucket.num_seqs, spec.state.page_table.shape[1]),
        states=tuple({array.shape for array in arrays}),
        steps=(f"{name} {backend}",),
    )


def _precision(model: Served) -> Precision:
    return Precision(model.dtype, model.dtype, model.states.layers[0].by_page[0].dtype)


def _on(mesh: Mesh, params: Params) -> Params:
    """Parameters as shapes that lie on the mesh."""
    return nnx.from_flat_state([(path, placed(param, mesh)) for path, param in nnx.to_flat_state(params)])
