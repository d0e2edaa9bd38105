"""The steps that compile_targets.py compiles for absent chips are those of the engine as it is."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from bench.targets.collectives import Wanted
from bench.targets.drafts import drafting_programs
from bench.targets.launch_report import Layers
from bench.targets.stages import stage_programs
from bench.targets.steps import DECODE_ROWS, MODELS, NUM_DRAFTS, VERIFY_TOKENS, Served, programs_of_models, served
from bench.targets.targets import TARGETS
from jax.sharding import AbstractMesh

from jaxsgl.weights.sharding import make_mesh
from tests.pallas_kernels.lower_everything import on_a_device

VOCABULARIES = {
    "phi3-mini": 32_064, "qwen3.5-9b": 248_320, "granite-4.0-h-small": 100_352, "deepseek-v2-lite": 102_400,
    "deepseek-v3.2-32e-fp8": 129_280, "gpt-oss-20b": 201_088, "nemotron-3-nano": 131_072, "lfm2-8b-a1b": 65_536,
}  # fmt: skip
ON_H200 = "cuda", "NVIDIA H200", 132
EIGHT: Any = AbstractMesh((1, 8), ("data", "tensor"))  # in the place of a mesh of devices


def test_steps_of_the_table_run_the_programs_that_the_engine_would(tmp_path: Path) -> None:
    h200 = TARGETS["h200"]
    programs = programs_of_models(h200, make_mesh(jax.devices()[:1]), tmp_path)
    names = [program.name for program in programs]
    assert len(names) == len(set(names))
    for model in MODELS:
        rows = 32 if model == "granite-4.0-h-small" else 256  # of which the states would not fit
        for backend in ("triton",) if model.startswith("deepseek") else h200.backends:
            greedy, sampled = (f"{model} {backend} decode {rows} {sampling}" for sampling in ("greedy", "sampled"))
            assert [p.name for p in programs if greedy in p.steps] == [f"{model} decode {rows} {backend}"]
            drawn = {p.name for p in programs if sampled in p.steps}
            vocab_size = VOCABULARIES.get(model, 151_936)
            assert drawn == {f"{model} decode {rows} {backend}", f"sampled {rows} of {vocab_size}"}
    (sampling,) = (program for program in programs if program.name == "sampled 256 of 151936")
    assert sampling.trace().jaxpr.in_avals[0].shape == (256, 151_936)


def test_heads_of_96_are_counted_as_pages_keep_them(tmp_path: Path) -> None:
    model = served("phi3-mini", TARGETS["h200"], make_mesh(jax.devices()[:1]), tmp_path)
    assert model is not None and model.facts()["head_dim"] == 128
    assert model.states.page_bytes == 2 * 32 * 32 * 64 * 128 * 2


def test_a_token_of_a_latent_and_a_row_of_states_have_the_bytes_of_a_hand_count(tmp_path: Path) -> None:
    latents, hybrid = (
        served(name, TARGETS["h200"], make_mesh(jax.devices()[:1]), tmp_path)
        for name in ("deepseek-v2-lite", "qwen3.5-9b")
    )
    assert latents is not None and hybrid is not None
    facts = latents.facts()
    assert (facts["attending_layers"], facts["state_bytes_moved"]) == (27, 0)
    assert facts["kv_token_bytes"] == (512 + 64) * 2 == 1152  # the sizes of DeepSeek-V3, too
    assert facts["pair_flops"] == 2 * 16 * (576 + 512)  # keys are the latent with what is rotated, values the latent
    assert latents.layers == Layers(5, 27)
    facts = hybrid.facts()
    assert (facts["attending_layers"], facts["kv_token_bytes"], facts["pair_flops"]) == (
        8,
        2 * 4 * 256 * 2,
        4 * 16 * 256,
    )
    inputs = 4 * 16 * (2 * 128 + 2 * 128)  # of four tokens: a key head's q, k and v of two value heads
    assert facts["layer_state_bytes_moved"] == 4 * (2 * 32 * 128 * 128 + inputs)  # three are read, one is written
    assert facts["state_bytes_moved"] == 24 * facts["layer_state_bytes_moved"]
    assert facts["state_flops"] == 24 * 32 * 6 * 128 * 128
    assert hybrid.layers == Layers(12, 32, recurring=4, attending=(3, 7, 11))


def test_first_layers_of_their_own_are_compiled_besides_those_that_recur(tmp_path: Path) -> None:
    """DeepSeek V3's first three have no experts."""
    model = served("deepseek-v3.2-32e-fp8", TARGETS["h200"], make_mesh(jax.devices()[:1]), tmp_path)
    assert model is not None and model.layers == Layers(3 + 4, 61)

    def recurring(names: str) -> Layers:
        arch: Any = SimpleNamespace(layers=tuple(names), attention_layers=range(len(names)), reading_layers=())
        return dataclasses.replace(model, arch=arch).layers

    assert recurring("aaaaaaaaa") == Layers(4, 9)
    assert recurring("abcabcabcabc") == Layers(9, 12, recurring=3)
    assert recurring("dbcabcabcabcabc") == Layers(12, 15, recurring=3)  # a fourth group: the first one differs
    assert recurring("dbcabcabcabcabcab") == Layers(11, 17, recurring=3)  # what is left out are whole groups
    assert recurring("abcdefgh") == Layers(8, 8, recurring=8)


