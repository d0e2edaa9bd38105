"""Models that attend to windows and to groups of tokens answer as transformers does, whatever the steps, and refuse
what they can't do.

Two layers, one of each kind of groups. tests/end_to_end/test_families.py has chunks and prefixes of whole models.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config

from jaxsgl.config.engine import EngineConfig, SchedulingConfig
from jaxsgl.config.features import LoraConfig, SpeculationConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.engine.kernels.choice import asked_kernels, kernel_shapes
from jaxsgl.engine.layer_state import layer_states
from jaxsgl.engine.start.model_flags import check_flags
from jaxsgl.engine.start.sizing import choose_pages
from jaxsgl.errors import CheckpointError, ConfigError
from jaxsgl.models import ModelArch, arch_from_folder, resolve_precision
from jaxsgl.models.layer_spec import GroupedAttention, MoeMlp
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.weights import load_params
from pallas_kernels.selftest.shapes import GroupedShape, KernelShapes
from tests.checkpoint_kinds.sizes import OF_FAMILIES
from tests.checkpoints import configuration, load_reference, make_checkpoint
from tests.end_to_end.offline import outputs, serve
from tests.end_to_end.test_families import logits_of
from tests.plain_model import mesh_of

pytestmark = [pytest.mark.device, pytest.mark.timeout(600), pytest.mark.usefixtures("greedy_steps_by_day")]

KIND = "deepseek_v4"
WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
TWO_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": [SPARSE, HEAVY],
    "mlp_layer_types": ["hash_moe", "moe"],
}
LENGTHS = (1, 2, 7, 8, 9, 33, 160)  # groups have 2 and 8 tokens
NEW_TOKENS = 12
# As published folders have it.
FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": KIND, "attention_bias": False, "hidden_size": 4096,
    "bos_token_id": 0, "eos_token_id": 1, "expert_dtype": "fp4", "hc_eps": 1e-06, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "head_dim": 512, "hidden_act": "silu", "index_head_dim": 128, "index_n_heads": 64,
    "index_topk": 512, "max_position_embeddings": 1048576, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 6,
    "num_hidden_layers": 4, "num_hash_layers": 3, "num_key_value_heads": 1, "num_nextn_predict_layers": 1,
    "o_groups": 8, "o_lora_rank": 1024, "q_lora_rank": 1024, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_theta": 10000, "compress_rope_theta": 160000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus",
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536, "type": "yarn",
    },
    "sliding_window": 128, "swiglu_limit": 10.0, "tie_word_embeddings": False, "topk_method": "noaux_tc",
    "vocab_size": 129280, "compress_ratios": [0, 4, 128, 4, 0],
}  # fmt: skip


def test_tokens_equal_those_of_transformers_in_steps_of_all_kinds(tmp_path: Path) -> None:
    folder = make_checkpoint(KIND, tmp_path, seed=3, **TWO_LAYERS)
    engine = Engine(
        EngineConfig(
            model=str(folder), page_size=8, chunked_prefill_size=32, context_length=180, max_running_requests=8,
            max_total_tokens=800, decode_buckets=(8,), extend_buckets=(32,), decode_steps=4, compilation_cache_dir="",
        ),
        progress=False,
    )  # fmt: skip
    rng = np.random.default_rng(2)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    prompts = [rng.integers(3, OF_FAMILIES["vocab_size"], length).tolist() for length in LENGTHS]
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    answers = outputs(serve(engine, [requests]), requests)
    logits = logits_of(folder, [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)])
    for prompt, answer, of_one in zip(prompts, answers, logits, strict=True):
        first = len(prompt) - 1
        assert of_one[first : first + NEW_TOKENS].argmax(axis=-1).tolist() == answer, first + 1
    again = serve(engine, [[requests[-1]], *[[]] * 40, requests])
    assert outputs(again, requests[:-1]) == answers[:-1]
    assert sum(reply.cached_tokens for reply in again.replies) > 150
    mixed: dict[str, Any] = {"config": SchedulingConfig(enable_mixed_chunk=True)}
    for changes in ({"retract_every": 5}, {"decode_steps": 1, "overlap": False}, mixed):
        assert outputs(serve(engine, [requests], **changes), requests) == answers, changes
    assert engine.recompiles == 0
    engine.close()


def test_tensors_have_the_names_of_published_folders_or_those_in_memory(tmp_path: Path) -> None:
    """transformers saves names between the two: those of published folders after "model."."""
    saved = make_checkpoint(KIND, tmp_path / "saved", seed=3)
    arch = arch_from_folder(saved)
    expected = load_params(saved, arch, jnp.dtype("float32"), mesh_of())
    tensors = load_file(saved / "model.safetensors")
    published = {
        name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_"): tensor
        for name, tensor in tensors.items()
    }
    assert {"embed.weight", "head.weight", "norm.weight", "hc_head_fn"} < published.keys()
    for name, renamed in (("published", published), ("in memory", load_reference(saved).state_dict())):
        (tmp_path / name).mkdir()
        shutil.copy(saved / "config.json", tmp_path / name)
        contiguous = {key: tensor.contiguous() for key, tensor in renamed.items()}
        save_file({**contiguous, "mtp.0.norm.weight": torch.zeros(3)}, tmp_path / name / "model.safetensors")
        found = load_params(tmp_path / name, arch, jnp.dtype("float32"), mesh_of())
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def read(folder: Path, values: dict[str, Any]) -> ModelArch:
    (folder / "config.json").write_text(json.dumps(values))
    return arch_from_folder(folder)


def test_words_of_published_folders_mean_what_they_mean_to_transformers(tmp_path: Path) -> None:
    arch = read(tmp_path, FLASH)
    values = json.loads(DeepseekV4Config(**FLASH).to_json_string(use_diff=False))
    assert read(tmp_path, values) == arch
    mixers = [layer.mixer for layer in arch.layers]
    groups = [mixer.groups for mixer in mixers if isinstance(mixer, GroupedAttention)]
    assert [each and (each.size, each.overlaps, each.index is not None) for each in groups] == [
        None, (4, True, True), (128, False, False), (4, True, True),
    ]  # fmt: skip
    assert [arch.ropes[layer.rope or 0].theta for layer in arch.layers] == [1e4, 16e4, 16e4, 16e4]
    assert [isinstance(layer.mlp, MoeMlp) and layer.mlp.by_token for layer in arch.layers] == [True] * 3 + [False]
    assert {layer.window for layer in arch.layers} == {128} and arch.next_layer is None
    assert read(tmp_path, {**FLASH, "compress_ratios": None, "compress_rate_csa": 8}).token_groups[1].size == 8


def test_a_page_holds_entries_of_tokens_and_groups_and_what_goes_on_after_it(tmp_path: Path) -> None:
    """Of DeepSeek V4's layers a token takes 512 numbers, a group of 4 as many and 128 of a key, one of 128 as many."""
    arch = read(tmp_path, FLASH)
    page_size, _ = choose_pages(EngineConfig(), arch, "gpu", 1)
    assert page_size == 128
    pages = layer_states(arch, page_size, jnp.dtype("bfloat16"))
    tokens, sparse, heavy = 512 * 128 * 2, 640 * 32 * 2, 512 * 2
    sums = 9 * 640 * 4, 3 * 512 * 4
    assert pages.page_bytes == 4 * tokens + 2 * (sparse + sums[0]) + heavy + sums[1] and pages.row_bytes == 0


