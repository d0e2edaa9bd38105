"""Compiles programs for one target in this process, and reports the problems of each.

Runs in the target's own environment, started by `compile_in`. Prints one JSON object per line for each program.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.targets.gpu_code import KernelCode, kernels_in
from bench.targets.launch_report import launch_report
from bench.targets.targets import GPUS_OF_A_HOST, GRIDS, TARGETS, Target, prepare_environment

if TYPE_CHECKING:
    import jax

    from bench.targets.programs import Program

# Instructions that attention kernels must contain, by backend: without them they would be slow.
PADDING = 0.02  # of small arrays, to a TPU's tiles
MOST_INPUT_BYTES = 1 << 20  # of a step's packed inputs
MEANT = {"triton": (("mma", "wgmma", "tcgen05"),), "mosaic_gpu": (("wgmma",), ("bulk",))}


def compile_all(
    target: Target,
    grid: str,
    share: tuple[int, int],
    ptxas: Path,
    match: str = "",
    xla_flags: str = "",
    done: Collection[str] = (),
    tp: int = 1,
    ranks: int = 1,
) -> Iterator[dict[str, Any]]:
    """Yields the results of every `share[1]`-th program whose name matches and that isn't done, from `share[0]` on."""
    with tempfile.TemporaryDirectory() as folder:
        prepare_environment(Path(folder), f"{flags_of_sums(target, tp)} {xla_flags}")
        devices = target.devices(tp)

        def wanted(name: str) -> bool:
            return re.search(match, name) is not None and name not in done

        every = (each for each in _programs(target, grid, devices, ranks, Path(folder), wanted) if wanted(each.name))
        for program in itertools.islice(every, share[0], None, share[1]):  # to describe all models takes minutes
            with target.traced_for(devices[0]):
                yield _result(program, target, Path(folder), ptxas)


def flags_of_sums(target: Target, tp: int) -> str:
    """XLA's flag for sums over the GPUs of one host, as an engine sets it after its trial; "" for other devices."""
    from jaxsgl.engine.kernels.sums import FLAGS, KERNELS

    return FLAGS[KERNELS] if target.platform == "cuda" and 1 < tp <= GPUS_OF_A_HOST else ""


def _programs(
    target: Target, grid: str, devices: list[jax.Device], num_ranks: int, folder: Path, wanted: Callable[[str], bool]
) -> Iterator[Program]:
    """Yields the programs of the grid, of families only those that are wanted."""
    from bench.targets import drafts, families, programs, stages, steps
    from jaxsgl.weights.sharding import make_mesh
    from pallas_kernels.specs import (
        COMMON_SPECS,
        GRID_SPECS,
        GROUPED_SPECS,
        HOPPER_PRODUCT_SPECS,
        LATENT_SPECS,
        PRODUCT_SPECS,
        TPU_PRODUCT_SPECS,
    )

    mesh = make_mesh(devices, num_ranks)
    if num_ranks > 1:
        yield from steps.ranked_programs(target, mesh, folder)
        return
    if grid == "steps-float8":
        yield from steps.programs_of_models(target, mesh, folder, "fp8_e4m3")
        return
    if grid == "families":
        yield from families.family_programs(target, mesh, folder, wanted)
        return
    if grid == "steps-ordered":
        yield from steps.ordered_programs(target, mesh, folder)
        yield from map(steps.in_fixed_order, drafts.drafting_programs(target, mesh, folder, steps.ORDERED_MODELS))
        return
    if grid != "steps":
        for backend in target.backends:
            for spec in COMMON_SPECS if grid == "common" else GRID_SPECS:
                yield from programs.kernel_programs(spec, backend, mesh)
        if "triton" in target.backends:
            yield from (programs.product_program(spec, "triton", mesh) for spec in PRODUCT_SPECS)
            for spec in LATENT_SPECS:
                yield from programs.kernel_programs(spec, "triton", mesh)
            for grouped in GROUPED_SPECS:
                yield from programs.grouped_programs(grouped, "triton", mesh)
        if "mosaic_gpu" in target.backends:
            yield from (programs.product_program(spec, "mosaic_gpu", mesh) for spec in HOPPER_PRODUCT_SPECS)
        if "mosaic_tpu" in target.backends:
            yield from (programs.product_program(spec, "mosaic_tpu", mesh) for spec in TPU_PRODUCT_SPECS)
        for backend in ("auto", *target.backends):
            yield from programs.step_programs(target.engine_platform, backend, mesh)
    if grid != "common":
        yield from steps.programs_of_models(target, mesh, folder)
        if mesh.size == 1:
            yield from drafts.drafting_programs(target, mesh, folder)
            yield from stages.stage_programs(target, mesh, folder)


