"""What the architectures' names and keys mean for layers, ropes and scales, in the words of old and new folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, GptOssConfig, Llama4TextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.features import HostKvConfig
from jaxsgl.engine.start.model_flags import check_flags
from jaxsgl.errors import CheckpointError, ConfigError
from jaxsgl.models import ModelArch, RopeParams, arch_from_folder
from jaxsgl.models.families import FAMILIES
from jaxsgl.models.layer_spec import KvHeads, MoeMlp
from jaxsgl.models.rope import inverse_frequencies, split_half_order
from jaxsgl.weights.sharding import model_on_devices
from tests.checkpoint_kinds import (
    BLOCK_KINDS,
    CHECKPOINT_KINDS,
    CONV_KINDS,
    DELTA_KINDS,
    FAMILY_KINDS,
    HYBRID_KINDS,
)
from tests.checkpoints import configuration
from tests.models.test_arch import LLAMA, read

NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Keys whose defaults transformers refuses beside the other values, or derives from them.
UNTRIED = {
    "phi3": ("hidden_size", "num_attention_heads"),
    "glm": ("rope_parameters",),
    "glm4": ("rope_parameters",),
    "glm4_moe": ("rope_parameters",),
    "stable_lm": ("rope_parameters",),
    "glm4_moe_lite": ("num_hidden_layers", "qk_rope_head_dim"),
    **dict.fromkeys(
        ("olmo3", "gemma2", "vault_gemma", "gemma3", "gpt_oss", "exaone4", "granite_hybrid_dense", *CONV_KINDS),
        ("num_hidden_layers",),
    ),
    **dict.fromkeys(("granite_swa", "granite_moe_swa"), ("num_hidden_layers",)),
    "cwm": ("num_hidden_layers", "hidden_size", "num_attention_heads"),
    **dict.fromkeys(
        ("ministral", "mellum", "exaone_moe", "afmoe", "cohere2", "cohere2_moe", "kolibri1"), ("num_hidden_layers",)
    ),
    **dict.fromkeys(("jais2", "minicpm3"), ("hidden_size", "num_attention_heads")),
    "hyperclovax": ("attention_multiplier", "hidden_size", "num_attention_heads"),
    "granite_hybrid": ("num_hidden_layers", "hidden_size", "mamba_expand", "mamba_n_heads"),
    "bamba": ("hidden_size", "mamba_expand", "mamba_n_heads"),
    "deepseek_v4": ("moe_intermediate_size", "num_hidden_layers"),
    "falcon_h1": ("mamba_d_ssm", "mamba_n_heads"),
    "jamba": ("attn_layer_offset",),
    "kimi_linear": ("model_max_length", "num_hidden_layers"),
    "longcat_flash": ("num_layers", "ffn_hidden_size"),
    **dict.fromkeys(BLOCK_KINDS, ("time_step_min",)),
    **dict.fromkeys(("gemma3n", "mimo_v2_flash", "laguna"), ("num_hidden_layers",)),
    **dict.fromkeys(
        ("gemma4", "gemma4_small", "gemma4_moe", "gemma4_unified"), ("num_hidden_layers", "per_layer_config")
    ),
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def windows(arch: ModelArch) -> list[int | None]:
    return [arch.attention_options(layer).sliding_window for layer in range(arch.num_layers)]


@pytest.mark.parametrize(
    ("name", "every"), [("Gemma2ForCausalLM", 2), ("Olmo3ForCausalLM", 4), ("Gemma3ForCausalLM", 6)]
)
def test_without_layer_types_every_so_many_layers_one_is_full(name: str, every: int, tmp_path: Path) -> None:
    arch = read(tmp_path, architectures=[name], num_hidden_layers=13, sliding_window=8, num_key_value_heads=2)
    assert windows(arch) == [None if (i + 1) % every == 0 else 8 for i in range(13)]


def test_the_pattern_of_a_gemma_3_folder_is_a_number_in_older_ones(tmp_path: Path) -> None:
    arch = read(tmp_path, architectures=["Gemma3ForCausalLM"], sliding_window=8, sliding_window_pattern=2)
    assert windows(arch) == [8, None]


def arch_of(folder: Path, values: dict[str, Any]) -> ModelArch | None:
    """What config.json with these values means; None: it is refused."""
    (folder / "config.json").write_text(json.dumps(values))
    try:
        return arch_from_folder(folder)
    except CheckpointError:
        return None


@pytest.mark.parametrize("kind", [*CHECKPOINT_KINDS, *FAMILY_KINDS])
def test_a_missing_key_means_what_it_means_to_transformers_or_is_asked_for(kind: str, tmp_path: Path) -> None:
    """Its default there depends on the family. Folders leave keys out that have it."""
    complete, required = configuration(kind), set()
    assert arch_of(tmp_path, complete) is not None
    for key in complete.keys() - {"architectures", *UNTRIED.get(kind, ())}:
        values = configuration(kind, without=key)
        expected = arch_of(tmp_path, values)
        values.pop(key, None)
        found = arch_of(tmp_path, values)
        if found is None and expected is not None:
            required.add(key)
        elif expected is not None:
            assert found == expected, key
    sizes = {"hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"}
    of_mlps = {"intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", *NUMBERS_OF_EXPERTS}
    told = FAMILIES[complete["architectures"][0]].keys
    assert required <= {told.get(key, key) for key in sizes | of_mlps}


def as_transformers_reads(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """All values of config.json in the words of transformers 5, which may be told in older ones."""
    (folder / "config.json").write_text(json.dumps(values))
    config = AutoConfig.from_pretrained(folder)
    return {**json.loads(config.to_json_string(use_diff=False)), "architectures": values["architectures"]}


@pytest.mark.parametrize("scaling", ["none", "yarn", "dynamic"])
def test_a_rope_in_older_words_means_what_it_means_to_transformers(scaling: str, tmp_path: Path) -> None:
    """`rope_theta` next to `rope_scaling`, of which OLMo's windows have nothing; only Hunyuan's code reads `alpha`."""
    told = {
        "none": {},
        "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        "dynamic": {"rope_type": "dynamic", "factor": 2.0, "alpha": 50.0},
    }[scaling]
    for kind in (*CHECKPOINT_KINDS, *FAMILY_KINDS):
        of_other_kinds = (
            "phi3",
            "lfm3",
            "mellum",
            "cwm",
            "apertus",
            "ministral3",
            "mistral4",
            "phimoe",
            "mimo_v2_flash",
            "laguna",
        )
        if kind in of_other_kinds or kind.startswith("gemma4"):  # which have ropes of other kinds alone
            continue
        if kind in (
            "cohere2_moe",
            "gpt_neox",
            "gpt2",
            "gpt_bigcode",
            "gptj",
            "opt",
        ):  # which have other words, or no rope
            continue
        values = {key: value for key, value in configuration(kind).items() if key != "rope_parameters"}
        values |= {"rope_theta": 3000.0, **({"rope_scaling": dict(told)} if told else {})}
        found = arch_of(tmp_path, values)
        assert found is not None and found == arch_of(tmp_path, as_transformers_reads(tmp_path, values)), kind


def test_layers_of_laguna_have_query_heads_of_their_own_and_gates_of_heads(tmp_path: Path) -> None:
    complete = configuration("laguna")
    arch = arch_of(tmp_path, complete)
    assert arch is not None and arch.num_heads == 8
    assert [layer.heads for layer in arch.layers] == [None, KvHeads(2, 20, queries=4), KvHeads(2, 20, queries=12)]
    assert [arch.with_heads_of(layer).num_heads for layer in arch.on_devices(4, by_experts=False).layers] == [8, 4, 12]
    assert arch_of(tmp_path, complete | {"gating": "per-head"}) == arch
    check_flags(EngineConfig(model="m", host_kv=HostKvConfig(host_kv_gib=1.0)), arch)  # pages have one shape
    for key, value, reason in (
        ("gating", "per-token", "gating is per-token, but known are per-head, per-element"),
        ("moe_router_logit_softcapping", 5.0, "where it is 0.0"),
        ("num_attention_heads_per_layer", [8, 4, 5], "5 heads of layer 2 can't share 2 kv heads evenly"),
        ("num_attention_heads_per_layer", [8, 4], "must be a list of 3"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            read(tmp_path, **(complete | {key: value}))
    with pytest.raises(ConfigError, match=r"12 query heads in layer 2"):
        model_on_devices(arch, 8, by_experts=False)


def test_granites_layers_may_have_thetas_of_their_own_or_no_rope(tmp_path: Path) -> None:
    swash: dict[str, Any] = {"architectures": ["GraniteSWAForCausalLM"], "num_hidden_layers": 5, "sliding_window": 8}
    arch = read(tmp_path, **swash, layer_rope_theta=[0, 5e3, 5e3, 1e4, 0])
    assert windows(arch) == [None, 8, 8, 8, None]
    thetas = [None if layer.rope is None else arch.ropes[layer.rope].theta for layer in arch.layers]
    assert thetas == [None, 5e3, 5e3, 1e4, None]
    with pytest.raises(CheckpointError, match=r"layer_rope_theta is .* but must be numbers of 0 and more"):
        read(tmp_path, **swash, layer_rope_theta=[1, 1, 1, 1, -1])
    with pytest.raises(CheckpointError, match=r"layer_rope_theta is .* a list of 5, one of each layer"):
        read(tmp_path, **swash, layer_rope_theta=[1])


def test_a_rope_that_is_null_is_the_familys_as_in_transformers(tmp_path: Path) -> None:
    """gpt-oss and Gemma 4 have one of their own; one that is told to be plain is plain."""
    for kind, key in (("gpt_oss", "rope_scaling"), ("gpt_oss", "rope_parameters"), ("gemma4", "rope_parameters")):
        told = {name: value for name, value in configuration(kind).items() if name != "rope_parameters"} | {key: None}
        found = arch_of(tmp_path, told)
        assert found is not None and found == arch_of(tmp_path, as_transformers_reads(tmp_path, told)), (kind, key)
    told = {**configuration("gpt_oss"), "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    plain = arch_of(tmp_path, told)
    assert plain is not None and plain.ropes == (RopeParams(5000.0),)


def test_a_switch_of_windows_means_what_it_means_to_transformers(tmp_path: Path) -> None:
    """Without `layer_types`, where families have windows in different layers."""
    for kind in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3", "bamba", *DELTA_KINDS):
        for is_on, last in ((True, 3), (True, 2), (False, 2)):
            values = {key: value for key, value in configuration(kind).items() if key != "layer_types"}
            values |= {"num_hidden_layers": 4, "max_window_layers": last, "no_rope_layers": None}
            if kind not in HYBRID_KINDS:
                values |= {"use_sliding_window": is_on, "sliding_window": 8}
            found, expected = (arch_of(tmp_path, each) for each in (values, as_transformers_reads(tmp_path, values)))
            assert found is not None and found == expected, (kind, is_on, last)


@pytest.mark.parametrize(
    ("name", "model_type", "kind"),
    [
        ("Mistral3ForConditionalGeneration", "mistral3", "mistral"),
        ("InternVLForConditionalGeneration", "internvl", "qwen2"),
        ("Gemma3ForConditionalGeneration", "gemma3", "gemma3"),
        ("Gemma3nForConditionalGeneration", "gemma3n", "gemma3n"),
        ("Gemma4ForConditionalGeneration", "gemma4", "gemma4"),
        ("Gemma4UnifiedForConditionalGeneration", "gemma4_unified", "gemma4_unified"),
        ("Qwen3_5ForConditionalGeneration", "qwen3_5", "qwen3_5"),
    ],
)
def test_a_model_of_several_parts_ties_its_head_as_it_does_in_transformers(
    name: str, model_type: str, kind: str, tmp_path: Path
) -> None:
    """A word for the whole counts; without one its default, whatever is said of the text."""
    for of_text, of_whole in ((False, None), (True, True), (True, False), (False, True)):
        text = {**configuration(kind), "tie_word_embeddings": of_text}
        if name.startswith("Qwen"):
            text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [1, 1, 1]}
        values: dict[str, Any] = {"architectures": [name], "model_type": model_type, "text_config": text}
        values |= {} if of_whole is None else {"tie_word_embeddings": of_whole}
        found = arch_of(tmp_path, values)
        expected = AutoConfig.from_pretrained(tmp_path).tie_word_embeddings
        assert found is not None and found.tie_embeddings is expected, (of_text, of_whole)


def test_queries_that_grow_need_a_product_of_their_own_where_there_is_a_latent(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**configuration("mistral4"), "q_lora_rank": None}))
    with pytest.raises(CheckpointError, match="llama_4_scaling_beta needs q_lora_rank, which is null"):
        arch_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "model_type"), [("InternLM3ForCausalLM", "internlm3"), ("IQuestCoderForCausalLM", "iquestcoder")]
)
def test_a_family_that_is_llama_but_for_its_name_is_llama(name: str, model_type: str, tmp_path: Path) -> None:
    """transformers has a configuration of each, with defaults of its own, and no other code."""
    values: dict[str, Any] = {"architectures": [name], "model_type": model_type, "num_hidden_layers": 2}
    values |= {"vocab_size": 200, "hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 96}
    values |= {"max_position_embeddings": 512, "attention_bias": True, "mlp_bias": True}
    whole = {**as_transformers_reads(tmp_path, values), "architectures": ["LlamaForCausalLM"]}
    found, llama = arch_of(tmp_path, values), arch_of(tmp_path, whole)
    assert found is not None and llama is not None and replace(found, name=llama.name) == llama


def test_a_missing_window_is_the_familys_and_null_is_none(tmp_path: Path) -> None:
    mistral: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    assert windows(read(tmp_path, **mistral, max_position_embeddings=8192)) == [4096] * 2
    assert windows(read(tmp_path, **mistral, max_position_embeddings=4096)) == [None] * 2  # it holds every sequence
    none = read(tmp_path, **mistral, max_position_embeddings=8192, sliding_window=None)
    full = read(tmp_path, **mistral, max_position_embeddings=8192, layer_types=["full_attention"] * 2)
    assert windows(none) == windows(full) == [None] * 2


def test_layers_with_windows_have_a_rope_of_their_own_in_old_and_new_words(tmp_path: Path) -> None:
    gemma: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 8, "sliding_window_pattern": 2}
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = read(tmp_path, **gemma, rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=scaling)
    of_types = {
        "full_attention": {**scaling, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    new = read(tmp_path, **gemma, rope_parameters=of_types)
    assert old == new == read(tmp_path, **gemma, rope_scaling=scaling)
    assert [new.ropes[layer.rope or 0] for layer in new.layers] == [RopeParams(1e4), RopeParams(1e6, "linear", 8.0)]


def test_gemmas_scales_and_caps_may_be_missing_or_null(tmp_path: Path) -> None:
    gemma: dict[str, Any] = {"architectures": ["Gemma2ForCausalLM"]}
    arch = read(tmp_path, **gemma)
    assert (arch.attention_cap, arch.logits_cap, arch.attention_scale) == (50.0, 30.0, 1 / 16)
    assert (arch.embedding_scale, arch.norm_offset, arch.activation, arch.tie_embeddings) == (8.0, 1, "gelu_tanh", True)
    null = read(tmp_path, **gemma, attn_logit_softcapping=None, final_logit_softcapping=None, hidden_activation=None)
    assert (null.attention_cap, null.logits_cap, null.activation) == (None, None, "gelu_tanh")
    with pytest.raises(CheckpointError, match="use_bidirectional_attention is true"):
        read(tmp_path, **gemma, use_bidirectional_attention=True)


def test_layers_without_rope_are_those_that_a_list_or_an_interval_names(tmp_path: Path) -> None:
    smol: dict[str, Any] = {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4}
    assert [layer.rope for layer in read(tmp_path, **smol).layers] == [0, 0, 0, None]
    assert [layer.rope for layer in read(tmp_path, **smol, no_rope_layers=[0, 1, 1, 0]).layers] == [None, 0, 0, None]


def test_longrope_takes_its_factors_by_the_context_limit(tmp_path: Path) -> None:
    phi = read(tmp_path, architectures=["Phi3ForCausalLM"], rope_scaling=LONGROPE, original_max_position_embeddings=512)
    (rope,) = phi.ropes
    assert rope.is_long and rope.amplitude == pytest.approx((1 + np.log(4) / np.log(512)) ** 0.5)  # 2,048 of 512 tokens
    (short,) = phi.for_context(512).ropes
    assert not short.is_long
    np.testing.assert_allclose(inverse_frequencies(short, 16), 2 * inverse_frequencies(rope, 16))
    with pytest.raises(CheckpointError, match="long_factor of rope type longrope must be a list"):
        read(tmp_path, architectures=["Phi3ForCausalLM"], rope_scaling={**LONGROPE, "long_factor": None})


def test_yarn_stretches_the_context(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    arch = read(tmp_path, rope_scaling=yarn)
    assert arch.max_context == 4096
    (rope,) = arch.ropes
    plain, stretched = inverse_frequencies(RopeParams(), 64), inverse_frequencies(rope, 64)
    assert rope.amplitude == pytest.approx(1 + 0.1 * np.log(4))
    assert stretched[0] == plain[0] and stretched[-1] == pytest.approx(plain[-1] / 4)


# As openai/gpt-oss-20b is published, with fewer layers.
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "max_position_embeddings": 131072, "model_type": "gpt_oss",
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 4, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
        ],
        "quant_method": "mxfp4",
    },
    "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0",
    "use_cache": True, "vocab_size": 201088,
}  # fmt: skip


def test_gpt_oss_as_it_is_published_is_understood(tmp_path: Path) -> None:
    arch = read(tmp_path, **GPT_OSS)
    assert windows(arch) == [128, None, 128, None]
    assert arch.has_sinks and arch.attention_bias and arch.attention_out_bias and arch.weight_format is None
    assert (arch.max_context, arch.head_dim) == (131072, 64)
    assert arch.dtype == "bfloat16"  # which the file doesn't name
    (rope,) = arch.ropes
    yarn = {**GPT_OSS["rope_scaling"], "rope_theta": 150000.0}
    frequencies, amplitude = ROPE_INIT_FUNCTIONS["yarn"](GptOssConfig(head_dim=64, rope_parameters=yarn))
    np.testing.assert_allclose(inverse_frequencies(rope, 64), frequencies.numpy(), rtol=1e-5)
    assert rope.amplitude == pytest.approx(amplitude)


# As MiniMaxAI/MiniMax-M2 is published, with fewer layers.
MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"], "attention_dropout": 0.0, "attn_type_list": [1, 1], "head_dim": 128,
    "attn_window_size": None, "eos_token_id": None, "hidden_act": "silu", "hidden_size": 3072,
    "initializer_range": 0.02, "intermediate_size": 1536, "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0, "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192, "model_type": "minimax", "mtp_transformer_layers": 1, "num_attention_heads": 48,
    "num_experts_per_tok": 8, "num_hidden_layers": 2, "num_key_value_heads": 8, "num_local_experts": 256,
    "num_mtp_modules": 3, "output_router_logits": False, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06,
    "rope_theta": 5000000, "rotary_dim": 64, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid", "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "sliding_window": None,
    "tie_word_embeddings": False, "use_cache": True, "use_mtp": True, "use_qk_norm": True, "use_routing_bias": True,
    "vocab_size": 200064,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
}  # fmt: skip


def test_minimax_m2_as_it_is_published_is_understood(tmp_path: Path) -> None:
    arch = read(tmp_path, generation={"eos_token_id": 200020}, **MINIMAX_M2)
    (rope,) = arch.ropes
    assert (rope.rotary_dim, rope.theta, arch.qk_norm, arch.eos_token_ids) == (64, 5e6, "all", (200020,))
    mixture = arch.mixture
    assert mixture is not None and (mixture.num_experts, mixture.ffn_size, mixture.shared_ffn_size) == (256, 1536, 0)
    assert mixture.router.choice_bias and mixture.router.renormalize and mixture.router.score == "sigmoid"
    assert arch.weight_format is not None and arch.weight_format.group == 128
    assert not any(layer.unquantized for layer in arch.layers)


# What folders of the hub say that transformers' own don't.
Q35: dict[str, Any] = {
    "num_hidden_layers": 4, "attn_output_gate": True, "full_attention_interval": 4, "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [], "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    "output_gate_type": "swish", "partial_rotary_factor": 0.25, "head_dim": 256,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 1e7,
        "rope_type": "default",
    },
}  # fmt: skip
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "moe_intermediate_size": 32, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    "scoring_func": "softmax", "norm_topk_prob": False, "aux_loss_alpha": 0.001, "seq_aux": True,
}  # fmt: skip
HUNYUAN_ROPE = {
    "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "type": "dynamic",
}  # fmt: skip


def test_hybrids_as_they_are_published_are_understood(tmp_path: Path) -> None:
    arch = read(tmp_path, architectures=["Qwen3_5ForCausalLM"], **Q35)
    assert (arch.recurrent_layers, arch.ropes[0].rotary_dim, arch.output_gate) == ((0, 1, 2), 64, "number")
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {**LLAMA, **Q35}}
    tower = {"depth": 2, "deepstack_visual_indexes": [], "out_hidden_size": LLAMA["hidden_size"]}
    beside = {"vision_config": tower, "image_token_id": 7, "language_model_only": False}
    seeing = arch_of(tmp_path, {**whole, **beside})
    assert seeing is not None and seeing.tower is not None
    assert (seeing.tower.tokens.image_id, seeing.tower.tokens.video_id) == (7, 248_057)


def test_qwen3_coder_as_it_is_published_is_understood(tmp_path: Path) -> None:
    coder = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
    assert arch_of(tmp_path, {**configuration("qwen3_moe"), **coder}) == arch_of(tmp_path, configuration("qwen3_moe"))


def test_glm_4_7_flash_is_understood_as_it_is_published_and_as_transformers_saves_it_again(tmp_path: Path) -> None:
    """Software that quantizes it keeps `first_k_dense_replace` next to the list that counts."""
    complete = configuration("glm4_moe_lite") | {"mlp_layer_types": ["dense", "sparse", "sparse"]}
    published = {key: value for key, value in complete.items() if key != "mlp_layer_types"}
    published |= {"first_k_dense_replace": 1, "topk_method": "noaux_tc", "partial_rotary_factor": 1.0}
    expected = arch_of(tmp_path, complete)
    assert expected is not None and expected == arch_of(tmp_path, published)
    assert expected == arch_of(tmp_path, as_transformers_reads(tmp_path, published))


@pytest.mark.parametrize(
    ("kind", "stem"),
    [
        ("gemma3", "Gemma3"),
        ("gemma3n", "Gemma3n"),
        ("gemma4", "Gemma4"),
        ("qwen3_5", "Qwen3_5"),
        ("qwen3_5_moe", "Qwen3_5Moe"),
    ],
)
def test_a_decoder_with_another_head_goes_by_the_name_of_its_class(kind: str, stem: str, tmp_path: Path) -> None:
    for ending, head in (("TextModel", "none"), ("TextForSequenceClassification", "labels")):
        arch = arch_of(tmp_path, configuration(kind) | {"architectures": [stem + ending]})
        assert arch is not None and (arch.name, arch.head) == (f"{stem}ForCausalLM", head)


def test_the_number_of_experts_goes_by_any_of_its_names(tmp_path: Path) -> None:
    """Of families whose configuration class has a default for one of them."""
    for kind, names in (
        ("mixtral", ("num_local_experts", "num_experts")),
        ("olmoe", ("num_experts", "num_local_experts")),
    ):
        complete = configuration(kind)
        renamed = {names[1] if key == names[0] else key: value for key, value in complete.items()}
        assert arch_of(tmp_path, renamed) == arch_of(tmp_path, complete) is not None


def test_numbers_of_groups_mean_nothing_to_a_greedy_choice(tmp_path: Path) -> None:
    mixture = read(tmp_path, **V2_LITE).mixture
    assert mixture is not None and (mixture.router.num_groups, mixture.router.top_k) == (1, 6)


def test_a_part_of_a_head_that_turns_has_whole_pairs(tmp_path: Path) -> None:
    glm: dict[str, Any] = {"architectures": ["GlmForCausalLM"], "head_dim": 32, "num_key_value_heads": 2}
    assert read(tmp_path, **glm, partial_rotary_factor=0.625).ropes[0].rotary_dim == 20
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor is 0\.6, which turns 19 of the 32 numbers"):
        read(tmp_path, **glm, partial_rotary_factor=0.6)


def test_a_dynamic_rope_is_stretched_by_its_alpha_or_plain_up_to_its_context(tmp_path: Path) -> None:
    """Hunyuan's as it is published; without an alpha none of its tokens would be turned otherwise before the end."""
    (rope,) = read(tmp_path, architectures=["HunYuanDenseV1ForCausalLM"], rope_scaling=HUNYUAN_ROPE).ropes
    assert (rope.kind, rope.factor) == ("ntk", 1000.0)
    arch = read(tmp_path, rope_scaling={"type": "dynamic", "factor": 4.0})
    assert arch.ropes == (RopeParams(),) and arch.max_context == LLAMA["max_position_embeddings"]


