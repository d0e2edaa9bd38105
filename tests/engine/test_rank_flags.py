"""Models that ranks can't serve, or would serve no better, are refused with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.start.model_flags import check_flags
from jaxsgl.engine.weight_store import read_arch
from jaxsgl.errors import ConfigError
from tests.checkpoints import make_checkpoint

SIZES: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 64, "vocab_size": 200}


def check(folder: Path, tp: int, ranks: int) -> None:
    config = EngineConfig(model=str(folder), tp=tp, dp_size=ranks, enable_dp_attention=True)
    check_flags(config, read_arch(config, folder))


def test_a_dense_model_whose_heads_suffice_gains_nothing(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path, **SIZES)
    with pytest.raises(ConfigError, match=r"gains nothing.*--dp-size alone means whole replicas"):
        check(folder, tp=4, ranks=2)
    check(folder, tp=8, ranks=2)  # its four heads would have two copies each


def test_a_mixture_and_latents_may_have_ranks(tmp_path: Path) -> None:
    check(make_checkpoint("qwen3_moe", tmp_path / "moe", num_experts=8), tp=2, ranks=2)
    check(make_checkpoint("deepseek_v3", tmp_path / "latent"), tp=4, ranks=4)


def test_a_hybrid_or_layers_that_differ_gain_where_devices_cannot_share_one_kind_of_heads(tmp_path: Path) -> None:
    hybrid = make_checkpoint("qwen3_5", tmp_path / "hybrid", linear_num_key_heads=4, linear_num_value_heads=8)
    check(hybrid, tp=4, ranks=2)  # its attention has two kv heads
    with pytest.raises(ConfigError, match="2 kv heads and 4 key heads of Qwen3_5"):
        check(hybrid, tp=2, ranks=2)
    check(make_checkpoint("qwen3_5_moe", tmp_path / "mixture"), tp=2, ranks=2)
    check(make_checkpoint("gemma4", tmp_path / "gemma4"), tp=4, ranks=2)  # full layers have two
    check(make_checkpoint("gemma4_moe", tmp_path / "gemma4_moe"), tp=2, ranks=2)


def test_sizes_that_devices_can_not_share_are_refused_with_those_that_can(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path, **{**SIZES, "intermediate_size": 72})
    with pytest.raises(ConfigError, match=r"16 devices can't share .* 72 units in an MLP: give --tp 2, 4 or 8"):
        check(folder, tp=16, ranks=2)


def test_a_number_of_experts_that_no_devices_of_ranks_share_is_refused_with_another_way_out(tmp_path: Path) -> None:
    folder = make_checkpoint("mixtral", tmp_path, num_local_experts=5)
    config = EngineConfig(model=str(folder), tp=2, ep=True, dp_size=2, enable_dp_attention=True)
    with pytest.raises(ConfigError, match=r"2 devices can't share .* 5 experts: leave --ep out"):
        read_arch(config, folder)
