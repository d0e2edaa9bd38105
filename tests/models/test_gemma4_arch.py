"""Layers of Gemma 4, which differ: their heads, keys that they share, what of it pages hold, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.features import HostKvConfig, LoraConfig, SpeculationConfig
from jaxsgl.engine.start.model_flags import check_flags, check_stages
from jaxsgl.engine.start.sizing import choose_states
from jaxsgl.errors import CheckpointError, ConfigError
from jaxsgl.models.layer_spec import DenseMlp, KvHeads
from jaxsgl.weights.sharding import model_on_devices
from tests.models.test_arch import read

pytestmark = pytest.mark.device

BFLOAT16 = jnp.dtype("bfloat16")

GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
}


def test_full_layers_of_a_gemma_4_have_heads_of_their_own_in_old_and_new_words(tmp_path: Path) -> None:
    wide, two = {"head_dim": 32}, {"head_dim": 32, "num_key_value_heads": 2}
    old = read(tmp_path, **GEMMA4, global_head_dim=32, num_global_key_value_heads=2)
    assert old == read(tmp_path, **GEMMA4, per_layer_config={"1": wide, "03": wide})
    assert [layer.heads for layer in old.layers] == [None, KvHeads(4, 32)] * 2
    own = read(tmp_path, **GEMMA4, attention_k_eq_v=True, global_head_dim=32, num_global_key_value_heads=2)
    assert own == read(tmp_path, **GEMMA4, attention_k_eq_v=True, per_layer_config={"1": two, "3": two})
    assert own.all_heads == (KvHeads(4, 16), KvHeads(2, 32)) and own.attention_scale == 1.0
    assert [layer.values_are_keys for layer in own.layers] == [False, True] * 2
    assert [heads.number for heads in own.on_devices(8, by_experts=False).all_heads] == [8, 8]
    assert read(tmp_path, **GEMMA4).layers[1].heads == KvHeads(4, 512)
    assert read(tmp_path, **GEMMA4, per_layer_config={}).all_heads == (KvHeads(4, 16),)


def test_the_last_layers_of_a_gemma_4_read_the_last_keys_of_their_kind(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"] * 2
    shared = {**GEMMA4, "num_hidden_layers": 6, "layer_types": types, "use_double_wide_mlp": True}
    arch = read(tmp_path, **shared, num_kv_shared_layers=3, intermediate_size=48)
    assert [layer.keys_from for layer in arch.layers] == [None, None, None, 2, 1, 1]  # the last one is full
    assert (arch.attention_layers, arch.reading_layers, arch.places) == ((0, 1, 2), (3, 4, 5), (0, 1, 2, 3, 4, 5))
    assert [layer.mlp.ffn_size for layer in arch.layers if isinstance(layer.mlp, DenseMlp)] == [48] * 3 + [96] * 3


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("attention_bias", True, "attention_bias is true"),
        ("use_bidirectional_attention", "all", "use_bidirectional_attention is all"),
        ("num_kv_shared_layers", 4, "num_kv_shared_layers is 4, but must be 0 to 3"),
        ("num_kv_shared_layers", 3, "none before them is of full_attention"),
        ("per_layer_config", {"1": {"sliding_window": 4}}, "per_layer_config.1.sliding_window is not supported"),
        ("per_layer_config", {"4": {"head_dim": 4}}, "per_layer_config has 4, but must have objects by the index"),
        ("per_layer_config", {"1": {"head_dim": 32}}, "gives layers of full_attention heads of several sizes"),
        ("per_layer_config", {"1": {"num_key_value_heads": 3}}, "8 heads of layer 1 can't share 3 kv heads evenly"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}, "must have an object sliding_attention"),
        ("hidden_activation", "relu", "hidden_activation is relu"),
        ("query_pre_attn_scalar", 256, "query_pre_attn_scalar is 256"),
        ("attn_logit_softcapping", 50.0, "attn_logit_softcapping is 50.0"),
    ],
)
def test_what_a_gemma_4_folder_may_not_say_is_refused_by_name(
    key: str, value: Any, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        read(tmp_path, **{**GEMMA4, key: value})


def test_sizes_of_a_gemma_4_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="vocab_size_per_layer_input is 8, but must be vocab_size, "):
        read(tmp_path, **{**GEMMA4, "hidden_size_per_layer_input": 4}, vocab_size_per_layer_input=8)
    without = {key: value for key, value in GEMMA4.items() if key != "layer_types"}
    with pytest.raises(CheckpointError, match="sliding_window_pattern is 2, but without layer_types every 6th layer"):
        read(tmp_path, **without, sliding_window_pattern=2)
    assert read(tmp_path, **GEMMA4, use_bidirectional_attention="vision") == read(tmp_path, **GEMMA4)


def test_pages_hold_a_part_of_each_shape_and_nothing_of_layers_that_read_others(tmp_path: Path) -> None:
    arch = read(tmp_path, **GEMMA4, global_head_dim=32, num_kv_shared_layers=2)
    states = choose_states(EngineConfig(), arch, "cpu", BFLOAT16)
    assert [array.shape for array in states.by_page("k")] == [(4, 16, 16), (4, 16, 32)] and states.row_bytes == 0
    assert states.page_bytes == 2 * 2 * 16 * (4 * 16 + 4 * 32)
    shared = model_on_devices(arch, 8, by_experts=False)
    on_each = choose_states(EngineConfig(), shared, "cpu", BFLOAT16, 8)
    assert on_each.page_bytes == states.page_bytes // 4  # two devices have a copy of each head
    own = read(tmp_path, **GEMMA4, attention_k_eq_v=True, num_global_key_value_heads=2)
    with pytest.raises(ConfigError, match=r"it has 8 query heads and 4 kv heads and 2 kv heads of size 512"):
        model_on_devices(own, 3, by_experts=False)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"host_kv": HostKvConfig(host_kv_gib=1.0)}, "--host-kv-gib"),
        ({"speculation": SpeculationConfig("EAGLE3", speculative_draft_model_path="head")}, "give NGRAM"),
        ({"lora": LoraConfig(enable_lora=True)}, "--enable-lora"),
    ],
)
def test_flags_that_take_like_layers_are_refused_with_a_way_out(
    flags: dict[str, Any], named: str, tmp_path: Path
) -> None:
    arch = read(tmp_path, **GEMMA4)
    check_flags(EngineConfig(model="m", speculation=SpeculationConfig("NGRAM")), arch)
    with pytest.raises(ConfigError, match=named) as caught:
        check_flags(EngineConfig(model="m", **flags), arch)
    assert "leave" in str(caught.value) and arch.name in str(caught.value)


def test_stages_take_layers_that_need_no_others(tmp_path: Path) -> None:
    config = EngineConfig(model="m", pp_size=2)
    check_stages(config, read(tmp_path, **GEMMA4))
    for values in ({"num_kv_shared_layers": 2}, {"hidden_size_per_layer_input": 4}):
        with pytest.raises(ConfigError, match="--pp-size does not work for now with the layers of Gemma4"):
            check_stages(config, read(tmp_path, **{**GEMMA4, **values}))