def test_gelu_means_its_approximation_to_gemma_1_alone(tmp_path: Path) -> None:
    gemma = read(tmp_path, architectures=["GemmaForCausalLM"], num_key_value_heads=1, hidden_act="gelu")
    assert gemma.activation == "gelu_tanh"
    with pytest.raises(CheckpointError, match="hidden_act is gelu"):
        read(tmp_path, hidden_act="gelu")


def test_qwen_3s_mixtures_have_windows_in_all_layers_or_none(tmp_path: Path) -> None:
    told: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "moe_intermediate_size": 32,
        "sliding_window": 8, "max_window_layers": 1,
    }  # fmt: skip
    assert windows(read(tmp_path, **told, use_sliding_window=True)) == [8, 8]
    assert windows(read(tmp_path, **told)) == [None, None]


def test_exaones_layers_without_a_window_are_not_turned(tmp_path: Path) -> None:
    exaone: dict[str, Any] = {"architectures": ["Exaone4ForCausalLM"], "num_hidden_layers": 5, "num_key_value_heads": 4}
    for pattern in ("LLLG", 4):
        arch = read(tmp_path, **exaone, sliding_window=8, sliding_window_pattern=pattern)
        assert windows(arch) == [8, 8, 8, None, 8]
        assert [layer.rope for layer in arch.layers] == [0, 0, 0, None, 0]
    whole = read(tmp_path, **exaone, sliding_window=None, sliding_window_pattern=None)
    assert windows(whole) == [None] * 5 and all(layer.rope == 0 for layer in whole.layers)