def _result(program: Program, target: Target, folder: Path, ptxas: Path) -> dict[str, Any]:
    """The result of one program: refused, failed, or compiled, with the facts about its code."""
    dumps = folder / "mosaic"
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(dumps)
    dumps.mkdir(exist_ok=True)
    result: dict[str, Any] = {"target": target.name, "program": program.name, "backend": program.backend}
    begin = time.monotonic()
    try:
        compiled = program.trace().lower(lowering_platforms=(target.platform,)).compile()
    except ValueError as error:
        if "is impossible here" not in str(error):
            return result | {"problems": [f"{type(error).__name__}: {error}"[:2000]]}
        return result | {"refused": str(error), "problems": []}
    except Exception as error:  # compilers raise errors of any class
        return result | {"problems": [f"{type(error).__name__}: {error}"[:2000]]}
    seconds = time.monotonic() - begin
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    mine = _move_dumps(folder, dumps, text)
    kernels = kernels_in(mine, ptxas) if target.platform == "cuda" else []
    result |= {
        "compile_s": round(seconds, 2),
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "cache_bytes": program.cache_bytes,
        "kernels": [asdict(kernel) for kernel in kernels],
    }
    problems = _cache_problems(program, memory, text)
    if program.argument_bytes is not None:
        problems += _part_problems(memory.argument_size_in_bytes, program.argument_bytes)
    if target.platform == "cuda":
        problems += _spills(kernels) if program.backend == "any" else _code_problems(program, kernels)
    if program.is_step:
        reported = _reported(program, text, mine)
        problems += reported.pop("problems")
        result |= reported
    shutil.rmtree(mine)
    return result | {"problems": problems}


def _reported(program: Program, text: str, dumps: Path) -> dict[str, Any]:
    """What is known of a step's launches; a step whose layers can't be told apart has a problem instead of them."""
    try:
        report = _launches(program, text, dumps)
    except ValueError as error:
        return {"problems": [f"launches: {error}"]}
    problems = report.pop("problems")
    return {"steps": program.steps, "facts": program.facts, "launches": report, "problems": problems}


def _launches(program: Program, text: str, dumps: Path) -> dict[str, Any]:
    pages = program.cache.shape
    words = (*pages[:-1], pages[-1] // 4) if program.cache.dtype.itemsize == 1 else None  # as Triton reads float8
    kept = [dims for dims in (pages, words, program.page_table, *program.states) if dims is not None]
    as_rows = [(math.prod(dims[:-1]), dims[-1]) for dims in kept]
    uncounted = [*kept, *as_rows]
    return launch_report(text, dumps, uncounted, program.layers, program.weight_bytes, program.wanted)


def _move_dumps(folder: Path, mine: Path, text: str) -> Path:
    """Moves XLA's dumps of the program to Mosaic's, and deletes those of other programs."""
    module = text.split(",", 1)[0].removeprefix("HloModule ").strip()
    for path in folder.iterdir():
        if f".{module}." in path.name:
            path.rename(mine / path.name)
        elif path.is_file():
            path.unlink()
    return mine


def _cache_problems(program: Program, memory: Any, hlo: str) -> list[str]:
    problems = []
    donated = program.donated_bytes or program.num_donated * program.cache_bytes
    if memory.alias_size_in_bytes < donated:
        problems.append(f"{memory.alias_size_in_bytes} bytes are updated in place, the cache has {donated}")
    # The pages of a small chip are no larger than the logits of a step; what makes pages is found below in any case.
    if memory.temp_size_in_bytes >= program.cache_bytes and program.facts is None:
        problems.append(f"{memory.temp_size_in_bytes} temporary bytes could hold a cache array")
    for shape, name in ((program.cache.shape, "cache"), *((shape, "states") for shape in program.states)):
        of_shape = re.escape("[" + ",".join(map(str, shape)) + "]")
        made_by = set(re.findall(rf"= \w+{of_shape}\S* ([\w-]+)\(", hlo))
        if copies := made_by & {"copy", "copy-start", "convert", "transpose", "gather"}:
            problems.append(f"arrays of the {name}'s shape are made by {', '.join(sorted(copies))}")
    return problems


def _part_problems(held: int, part: int) -> list[str]:
    """Whether a device holds its part of parameters and state, and nothing more."""
    if part <= held <= (1 + PADDING) * part + MOST_INPUT_BYTES:
        return []
    return [f"a device holds {held} bytes of arguments; its part of parameters and state is {part}"]


def _spills(kernels: list[KernelCode]) -> list[str]:
    return [f"{k.name} spills {k.spill_bytes} bytes" for k in kernels if k.spill_bytes]


def _code_problems(program: Program, kernels: list[KernelCode]) -> list[str]:
    problems = _spills(kernels)
    problems += [f"{k.name}: ptxas: {advisory}" for k in kernels for advisory in k.advisories]
    problems += [
        f"{k.name} doesn't multiply float8"
        for k in kernels
        if k.name.startswith(("float8_product", "grouped_float8_product")) and "float8" not in k.instructions
    ]
    if not kernels and program.has_kernels:
        problems.append("no kernel's code was found")
    if program.on_matrix_units:
        found = {name for kernel in kernels for name in kernel.instructions}
        missing = [wanted for wanted in MEANT.get(program.backend, ()) if not found & set(wanted)]
        problems += [f"no {' or '.join(wanted)} in the code" for wanted in missing]
    return problems


def main() -> None:
    """Compiles a share of the programs of one target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("grid", choices=GRIDS)
    parser.add_argument("index", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("ptxas", type=Path)
    parser.add_argument("--match", default="", help="regular expression for names of programs")
    parser.add_argument("--xla-flags", default="")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--done", type=json.loads, default=(), help="names of programs to leave out, a list as JSON")
    options = parser.parse_args()
    share = options.index, options.count
    target = TARGETS[options.target]
    limits = options.match, options.xla_flags, options.done, options.tp, options.ranks
    for result in compile_all(target, options.grid, share, options.ptxas, *limits):
        print(json.dumps(result), flush=True)
    sys.exit(0)


if __name__ == "__main__":
    main()
