"""Logits of families that differ on two and four devices, and in two ranks, are those of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint_kinds import HYBRID_KINDS
from tests.checkpoints import make_checkpoint
from tests.grids import NIGHTLY
from tests.weights.stored_weights import deepseek_v4_as_published, fp8_blocks, hybrid_in_fp8, quantize_folder
from tests.weights.test_experts import pack

ATOL = 2e-4
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
# Of kinds whose own sizes four devices, or two by experts, can't share.
SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 8},
    "gemma4_moe": {"num_experts": 8},
    "llama4": {"num_local_experts": 8},
    "hunyuan_moe": {"num_experts": 8},
    **{
        kind: {"linear_num_key_heads": 4, "linear_num_value_heads": 12}
        for kind in ("qwen3_5", "qwen3_next", "qwen3_5_moe", "olmo_hybrid")
    },
    "falcon_h1": {"mamba_n_groups": 4},
    "deepseek_v4": {"o_groups": 4, "n_routed_experts": 8, "moe_intermediate_size": 28},
    "phimoe": {"num_local_experts": 8},
}
# Those left out are served by devices in tests/end_to_end/test_tensor_parallel.py.
KINDS = (
    "llama_tied", "phi3", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_5", "mistral", "olmo3", "glm", "glm4", "smollm3",
    "gemma", "gemma2", "qwen2", "seed_oss", "granite", "hunyuan", "exaone4", "ernie4_5", "ernie4_5_moe", "minimax_m2",
    "deepseek_v2", "glm4_moe_lite", "qwen2_moe", "qwen3_next", "qwen3_5_moe", "gemma4", "gemma4_small", "gemma4_moe",
    "llama4", "hunyuan_moe", "glm_moe_dsa", "apertus", "cohere2_moe", "nemotron",
    "olmo", "nanochat", "falcon", "phimoe", "axk1", "olmo_hybrid", "falcon_h1", "longcat_flash", "deepseek_v4",
)  # fmt: skip


@pytest.mark.skipif(not NIGHTLY, reason="compiles a model on devices in up to six layouts; by night")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_devices_and_ranks_are_those_of_one_device(kind: str, tmp_path: Path) -> None:
    """Of the whole model, with the sums and exchanges of the engine's programs; two prompts in two ranks."""
    check_devices(make_checkpoint(kind, tmp_path, seed=3, **SIZES.get(kind, {})))


@pytest.mark.skipif(not NIGHTLY, reason="compiles a model on devices in up to six layouts; by night")
@pytest.mark.timeout(600)
def test_devices_have_parts_of_shared_experts_among_the_others(tmp_path: Path) -> None:
    """As on GPUs, with XLA's products. By experts they are an MLP."""
    check_devices(make_checkpoint("deepseek_v3", tmp_path, seed=3), arguments=["joined"])


@pytest.mark.skipif(not NIGHTLY, reason="compiles a model on devices in three layouts; by night")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_next"])
def test_devices_share_the_quantized_matrices_of_a_hybrid(kind: str, tmp_path: Path) -> None:
    check_devices(hybrid_in_fp8(kind, tmp_path))


@pytest.mark.skipif(not NIGHTLY, reason="compiles a model on devices in up to six layouts; by night")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("size", "block"), [(1536, (128, 512)), (768, (128, 128))])
def test_devices_share_experts_in_blocks_of_fp8_as_gpus_keep_them(
    size: int, block: tuple[int, int], tmp_path: Path
) -> None:
    """Devices' parts begin and end inside blocks of 512 inputs, and are of several groups; or four have zeros more."""
    plain = make_checkpoint("qwen3_moe", tmp_path / "plain", seed=3, hidden_size=256, moe_intermediate_size=size)
    form = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}, partial(fp8_blocks, block=block)
    # Sums in another order round some activations to the next number of float8.
    check_devices(quantize_folder(plain, tmp_path / "stored", form), most=5e-2, arguments=["float8"])


