"""What config.json says of models with states, and what these take of the memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.features import VisionConfig
from jaxsgl.engine.layer_state import layer_states
from jaxsgl.engine.start.memory import Memory
from jaxsgl.engine.start.sizing import choose_states, plan_capacity
from jaxsgl.engine.weight_store import read_arch
from jaxsgl.errors import CheckpointError, ConfigError
from jaxsgl.models import arch_from_folder
from jaxsgl.models.layer_spec import DeltaNet, DenseMlp, Mamba, MoeMlp, Selective, ShortConv
from jaxsgl.weights import load_params
from jaxsgl.weights.sharding import model_on_devices
from tests.checkpoints import make_checkpoint
from tests.models.test_arch import read
from tests.plain_model import checkpoint_logits, mesh_of, plain_logits

BFLOAT16 = jnp.dtype("bfloat16")
GIB = 2**30
# As transformers' default `Qwen3_5TextConfig` has it.
NINE_B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10]},
}


# As tiiuae/Falcon-H1-1.5B-Deep-Instruct is published, but for numbers of layers and digits of factors.
FALCON_H1: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "attention_bias": False,
    "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.375, "attn_layer_indices": None, "bos_token_id": 1,
    "embedding_multiplier": 5.65, "eos_token_id": 11, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1280,
    "intermediate_size": 3072, "key_multiplier": 0.39, "lm_head_multiplier": 0.0195, "mamba_chunk_size": 128,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 256,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24, "mamba_norm_before_gate": False,
    "mamba_proj_bias": False, "mamba_rms_norm": False, "mamba_use_mlp": True, "max_position_embeddings": 131072,
    "mlp_bias": False, "mlp_expansion_factor": 8, "mlp_multipliers": [0.88, 0.35], "num_attention_heads": 6,
    "num_hidden_layers": 3, "num_key_value_heads": 2, "num_logits_to_keep": 1, "projectors_bias": False,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.35, 0.25, 0.3, 0.25, 0.5], "ssm_out_multiplier": 0.235, "tie_word_embeddings": False,
    "time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": "auto",
    "vocab_size": 65537,
}  # fmt: skip


def test_every_layer_of_falcon_h1_keeps_a_state_and_attends(tmp_path: Path) -> None:
    arch = read(tmp_path, **FALCON_H1)
    assert arch.attention_layers == arch.recurrent_layers == arch.places == (0, 1, 2)
    net = arch.recurrent_net
    assert isinstance(net, Mamba) and (net.key_heads, net.value_heads, net.value_size) == (1, 24, 64)
    assert not net.normalizes and net.out_factor == 0.235
    np.testing.assert_allclose(net.row_factors, np.multiply(1.25, [0.25, 0.3, 0.25, 0.35, 0.5]))
    assert (arch.attention_scale, arch.attention_out_factor) == (128**-0.5 * 0.39, 0.375)
    assert (arch.unit_factors, arch.embedding_scale, arch.logits_divisor) == ((0.88, 0.35), 5.65, 1 / 0.0195)
    states = layer_states(arch, 64, BFLOAT16)
    both = [array.name for layer in states.layers[:1] for array in (*layer.by_page, *layer.by_row)]
    assert both == ["k", "v", "matrices", "inputs"]
    for changes, named in (
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "mamba_norm_before_gate is true"),
        ({"ssm_multipliers": [1.0]}, "ssm_multipliers is .* a list of 5 numbers"),
        ({"projectors_bias": True}, "projectors_bias is true"),
        ({"attention_bias": True}, "attention_bias is true"),
    ):
        with pytest.raises(CheckpointError, match=named):
            read(tmp_path, **{**FALCON_H1, **changes})


# As ai21labs/AI21-Jamba-Mini-1.5 is published.
JAMBA: dict[str, Any] = {
    "architectures": ["JambaForCausalLM"], "model_type": "jamba", "attention_dropout": 0.0, "attn_layer_offset": 4,
    "attn_layer_period": 8, "bos_token_id": 1, "eos_token_id": [2, 519], "expert_layer_offset": 1,
    "expert_layer_period": 2, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2,
    "mamba_inner_layernorms": True, "mamba_proj_bias": False, "max_position_embeddings": 262144,
    "num_attention_heads": 32, "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_logits_to_keep": 1, "pad_token_id": 0, "rms_norm_eps": 1e-06,
    "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False, "use_cache": True,
    "use_mamba_kernels": True, "vocab_size": 65536,
}  # fmt: skip


def test_jamba_attends_and_mixes_experts_by_periods(tmp_path: Path) -> None:
    arch = read(tmp_path, **JAMBA)
    assert arch.attention_layers == (4, 12, 20, 28) and {layer.rope for layer in arch.layers} == {None}
    assert [isinstance(layer.mlp, MoeMlp) for layer in arch.layers] == [False, True] * 16
    assert arch.mixture is not None and not arch.mixture.router.renormalize and arch.ffn_size == 14_336
    assert arch.recurrent_net == Selective(1, 1, 16, 8192, 4, rank=256)
    assert layer_states(arch, 64, BFLOAT16).row_bytes == 28 * (16 + 4) * 8192 * 4
    dense = read(tmp_path, **{**JAMBA, "num_experts": 1, "mamba_dt_rank": "auto"})
    assert dense.mixture is None and {layer.mlp for layer in dense.layers} == {DenseMlp(14_336)}
    assert dense.recurrent_net == arch.recurrent_net
    with pytest.raises(ConfigError, match=r"it has 1 groups of its layers of Mamba: give --tp 1"):
        model_on_devices(arch, 2, by_experts=False)
    with pytest.raises(CheckpointError, match="mamba_inner_layernorms is false"):
        read(tmp_path, **{**JAMBA, "mamba_inner_layernorms": False})


def test_every_fourth_layer_attends_unless_config_json_says_otherwise(tmp_path: Path) -> None:
    arch = read(tmp_path, **NINE_B)
    assert arch.attention_layers == tuple(range(3, 32, 4)) and len(arch.recurrent_layers) == 24
    assert arch.recurrent_net == DeltaNet(16, 32, 128, 128, 4) and arch.head_dim == 256
    assert arch.output_gate == "number" and arch.norm_offset == 1 and arch.ropes[0].rotary_dim == 64
    assert arch.places[:5] == (0, 1, 2, 0, 3)
    assert read(tmp_path, **NINE_B, full_attention_interval=2).attention_layers == tuple(range(1, 32, 2))
    told = ["full_attention", *["linear_attention"] * 31]
    assert read(tmp_path, **NINE_B, layer_types=told).attention_layers == (0,)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["linear_attention"] * 32}, "layer_types has no full_attention"),
        ({"layer_types": ["sliding_attention"] * 32}, "layer_types is .* each full_attention or linear_attention"),
        ({"linear_num_value_heads": 20}, "20 value heads .* can't share 16 key heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
    ],
)
def test_what_no_layer_can_be_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(tmp_path, **NINE_B, **changes)


# As published folders of Granite 4.0 have it.
GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "vocab_size": 100_352,
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "intermediate_size": 768,
    "shared_intermediate_size": 1536,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "position_embedding_type": "nope",
    "normalization_function": "rmsnorm",
    "mamba_d_state": 128,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "max_position_embeddings": 131_072,
}


def test_layers_of_granite_are_mamba_or_attention_without_a_rope_and_mix_experts(tmp_path: Path) -> None:
    arch = read(tmp_path, **GRANITE)
    assert arch.recurrent_net == Mamba(1, 128, 128, 64, 4) and arch.recurrent_layers == (0, 1, 3)
    assert {layer.rope for layer in arch.layers} == {None}
    mlp = arch.layers[0].mlp
    assert isinstance(mlp, MoeMlp) and (mlp.num_experts, mlp.ffn_size, mlp.shared_ffn_size) == (72, 768, 1536)
    assert mlp.router.score == "softmax_of_chosen"
    dense = {**GRANITE, "num_local_experts": 0, "num_experts_per_tok": 0, "layer_types": ["attention"] * 4}
    dense |= {"position_embedding_type": "rope", "intermediate_size": 8192, "shared_intermediate_size": 8192}
    arch = read(tmp_path, **dense)
    assert arch.recurrent_net is None and {layer.mlp for layer in arch.layers} == {DenseMlp(8192)}
    assert {layer.rope for layer in arch.layers} == {0}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["mamba"] * 4}, "layer_types has no full_attention"),
        ({"layer_types": ["mamba", "conv", "attention", "mamba"]}, "layer_types is .* each full_attention or linear"),
        ({"mamba_n_heads": 100}, "100 heads .* don't make 8192"),
        ({"mamba_n_groups": 3}, "in 3 groups .* don't make 8192"),
        ({"mamba_d_conv": 1}, "mamba_d_conv is 1"),
        ({"mamba_conv_bias": False}, "mamba_conv_bias is False"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias is True"),
        ({"time_step_limit": [0.001, 0.1]}, r"time_step_limit is \[0.001, 0.1\]"),
    ],
)
def test_what_no_layer_of_mamba_can_be_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(tmp_path, **{**GRANITE, **changes})


# As NVIDIA publishes Nemotron 3 Nano, with fewer blocks.
NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEM*E-",
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262_144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "partial_rotary_factor": 1.0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "ssm_state_size": 128,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131_072,
}


def test_layers_of_nemotron_are_a_mixer_or_an_mlp_alone(tmp_path: Path) -> None:
    arch = read(tmp_path, **NEMOTRON)
    of_other_sizes = {"rms_norm_eps": 1e-5, "time_step_rank": 512, "time_step_limit": [0.0, 1e308]}
    assert read(tmp_path, **{**NEMOTRON, **of_other_sizes}) == arch
    assert arch.recurrent_net == Mamba(8, 64, 128, 64, 4)
    assert (arch.recurrent_layers, arch.attention_layers) == ((0, 2), (3,)) and arch.places == (0, -1, 1, 0, -1, -1)
    mixture = arch.layers[1].mlp
    assert [layer.mlp for layer in arch.layers] == [None, mixture, None, None, mixture, DenseMlp(1856)]
    assert [layer.mixer is None for layer in arch.layers] == [False, True, False, False, True, True]
    assert isinstance(mixture, MoeMlp) and (mixture.num_experts, mixture.shared_ffn_size) == (128, 3712)
    assert (mixture.router.top_k, mixture.router.scale, mixture.router.score) == (6, 2.5, "sigmoid")
    assert {layer.rope for layer in arch.layers} == {None} and not arch.gated and arch.activation == "relu2"
    words = ["mamba", "moe", "mamba", "attention", "moe", "mlp"]
    named = {key: value for key, value in NEMOTRON.items() if key != "hybrid_override_pattern"}
    assert read(tmp_path, **named, layers_block_type=words) == arch
    kept = [(bool(each.by_page), bool(each.by_row)) for each in layer_states(arch, 64, BFLOAT16).layers]
    nothing, states, pages = (False, False), (False, True), (True, False)
    assert kept == [states, nothing, states, pages, nothing, nothing]
    latent = read(tmp_path, **NEMOTRON, moe_latent_size=1024).mixture
    assert latent is not None and latent.width(2688) == 1024 and mixture.width(2688) == 2688


def test_sizes_of_blocks_that_there_are_none_of_mean_nothing(tmp_path: Path) -> None:
    """Dense models of the family give sizes of experts, too."""
    without = {**NEMOTRON, "hybrid_override_pattern": "M-*-", "moe_latent_size": 1024}
    assert read(tmp_path, **without).mixture is None
    attending = read(tmp_path, **{**without, "hybrid_override_pattern": "*-", "ssm_state_size": "none"})
    assert attending.recurrent_net is None and attending.num_layers == 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hybrid_override_pattern": "MEM"}, "layers_block_type has no full_attention"),
        ({"hybrid_override_pattern": "MXM*"}, r"layers_block_type is MXM\*, .* a word of the letters M \* - E"),
        ({"layers_block_type": ["conv", "attention"]}, "must be a list of linear_attention, full_attention, mlp, moe"),
        ({"n_groups": 7}, r"64 heads \(mamba_num_heads\) .* in 7 groups \(n_groups\) can't be"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act is gelu, but only silu"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act is silu, but supported are relu2"),
        ({"use_bias": True}, "use_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is true, which may change results"),
    ],
)
def test_what_no_block_can_be_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(tmp_path, **{**NEMOTRON, **changes})


# As Liquid AI publishes LFM2 1.2B, with fewer layers.
LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12_288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5],
    "hidden_size": 2048,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000.0,
    "use_pos_enc": True,
    "vocab_size": 65_536,
}


def test_layers_of_lfm2_convolve_or_attend(tmp_path: Path) -> None:
    arch = read(tmp_path, **LFM2)
    assert arch.recurrent_net == ShortConv(32, 32, 0, 64, 3) and arch.recurrent_layers == (0, 1, 3, 4)
    assert arch.attention_layers == (2, 5) and arch.tie_embeddings and arch.qk_norm == "head"
    assert {layer.mlp for layer in arch.layers} == {DenseMlp(8192)}, "two thirds of what is told"
    kept = layer_states(arch, 64, BFLOAT16)
    assert kept.row_bytes == 4 * 3 * 2048 * 4 and not kept.by_row("matrices"), "a state has no matrix"
    told = {key: value for key, value in LFM2.items() if key not in ("block_ff_dim", "full_attn_idxs")}
    told |= {"intermediate_size": 10_752, "layer_types": ["conv", "full_attention"] * 3, "tie_embedding": False}
    other = read(tmp_path, **told)
    assert other.recurrent_layers == (0, 2, 4) and not other.tie_embeddings
    assert other.ffn_size == 7168
    assert read(tmp_path, **{**told, "block_ffn_dim_multiplier": 1.01}).ffn_size == 7424, "whole multiples of 256"
    assert read(tmp_path, **{**told, "block_auto_adjust_ff_dim": False}).ffn_size == 10_752
    assert read(tmp_path, **{**told, "layer_types": ["full_attention"] * 6}).recurrent_net is None


def test_layers_of_lfm2_with_experts(tmp_path: Path) -> None:
    """As LFM2 8B-A1B is published: the first layers have plain MLPs, as wide as told."""
    told = {key: value for key, value in LFM2.items() if not key.startswith(("block_", "conv_d", "conv_u"))}
    told |= {"architectures": ["Lfm2MoeForCausalLM"], "layer_types": ["conv", "conv", "full_attention"] * 2}
    told |= {"intermediate_size": 7168, "moe_intermediate_size": 1792, "num_experts": 32, "num_experts_per_tok": 4}
    told |= {"num_dense_layers": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_expert_bias": True}
    arch = read(tmp_path, **told)
    mixture = arch.mixture
    assert mixture is not None and [layer.mlp for layer in arch.layers] == [DenseMlp(7168)] * 2 + [mixture] * 4
    router = mixture.router
    assert (router.top_k, router.score, router.renormalize, router.choice_bias) == (4, "sigmoid", True, True)
    unbiased = read(tmp_path, **{**told, "use_expert_bias": False}).mixture
    assert unbiased is not None and not unbiased.router.choice_bias


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["conv"] * 6}, "layer_types has no full_attention"),
        ({"layer_types": ["mamba"] * 6}, "layer_types is .* each full_attention or linear_attention"),
        ({"conv_L_cache": 1}, "conv_L_cache is 1"),
        ({"conv_bias": True}, "conv_bias is true"),
    ],
)
def test_what_no_convolution_can_be_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=named):
        read(tmp_path, **{**LFM2, **changes})


def test_devices_share_groups_of_mamba(tmp_path: Path) -> None:
    whole = layer_states(read(tmp_path, **GRANITE), 64, BFLOAT16).row_bytes
    assert whole == 3 * (128 * 128 * 64 + 4 * (8192 + 2 * 128)) * 4
    with pytest.raises(ConfigError, match=r"1 groups of its layers of Mamba-2.*--tp 1"):
        model_on_devices(read(tmp_path, **GRANITE), 2, by_experts=False)


def test_mixtures_have_a_shared_expert_with_a_gate(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_experts": 8, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
    for name in ("Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM"):
        mlp = read(tmp_path, **{**NINE_B, "architectures": [name]}, num_experts_per_tok=2, **sizes).layers[0].mlp
        assert isinstance(mlp, MoeMlp) and mlp.shared_gate and mlp.shared_ffn_size == 48
        assert mlp.router.renormalize and mlp.router.score == "softmax"


def test_devices_share_key_heads_with_their_value_heads(tmp_path: Path) -> None:
    arch = read(tmp_path, **NINE_B)
    whole = layer_states(arch, 64, BFLOAT16).row_bytes
    assert whole == 24 * (32 * 128 * 128 + 4 * 8192) * 4
    assert layer_states(arch, 64, BFLOAT16, 2).row_bytes == whole // 2
    with pytest.raises(ConfigError, match=r"9 key heads of its gated delta-nets.*--tp 1"):
        model_on_devices(
            read(tmp_path, **NINE_B, linear_num_key_heads=9, linear_num_value_heads=18), 2, by_experts=False
        )


def test_states_take_memory_before_pages_and_rows_give_way(tmp_path: Path) -> None:
    arch = read(tmp_path, **NINE_B)
    states = choose_states(EngineConfig(), arch, "gpu", BFLOAT16)
    assert states.page_size == 64 and choose_states(EngineConfig(), arch, "cpu", BFLOAT16).page_size == 64

    def planned(gib: int, **flags: Any) -> tuple[int, int | None, int]:
        memory = Memory("gpu", gib * GIB, gib * GIB)
        capacity = plan_capacity(EngineConfig(context_length=4096, **flags), arch, states, memory)
        return capacity.num_rows, capacity.num_snapshots, capacity.num_pages

    rows, snapshots, pages = planned(60)
    assert (rows, snapshots) == (256, 256)  # 0.3 of what 257 states of 51 MiB leave, in a steady number
    assert 0.9 < ((257 + 256) * states.row_bytes + pages * states.page_bytes) / (60 * GIB) <= 1
    assert planned(60, snapshot_share=0.11)[1] == 96 and planned(60, disable_radix_cache=True)[1] == 0
    few, *_ = planned(10)
    assert few == 5 * GIB // states.row_bytes - 1
    assert planned(10, max_running_requests=16)[:2] == (16, 48)


def test_the_text_of_a_model_that_sees_images_is_its_decoders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without the tower, which may be missing then, and draft heads; its keys stand in an object of their own."""
    folder = make_checkpoint("qwen3_5_moe", tmp_path / "text")
    config = json.loads((folder / "config.json").read_text())
    name, hidden = "Qwen3_5MoeForConditionalGeneration", config["hidden_size"]
    rope = config["rope_parameters"] | {"mrope_section": [1, 1, 1]}
    whole = {"architectures": [name], "text_config": config | {"rope_parameters": rope}, "image_token_id": 10}
    whole["vision_config"] = {"depth": 2, "out_hidden_size": hidden}
    found = load_file(folder / "model.safetensors")
    tensors = {key.replace("model.", "model.language_model.", 1): tensor for key, tensor in found.items()}
    tensors |= {key: found["model.norm.weight"].clone() for key in ("mtp.norm.weight", "model.visual.norm.weight")}
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "config.json").write_text(json.dumps(whole))
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    seeing = arch_from_folder(tmp_path / "whole")
    assert seeing.tower is not None and seeing.tower.layers.taps == () and seeing.tower.row_len == hidden
    language = EngineConfig(model=str(tmp_path / "whole"), vision=VisionConfig(language_only=True))
    arch = read_arch(language, tmp_path / "whole")
    assert arch.tower is None
    with caplog.at_level("INFO"):
        params = load_params(tmp_path / "whole", arch, jnp.dtype("float32"), mesh_of())
    prompt = list(range(3, 12))
    assert (plain_logits(arch, params, prompt) == checkpoint_logits(folder, prompt)).all()
    assert "1 tensors of a draft head (mtp.*) are no part of the model: --speculative-algorithm NEXTN" in caplog.text