def test_ernies_experts_begin_and_end_at_a_layer(tmp_path: Path) -> None:
    ernie: dict[str, Any] = {
        "architectures": ["Ernie4_5_MoeForCausalLM"], "num_hidden_layers": 6, "num_key_value_heads": 2,
        "moe_layer_start_index": 1,
    }  # fmt: skip
    for changes, expected in (({}, [1, 2, 3, 4, 5]), ({"moe_layer_end_index": 4, "moe_layer_interval": 2}, [1, 3])):
        arch = read(tmp_path, None, **ernie, **changes)
        assert [i for i, layer in enumerate(arch.layers) if isinstance(layer.mlp, MoeMlp)] == expected
    with pytest.raises(CheckpointError, match="use_bias is true"):
        read(tmp_path, **ernie, use_bias=True)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_part_of_a_head_that_turns_comes_to_split_halves(interleaved: bool) -> None:
    """Each pair of a checkpoint stands half a head apart, and the dimensions that don't turn have angle 0."""
    rope = RopeParams(rotary_dim=6, interleaved=interleaved)
    order = split_half_order(rope, 10) or []
    assert sorted(order) == list(range(10))
    pairs = [(order[i], order[i + 5]) for i in range(5)]
    assert pairs[:3] == ([(0, 1), (2, 3), (4, 5)] if interleaved else [(0, 3), (1, 4), (2, 5)])
    assert np.all(inverse_frequencies(rope, 10)[3:] == 0)
    assert split_half_order(RopeParams(), 10) is None