def test_all_layers_are_compiled_where_no_groups_recur_and_units_without_gates_have_two_weights(tmp_path: Path) -> None:
    model = served("nemotron-3-nano", TARGETS["h200"], make_mesh(jax.devices()[:1]), tmp_path)
    assert model is not None and model.layers == Layers(52, 52, recurring=52)
    facts = model.facts()
    assert facts["expert_weights"] == 23 * 128 * 2 * 1856 * 2688
    assert facts["attending_layers"] == 6


@pytest.mark.parametrize(
    ("name", "num_arrays"),
    [
        ("qwen3-8b eagle3", 2 * (1 + 2)),  # keys and values, and a state of 4,096 numbers in 8 heads of 128
        ("glm-4.7-flash nextn", 1 + 4),  # a latent of 576 numbers, and a state of 2,048
        ("qwen3-8b standalone", 2 * 4),  # as many layers of the smaller model as are compiled
    ],
)
def test_what_drafts_has_a_step_that_keeps_what_it_reads_and_a_chain_after_it(
    name: str, num_arrays: int, tmp_path: Path
) -> None:
    h200 = TARGETS["h200"]
    programs = {each.name: each for each in drafting_programs(h200, make_mesh(jax.devices()[:1]), tmp_path)}
    backend = "triton" if name.startswith("glm") else "mosaic_gpu"
    verify, draft = (
        programs[f"{name} {part} {backend}"] for part in (f"verify {VERIFY_TOKENS}", f"draft {DECODE_ROWS[1]}")
    )
    model = served(name.split(" ")[0], h200, make_mesh(jax.devices()[:1]), tmp_path)
    assert model is not None
    of_model = model.layers.compiled * len(model.states.layers[0].by_page)
    assert (verify.num_donated, draft.num_donated) == (of_model + num_arrays, num_arrays)
    with on_a_device(*ON_H200):
        assert draft.trace().jaxpr.out_avals[-1].shape == (DECODE_ROWS[1], NUM_DRAFTS)


def test_stages_share_the_layers_and_the_last_one_takes_a_stream(tmp_path: Path) -> None:
    h200, mesh = TARGETS["h200"], make_mesh(jax.devices()[:1])
    model = served("qwen3-8b", h200, mesh, tmp_path)
    first, last = stage_programs(h200, mesh, tmp_path)
    assert model is not None and first.layers is not None and last.layers is not None
    assert first.layers.of_model + last.layers.of_model == 36
    assert first.weight_bytes + last.weight_bytes == model.weight_bytes()  # the head on one, the embedding not read
    with on_a_device(*ON_H200):
        passed, given = first.trace().jaxpr.out_avals[-1], last.trace().jaxpr.in_avals[-1]
    assert (passed.shape, passed.dtype) == (given.shape, given.dtype) == ((DECODE_ROWS[1], 4096), "bfloat16")


