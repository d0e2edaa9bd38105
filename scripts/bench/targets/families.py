"""A decode and a prompt of each architecture that is served, as programs to compile, and a picture where it sees any;
of encoders a prompt that is pooled.

Models larger than the chip are compiled too, as for a chip of twice their size. Few layers are compiled, as of a model
of the table (`steps`), with the kernels that the engine would choose. Called by `compile_for`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from bench.family_shapes import write_family_config
from bench.targets.programs import Program, on_one_device
from bench.targets.steps import DECODE_ROWS, EXTEND_TOKENS, Served, as_step, served_from, with_few_layers
from bench.targets.targets import Target
from jaxsgl.models.families import TOLD_NAMES
from pallas_kernels.choice import AUTO

KINDS = ("decode", "extend", "encode", "pool")


def family_programs(target: Target, mesh: Mesh, folder: Path, wanted: Callable[[str], bool]) -> Iterator[Program]:
    """Yields the programs of all architectures whose names are wanted, such as "LlamaForCausalLM decode"."""
    for name in TOLD_NAMES:
        if any(wanted(f"{name} {kind}") for kind in KINDS):  # to describe a model takes a second
            yield from programs_of(family(name, target, mesh, folder))


def family(name: str, target: Target, mesh: Mesh, folder: Path) -> Served:
    """The architecture in its default sizes, on a chip that holds it."""
    model = served_from(write_family_config(name, folder / name), name, target, mesh, fits=True)
    assert model is not None, "a chip of twice its size has room for it"
    return model


def programs_of(model: Served) -> Iterator[Program]:
    """Yields the programs of one architecture; a prompt is as long as its context, if that is shorter."""
    spec, buckets = with_few_layers(model, AUTO), model.buckets
    pages: Any = on_one_device(spec.state.kv.k[0])
    prompt = min(EXTEND_TOKENS, buckets.extend_sizes[-1])
    sizes = {"decode": DECODE_ROWS[1], "extend": prompt} if buckets.generates else {"pool": prompt}
    for kind, size in sizes.items():
        name, bucket = f"{model.name} {kind}", model.bucket(kind, size, "greedy")
        plain = Program(
            name, AUTO, spec.forward(bucket).trace, pages, 0, on_matrix_units=False, steps=(name,), facts={}
        )
        yield as_step(plain, model, spec, bucket, AUTO)
    for shape in buckets.encode[:1]:
        name = f"{model.name} {KINDS[2]}"
        yield Program(name, "any", spec.encode(shape).trace, pages, num_donated=0, on_matrix_units=False, facts={})