# With the keys that Llama 4 Scout's folder has for its decoder, and what Maverick's has instead.
SCOUT: dict[str, Any] = {
    "_attn_implementation_autoset": True, "attention_bias": False, "attention_chunk_size": 8192,
    "attention_dropout": 0.0, "attn_scale": 0.1, "attn_temperature_tuning": True, "bos_token_id": 200000,
    "cache_implementation": "static", "eos_token_id": [200001, 200007, 200008], "floor_scale": 8192,
    "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
    "initializer_range": 0.02, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
    "intermediate_size_mlp": 16384, "layer_types": (["chunked_attention"] * 3 + ["full_attention"]) * 12,
    "max_position_embeddings": 10485760, "model_type": "llama4_text", "moe_layers": list(range(48)),
    "no_rope_layers": [1, 1, 1, 0] * 12, "num_attention_heads": 40, "num_experts_per_tok": 1,
    "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16, "output_router_logits": False,
    "pad_token_id": 200018, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "torch_dtype": "bfloat16", "use_cache": True,
    "use_qk_norm": True, "vocab_size": 202048,
}  # fmt: skip
MAVERICK = SCOUT | {
    "attn_temperature_tuning": 4, "interleave_moe_layer_step": 2, "max_position_embeddings": 1048576,
    "moe_layers": None, "num_local_experts": 128, "rope_scaling": None, "use_qk_norm": False, "layer_types": None,
    "no_rope_layers": [],
}  # fmt: skip