@pytest.mark.skipif(not NIGHTLY, reason="compiles a model on devices in up to six layouts; by night")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", ["gpt-oss", "deepseek v4 mxfp4", "awq", "compressed-tensors mxfp4"])
def test_devices_share_experts_of_4_bits_as_gpus_keep_them(form: str, tmp_path: Path) -> None:
    """Two devices have three blocks of their inputs each; four would cut blocks, and have two with zeros."""
    if form == "gpt-oss":
        folder = make_checkpoint("gpt_oss", tmp_path, seed=3, num_local_experts=8, intermediate_size=384)
        pack(folder, seed=3)
    elif form == "deepseek v4 mxfp4":
        folder = deepseek_v4_as_published(tmp_path, o_groups=4, intermediate_size=384)
    else:
        sizes: dict[str, Any] = {"moe_intermediate_size": 384, "intermediate_size": 128, "num_experts": 8}
        plain = make_checkpoint("qwen3_moe", tmp_path / "plain", seed=3, **sizes)
        folder = quantize_folder(plain, tmp_path / "stored", form)
    # One CPU multiplies matrices of 9 bits by rows that it rounds to 16.
    check_devices(folder, most=2e-3 if "mxfp4" in form else ATOL, arguments=["packed"])


# Kind, format, and what leaves gates alone; groups begin on one device and end on another.
QUANTIZED: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen2", "gptq desc_act", {}),
    ("qwen3_next", "awq", {"linear_value_head_dim": 16, "moe_intermediate_size": 64}),
    ("qwen3_5", "gptq", {}),
    ("qwen3_5", "awq", {"linear_value_head_dim": 16}),
    ("qwen3_5_moe", "compressed-tensors int8", {"num_experts": 8}),
    ("deepseek_v3", "compressed-tensors int4", {}),
    ("glm4_moe_lite", "compressed-tensors int8", {}),
    ("glm4_moe_lite", "awq", {"kv_lora_rank": 64, "qk_rope_head_dim": 8, "head_dim": 8, "moe_intermediate_size": 64}),
    ("glm4_moe", "modelopt nvfp4", {}),
    ("mixtral", "gptq", {}),
    ("gemma3", "compressed-tensors int4 asymmetric", {}),
    ("gemma4_moe", "awq", {}),
    ("minimax_m2", "fp8 in blocks", {"num_local_experts": 8}),
    ("lfm2_moe", "compressed-tensors int4", {"moe_intermediate_size": 64, "num_experts": 8, "hidden_size": 256}),
]


@pytest.mark.skipif(not NIGHTLY, reason="compiles a model on devices in up to six layouts; by night")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "form", "sizes"), QUANTIZED)
def test_devices_and_ranks_share_quantized_matrices(
    kind: str, form: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    plain = make_checkpoint(kind, tmp_path / "plain", seed=3, **{**SIZES.get(kind, {}), **sizes})
    is_hybrid = kind in HYBRID_KINDS
    gates = ["re:.*in_proj_(ba|a|b)$"] if "compressed" in form else ["in_proj_ba", "in_proj_a", "in_proj_b"]
    check_devices(
        quantize_folder(
            plain, tmp_path / "stored", form, also=r"\.w[123]\.weight", excepted=r"in_proj_(ba|a|b)\." * is_hybrid,
            exceptions=gates * is_hybrid,
        ),
        # Such a checkpoint's activations are int8: sums in another order round some of them to the next number.
        most=5e-2 if form == "compressed-tensors int8" else ATOL,
    )  # fmt: skip


def check_devices(folder: Path, most: float = ATOL, arguments: Sequence[str] = ()) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.on_devices", *arguments], input=json.dumps([str(folder)]),
        capture_output=True, text=True, env=ENVIRONMENT, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout)
    assert {name.split(" in")[0] for name in found} == {"2 devices", "4 devices"}
    for layout, difference in found.items():
        assert difference < most, (layout, difference)