def test_models_too_large_for_a_chip_are_left_out(tmp_path: Path) -> None:
    programs = programs_of_models(TARGETS["v5e"], make_mesh(jax.devices()[:1]), tmp_path)
    fitting = {program.name.split()[0] for program in programs if program.layers}
    assert fitting == {"qwen3-0.6b", "qwen3-8b-fp8", "qwen3-8b-awq", "phi3-mini", "gpt-oss-20b"}


def on_eight(name: str, target: str, folder: Path) -> Served:
    found = served(name, TARGETS[target], EIGHT, folder)
    assert found is not None
    return found


def test_a_device_has_its_part_of_a_model_that_eight_share(tmp_path: Path) -> None:
    model = on_eight("qwen3-235b-a22b", "h200", tmp_path)
    facts = model.facts()
    # 4 kv heads are too few: two devices each have a copy of one.
    assert (facts["num_heads"], facts["num_kv_heads"], facts["vocab_size"]) == (8, 1, 151_936 // 8)
    assert model.states.page_bytes == 2 * 94 * 128 * 64 * 2
    assert facts["expert_weights"] == 94 * 128 // 8 * 3 * 4096 * 1536
    whole = 235.1e9 * 2 / 8  # bytes of the published model's parameters
    replicated = 94 * 2 * 4096 * 128 * 2  # the copies of k and v, less routers, and norms: far below a percent
    assert model.weight_bytes() == pytest.approx(whole + replicated, rel=0.01)
    assert model.wanted(model.bucket("decode", 256, "greedy")) == Wanted(8, 256 * 4096 * 2, 256)


def test_ranks_have_heads_and_vocabulary_for_themselves_and_experts_together(tmp_path: Path) -> None:
    mesh: Any = AbstractMesh((2, 4), ("data", "tensor"))
    ranked, whole = (
        served("qwen3-235b-a22b", TARGETS["h200"], mesh, tmp_path),
        on_eight("qwen3-235b-a22b", "h200", tmp_path),
    )
    assert ranked is not None and ranked.name == "qwen3-235b-a22b-2x4"
    assert ranked.states.page_bytes == whole.states.page_bytes  # a head of each device; of eight, each has a copy
    assert 2 * ranked.capacity.num_rows == whole.capacity.num_rows
    assert 2 * ranked.capacity.max_extend_tokens == whole.capacity.max_extend_tokens
    copied = 94 * 2 * 4096 * 64 * 128 * 2 // 8 + 151_936 * 4096 * 2 // 8  # of q, its output and the head
    assert ranked.weight_bytes() - whole.weight_bytes() == pytest.approx(copied, rel=0.02)
    bucket = ranked.buckets.decode(32)
    assert ranked.wanted(bucket) == Wanted(8, 32 * 4096 * 2, 32, num_ranks=2)


def test_weights_in_float8_take_half_as_much_with_those_of_experts(tmp_path: Path) -> None:
    dense, quantized = (on_eight(f"qwen3-8b{weights}", "h200", tmp_path).facts() for weights in ("", "-fp8"))
    # Scales take some percent; every device has all those of a matrix whose inputs are split.
    assert 0.5 < quantized["layer_bytes"] / dense["layer_bytes"] < 0.56
    mixed, part = (on_eight(f"qwen3-30b-a3b{weights}", "h200", tmp_path) for weights in ("", "-fp8"))
    assert mixed.facts()["expert_weights"] == part.facts()["expert_weights"]
    assert 0.5 < part.weight_bytes() / mixed.weight_bytes() < 0.6  # embedding and head stay in bfloat16


def test_tpu_slices_take_the_models_that_fit_them(tmp_path: Path) -> None:
    assert on_eight("qwen3-30b-a3b", "v5e", tmp_path).weight_bytes() < 16 * 2**30
    assert served("qwen3-235b-a22b", TARGETS["v6e"], EIGHT, tmp_path) is None