def test_llama_4_as_it_is_published_is_understood(tmp_path: Path) -> None:
    def of(text: dict[str, Any]) -> ModelArch:
        whole = {
            "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "text_config": text,
            "eoi_token_index": 200081, "image_token_index": 200092, "tie_word_embeddings": False,
            "vision_config": {"hidden_size": 1408, "vision_feature_layer": -1},
        }  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(whole))
        return arch_from_folder(tmp_path)

    scout, maverick = of(SCOUT), of(MAVERICK)
    assert (scout.max_context, maverick.max_context) == (10_485_760, 1_048_576)
    for arch in (scout, maverick):
        assert [layer.chunk for layer in arch.layers] == [8192, 8192, 8192, None] * 12
        grown, turned = arch.ropes[arch.layers[3].rope or 0], arch.ropes[arch.layers[0].rope or 0]
        assert not inverse_frequencies(grown, 128).any() and inverse_frequencies(turned, 128).all()
        assert (grown.query_growth, grown.original_context, grown.growth_offset) == (0.1, 8192, 1)
        assert arch.mixture is not None and (arch.mixture.ffn_size, arch.mixture.shared_ffn_size) == (8192, 8192)
    assert [layer.unit_heads for layer in scout.layers] == [True, True, True, False] * 12
    assert all(isinstance(layer.mlp, MoeMlp) and layer.mlp.num_experts == 16 for layer in scout.layers)
    assert not any(layer.unit_heads for layer in maverick.layers) and maverick.ffn_size == 16_384
    assert [isinstance(layer.mlp, MoeMlp) for layer in maverick.layers] == [False, True] * 24
    with pytest.raises(CheckpointError, match=r"num_experts_per_tok is 2, but .* only served where a token has 1"):
        of(SCOUT | {"num_experts_per_tok": 2})