def test_kernels_are_tested_at_the_shapes_of_each_kind_of_layers(tmp_path: Path) -> None:
    arch = read(tmp_path, FLASH)
    config = EngineConfig(kernels=("grouped=triton", "index=xla"))
    asked = asked_kernels(config, arch)
    assert (asked.attend_to_groups, asked.score_tokens) == ("triton", "xla")
    precision = resolve_precision("auto", "auto", arch, "gpu", cpu_multiplies_bfloat16=lambda: False)
    shapes = kernel_shapes(arch, precision, *choose_pages(config, arch, "gpu", 1), 1)
    assert (shapes.num_kv_heads, shapes.num_groups, shapes.head_dim, shapes.page_size) == (1, 64, 512, 128)
    assert set(shapes.grouped) == {GroupedShape(), GroupedShape(4, 640, 512, 64), GroupedShape(128, 512)}
    assert KernelShapes.from_json(json.loads(json.dumps(shapes.as_json()))) == shapes
    with pytest.raises(ConfigError, match=r"names chosen, but .* has no latents of which an index chooses"):
        asked_kernels(replace(config, kernels=("chosen=xla",)), arch)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": [WINDOW, "full_attention"]}, "layer_types is .*each sliding_attention"),
        ({"layer_types": None, "compress_ratios": [0, 16]}, r"16\], but .*compress_ratios one of 0, 4, 128"),
        ({"mlp_layer_types": ["moe"]}, "mlp_layer_types is .*a list of 2, each hash_moe or moe"),
        ({"o_groups": 3}, r"8 heads can't be 3 groups \(o_groups\)"),
        ({"partial_rotary_factor": 0.125}, "is 3, but must be even"),
        ({"scoring_func": "sigmoid"}, 'scoring_func is "sigmoid"'),
    ],
    ids=str,
)
def test_other_forms_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    values = {**configuration(KIND), **TWO_LAYERS}
    assert read(tmp_path, values).num_layers == 2
    with pytest.raises(CheckpointError, match=said):
        read(tmp_path, {**values, **changes})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"pp_size": 2}, "--pp-size does not go with .*residual streams"),
        ({"speculation": SpeculationConfig("NGRAM", 3)}, "NGRAM does not go with .*sums of groups"),
        ({"lora": LoraConfig(enable_lora=True, max_lora_rank=8)}, "--enable-lora does not go with"),
        ({"page_size": 20}, "--page-size is 20, but .*whole groups of tokens: give a multiple of 8"),
    ],
    ids=str,
)
def test_flags_that_groups_do_not_go_with_are_refused(flags: dict[str, Any], said: str, tmp_path: Path) -> None:
    arch = read(tmp_path, configuration(KIND))
    check_flags(EngineConfig(page_size=16), arch)
    with pytest.raises(ConfigError, match=said):
        check_flags(EngineConfig(**flags), arch)


def test_a_cache_in_float8_is_refused_and_one_that_files_were_calibrated_for_stays_wide(tmp_path: Path) -> None:
    arch = read(tmp_path, configuration(KIND))
    with pytest.raises(ConfigError, match="whose cache holds entries of groups"):
        resolve_precision("auto", "fp8_e4m3", arch, "gpu", cpu_multiplies_bfloat16=lambda: False)
    calibrated = replace(arch, kv_cache_dtype="fp8_e4m3", dtype="bfloat16")
    assert resolve_precision("auto", "auto", calibrated, "gpu", cpu_multiplies_bfloat16=lambda: False).kv == "bfloat16"
