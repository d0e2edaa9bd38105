"""`compile_targets.py --grid families` has a model of each architecture that is served."""

from pathlib import Path

import jax
import pytest
from bench.family_shapes import CHANGES, CLASSES, write_family_config
from bench.targets.families import family, family_programs, programs_of
from bench.targets.programs import bytes_on_one_device
from bench.targets.targets import TARGETS

from jaxsgl.models import arch_from_folder
from jaxsgl.models.families import TOLD_NAMES
from jaxsgl.weights.sharding import make_mesh


@pytest.mark.parametrize("name", TOLD_NAMES)
def test_each_architecture_has_sizes(name: str, tmp_path: Path) -> None:
    """A new one needs a line of `CLASSES` if transformers has no class for it, of `CHANGES` if defaults don't fit."""
    assert arch_from_folder(write_family_config(name, tmp_path)).layers


def test_what_differs_from_the_defaults_is_of_architectures_that_are_served() -> None:
    assert not (CHANGES.keys() | CLASSES.keys()) - set(TOLD_NAMES)


def test_a_model_larger_than_the_chip_has_a_decode_a_prompt_and_a_picture(tmp_path: Path) -> None:
    h200, mesh = TARGETS["h200"], make_mesh(jax.devices()[:1])
    model = family("Qwen2VLForConditionalGeneration", h200, mesh, tmp_path)
    assert model.weight_bytes() > 0.85 * h200.memory_bytes
    kinds = ("decode", "extend", "encode")
    assert [each.name for each in programs_of(model)] == [f"Qwen2VLForConditionalGeneration {kind}" for kind in kinds]
    found = family_programs(h200, mesh, tmp_path, "GPT2LMHeadModel extend".__eq__)
    assert [each.name for each in found] == ["GPT2LMHeadModel decode", "GPT2LMHeadModel extend"]
    encoder = family_programs(h200, mesh, tmp_path, "BertModel pool".__eq__)
    assert [each.name for each in encoder] == ["BertModel pool"]


def test_a_step_reads_rows_of_the_embeddings_of_layers_and_positions_and_all_other_weights(tmp_path: Path) -> None:
    h200, mesh = TARGETS["h200"], make_mesh(jax.devices()[:1])
    gemma, gpt2 = (family(name, h200, mesh, tmp_path) for name in ("Gemma3nForCausalLM", "GPT2LMHeadModel"))
    assert bytes_on_one_device(gemma.params) - gemma.weight_bytes() == 262_400 * 35 * 256 * 2
    assert bytes_on_one_device(gpt2.params) - gpt2.weight_bytes() == 1024 * 768 * 2