def test_a_llama_3_rope_without_wavelengths_between_long_and_short_ones_is_that_of_transformers() -> None:
    rope = RopeParams(500000.0, "llama3", 16.0, 1.0, 1.0, 8192)
    config = Llama4TextConfig(rope_parameters={**SCOUT["rope_scaling"], "rope_theta": 500000.0})
    expected = ROPE_INIT_FUNCTIONS["llama3"](config, None)[0].numpy()
    np.testing.assert_allclose(inverse_frequencies(rope, 128), expected, rtol=1e-5)


# With keys that Hunyuan-A13B-Instruct's folder has, and fewer layers.
A13B: dict[str, Any] = {
    "architectures": ["HunYuanMoEV1ForCausalLM"], "attention_bias": False, "attention_head_dim": 128,
    "cla_share_factor": 2, "eod_token_id": 3, "eos_token_id": 127960, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 3072, "max_position_embeddings": 32768, "mlp_bias": False,
    "model_type": "hunyuan_v1_moe", "moe_intermediate_size": [3072] * 4, "moe_layer_num_skipped": 0,
    "moe_topk": [8] * 4, "norm_topk_prob": True, "norm_type": "rms", "num_attention_heads": 32, "num_experts": 64,
    "num_hidden_layers": 4, "num_key_value_heads": 8, "num_shared_expert": [1] * 4, "pad_id": 127961,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": True, "use_cla": False,
    "use_mixed_mlp_moe": True, "use_qk_norm": True, "use_rotary_pos_emb": True, "vocab_size": 128167,
}  # fmt: skip


