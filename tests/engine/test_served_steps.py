"""The steps that compile_targets.py compiles for absent chips are those of the engine as it is."""

from pathlib import Path

import jax
from bench.targets.programs import mesh_of
from bench.targets.steps import MODELS, programs_of_models
from bench.targets.targets import TARGETS


def test_steps_of_the_table_run_the_programs_that_the_engine_would(tmp_path: Path) -> None:
    h200 = TARGETS["h200"]
    programs = programs_of_models(h200, mesh_of(jax.devices()[:1]), tmp_path)
    names = [program.name for program in programs]
    assert len(names) == len(set(names))
    for model in MODELS:
        for backend in h200.backends:
            greedy, sampled = (f"{model} {backend} decode 256 {sampling}" for sampling in ("greedy", "sampled"))
            assert [p.name for p in programs if greedy in p.steps] == [f"{model} decode 256 {backend}"]
            drawn = {p.name for p in programs if sampled in p.steps}
            assert drawn == {f"{model} decode 256 {backend}", "sampled 256 of 151936"}
    (sampling,) = (program for program in programs if program.name == "sampled 256 of 151936")
    assert sampling.trace().jaxpr.in_avals[0].shape == (256, 151_936)


def test_models_too_large_for_a_chip_are_left_out(tmp_path: Path) -> None:
    programs = programs_of_models(TARGETS["v5e"], mesh_of(jax.devices()[:1]), tmp_path)
    assert not any("8b" in program.name for program in programs)
