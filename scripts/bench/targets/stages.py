"""Decodes of pipeline stages (`--pp-size`), as programs to compile: a program for each stage, on a device of its own.

Few layers of a stage are compiled, as of a model (`steps`). Called by `compile_for`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from bench.targets.programs import Program, on_one_device
from bench.targets.steps import DECODE_ROWS, Served, as_step, placed_params, served
from bench.targets.targets import Target
from jaxsgl.engine.stages.engine import layers_of_stages
from jaxsgl.engine.stages.programs import StageSpec
from jaxsgl.engine.state import abstract_state
from jaxsgl.models import abstract_model
from pallas_kernels import KernelChoice

STAGED_MODELS = {"qwen3-8b": 2}  # in so many stages


def stage_programs(target: Target, mesh: Mesh, folder: Path) -> Iterator[Program]:
    """Yields a decode of each stage of the models that fit the target, on the backend that is taken first."""
    for name, num_stages in STAGED_MODELS.items():
        model = served(name, target, mesh, folder)
        if model is None:
            continue
        backend = model.backends(target)[-1]
        for number, (first, stop) in enumerate(layers_of_stages(model.arch, model.dtype, num_stages)):
            stage = _of_layers(model, first, stop)
            bucket = model.buckets.decode(DECODE_ROWS[1])
            spec = _with_few_layers(stage, backend)
            pages: Any = on_one_device(spec.state.kv.k[0])
            program = Program(
                f"{name} stage {number + 1} of {num_stages} decode {bucket.num_tokens} {backend}",
                backend,
                spec.forward(bucket).trace,
                pages,
                num_donated=0,
                on_matrix_units=False,
                steps=(f"{name} stage {number + 1} of {num_stages}",),
            )
            yield as_step(program, stage, spec, bucket, backend)


def _of_layers(model: Served, first: int, stop: int) -> Served:
    """The stage of layers first .. stop - 1, as if it were the model."""
    arch = model.arch.of_layers(first, stop)
    return dataclasses.replace(
        model,
        arch=arch,
        states=dataclasses.replace(model.states, layers=model.states.layers[first:stop]),
        capacity=model.capacity if arch.stage.is_last else dataclasses.replace(model.capacity, vocab_size=0),
        params=placed_params(arch, model.dtype, model.mesh),
    )


def _with_few_layers(stage: Served, backend: str) -> StageSpec:
    """What the programs of the stage share, of as many of its layers as are compiled."""
    arch = dataclasses.replace(stage.arch, layers=stage.arch.layers[: stage.layers.compiled])
    states = dataclasses.replace(stage.states, layers=stage.states.layers[: stage.layers.compiled])
    graphdef, _ = abstract_model(arch, stage.dtype)
    return StageSpec(
        graphdef,
        placed_params(arch, stage.dtype, stage.mesh),
        abstract_state(states, stage.capacity, stage.mesh),
        KernelChoice.of_attention(backend),
        stage.mesh,
        stage=arch.stage,
        hidden_size=arch.hidden_size,
        activations=stage.dtype,
    )