def test_numbers_that_a_file_lists_for_each_layer_must_be_equal(tmp_path: Path) -> None:
    arch = arch_of(tmp_path, A13B | {"rope_scaling": HUNYUAN_ROPE})
    assert arch is not None and arch.mixture is not None and arch.ropes[0].kind == "ntk"
    assert (arch.mixture.router.top_k, arch.mixture.shared_ffn_size, arch.mixture.ffn_size) == (8, 3072, 3072)
    for changes, message in (
        ({"moe_topk": [8, 8, 4, 8]}, r"moe_topk is \[8, 8, 4, 8\], but .* all of these are the same"),
        ({"moe_intermediate_size": [2048] * 4}, "moe_intermediate_size is 2048, but .* where it is 3072"),
        ({"num_shared_expert": [2] * 4}, "num_shared_expert is 2, but"),
        ({"moe_topk": []}, r"moe_topk is \[\], but"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(A13B | changes))
        with pytest.raises(CheckpointError, match=message):
            arch_from_folder(tmp_path)


# As their folders are published, but for sizes.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Cohere2ForCausalLM": {
        "cache_implementation": "hybrid", "head_dim": 128, "hidden_act": "silu", "layer_norm_eps": 1e-05,
        "layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 8192, "model_max_length": 131072,
        "num_key_value_heads": 2, "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0,
        "sliding_window": 4096, "sliding_window_pattern": 4, "use_embedding_sharing": True,
        "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": False,
        "use_qk_norm": False,
    },
    "Starcoder2ForCausalLM": {
        "attention_softmax_in_fp32": True, "embedding_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_epsilon": 1e-05, "max_position_embeddings": 16384, "mlp_type": "default", "norm_epsilon": 1e-05,
        "norm_type": "layer_norm", "num_key_value_heads": 2, "residual_dropout": 0.1, "rope_theta": 999999.44,
        "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True, "sliding_window": 4096, "use_bias": True,
    },
    "GPTNeoXForCausalLM": {
        "hidden_act": "gelu", "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "rotary_emb_base": 10000,
        "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True,
    },
    "OPTForCausalLM": {
        "_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu",
        "do_layer_norm_before": True, "dropout": 0.1, "ffn_dim": 3072, "init_std": 0.02, "intermediate_size": None,
        "max_position_embeddings": 2048, "prefix": "</s>", "word_embed_proj_dim": 512,
    },
}  # fmt: skip
GPT2: dict[str, Any] = {
    "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50256,
    "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
    "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip


def test_models_with_layer_norm_as_they_are_published_are_understood(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "num_hidden_layers": 5, "head_dim": None}
    read_as = {
        name: read(tmp_path, None, architectures=[name], **{**sizes, "rms_norm_eps": None, **told})
        for name, told in PUBLISHED.items()
    }
    cohere = read_as["Cohere2ForCausalLM"]
    assert windows(cohere) == [4096, 4096, 4096, None, 4096] and cohere.max_context == 131072
    assert [layer.rope for layer in cohere.layers] == [0, 0, 0, None, 0] and cohere.ropes[0].interleaved
    assert (cohere.logits_divisor, cohere.parallel, cohere.norm_bias, cohere.tie_embeddings) == (
        4,
        "shared norm",
        False,
        True,
    )
    assert (read_as["GPTNeoXForCausalLM"].activation, read_as["GPTNeoXForCausalLM"].ropes[0].rotary_dim) == ("gelu", 32)
    assert (read_as["OPTForCausalLM"].num_positions, read_as["OPTForCausalLM"].ffn_size) == (2050, 3072)
    assert all(arch.centred for arch in read_as.values())
    gpt2 = arch_of(tmp_path, GPT2)
    assert gpt2 is not None and (gpt2.ffn_size, gpt2.num_positions, gpt2.max_context) == (4 * 768, 1024, 1024)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is false, but .* where it is true"),
        ("opt", {"word_embed_proj_dim": 64}, "word_embed_proj_dim is 64, but .* where it is 128"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is false"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm is true"),
    ],
)
def test_forms_of_a_family_that_are_not_built_are_refused_by_name(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configuration(kind) | changes))
    with pytest.raises(CheckpointError, match=message):
        arch_from_folder(tmp_path)
