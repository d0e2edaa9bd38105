"""Experts of quantized checkpoints on TPUs: which stay as published, and that they are the checkpoint's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxsgl.engine import weight_formats
from jaxsgl.engine.kernels.choice import kernel_shapes
from jaxsgl.engine.weight_formats import as_kept
from jaxsgl.errors import ConfigError
from jaxsgl.models import ModelArch, abstract_model, arch_from_folder
from jaxsgl.models.precision import Precision
from jaxsgl.models.quantization import Storage, WeightFormat, weight_format
from jaxsgl.models.quantized_formats import EXPERTS_IN_MXFP4
from jaxsgl.weights import load_params
from pallas_kernels.kept_heads import KeptHeads
from tests.checkpoints import make_checkpoint
from tests.models.test_arch import read
from tests.plain_model import checkpoint_logits, mesh_of, plain_logits
from tests.weights.stored_weights import quantize_folder
from tests.weights.test_experts import pack

BFLOAT16 = jnp.dtype("bfloat16")
BLOCKS = WeightFormat("fp8", "float8_e4m3fn", group=128)
AWQ = WeightFormat("awq", "int4", group=128, has_zeros=True, storage=Storage("awq", bits=4))
MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 256,
    "moe_intermediate_size": 256, "head_dim": 16, "num_key_value_heads": 2,
}  # fmt: skip


def mixture(folder: Path, fmt: WeightFormat | None, **changes: Any) -> ModelArch:
    return replace(read(folder, **MIXTURE | changes), weight_format=fmt)


def parts_of_experts(arch: ModelArch) -> dict[str, str]:
    """Dtypes of the parameters of down."""
    _, params = abstract_model(arch, BFLOAT16)
    mlp: Any = params["layers"][0]["mlp"]
    return {name: str(param.dtype) for name, param in mlp.items() if name.startswith("down")}


@pytest.mark.parametrize(
    ("fmt", "kept"),
    [
        (BLOCKS, {"down": "float8_e4m3fn", "down_scale": "float32"}),
        (AWQ, {"down": "int4", "down_scale": "float32", "down_zero": "int8"}),
        (replace(AWQ, group=32), {"down": "int4", "down_scale": "float32", "down_zero": "int8"}),
        (WeightFormat("compressed-tensors", "int8"), {"down": "int8", "down_scale": "float32"}),
        (WeightFormat("nvfp4", "int8", group=16), {"down": "int8", "down_scale": "float32"}),
        (EXPERTS_IN_MXFP4, {"down": "int4", "down_scale": "uint8"}),
        (replace(AWQ, group=96), {"down": "bfloat16"}),
        (replace(AWQ, reorders=True), {"down": "bfloat16"}),
        (None, {"down": "bfloat16"}),
    ],
)
def test_tpus_keep_experts_as_published(fmt: WeightFormat | None, kept: dict[str, str], tmp_path: Path) -> None:
    assert parts_of_experts(as_kept(mixture(tmp_path, fmt), BFLOAT16, "tpu", 1)) == kept


@pytest.mark.parametrize(
    ("changes", "devices", "kept"),
    [
        ({}, 2, True),
        ({}, 4, False),  # 64 inputs of each expert on each device
        ({"by_experts": True}, 4, True),
        ({"may_pack": False}, 1, False),  # converted, with weights of 16 bits
    ],
)
def test_devices_share_experts_as_far_as_the_kernel_takes_their_parts(
    changes: dict[str, Any], devices: int, kept: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight_formats._log_once.cache_clear()
    found = as_kept(replace(mixture(tmp_path, BLOCKS), **changes), BFLOAT16, "tpu", devices)
    assert parts_of_experts(found)["down"] == ("float8_e4m3fn" if kept else "bfloat16")
    assert ("(256, 64) of one: the weights have 64 inputs" in caplog.text) == (
        devices == 4 and not kept and not changes
    )
    assert ("; with --ep each device has whole experts" in caplog.text) == (devices == 4 and not changes)


def test_parts_that_would_cut_blocks_of_mxfp4_are_widened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weight_formats._log_once.cache_clear()
    found = as_kept(mixture(tmp_path, EXPERTS_IN_MXFP4, moe_intermediate_size=480), BFLOAT16, "tpu", 2)
    assert parts_of_experts(found) == {"down": "bfloat16"}
    assert "the weights are (256, 240); mxfp4_codes takes multiples of (1, 32); with --ep" in caplog.text


def test_quantization_at_load_has_experts_where_the_kernel_takes_them(tmp_path: Path) -> None:
    for method, numbers in (("int8", "int8"), ("fp8", "float8_e4m3fn"), ("int4", "int4")):
        arch = mixture(tmp_path, weight_format(method, None))
        assert parts_of_experts(as_kept(arch, BFLOAT16, "tpu", 1))["down"] == numbers
    with pytest.raises(ConfigError, match=r"on TPUs: a device has \(256, 64\) .* with --ep each device has whole"):
        as_kept(arch, BFLOAT16, "tpu", 4)
    narrow = mixture(tmp_path, arch.weight_format, moe_intermediate_size=96)
    with pytest.raises(ConfigError, match="the weights have 96 inputs; it takes 128 or more; leave --quantization out"):
        as_kept(narrow, BFLOAT16, "tpu", 1)


def test_the_test_of_kernels_at_start_has_their_products(tmp_path: Path) -> None:
    def tested(fmt: WeightFormat, devices: int) -> list[tuple[str, int, bool]]:
        kept = as_kept(mixture(tmp_path, fmt), BFLOAT16, "tpu", devices)
        shapes = kernel_shapes(kept, Precision(*[BFLOAT16] * 3), 64, KeptHeads(2, 2, 64), devices).experts
        return [(each.numbers, each.group, each.has_zeros) for each in shapes]

    assert tested(AWQ, 1) == [("int4", 128, True)] * 2
    assert tested(replace(BLOCKS, group=256), 2) == [("float8_e4m3fn", 256, False), ("float8_e4m3fn", 128, False)]
    assert tested(WeightFormat("compressed-tensors", "int8"), 1) == [("", 0, False)] * 2  # those of plain numbers
    assert tested(EXPERTS_IN_MXFP4, 1) == [("", 32, False)] * 2  # of what is packed


@pytest.mark.parametrize("form", ["awq", "compressed-tensors mxfp4", "gpt-oss"])
def test_logits_are_those_of_the_weights_that_are_meant(form: str, tmp_path: Path) -> None:
    if form == "gpt-oss":
        folder = original = make_checkpoint("gpt_oss", tmp_path, hidden_size=128, intermediate_size=128)
        pack(folder, seed=1)
    else:
        sizes: Any = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128}
        plain = make_checkpoint("qwen3_moe", tmp_path / "plain", **sizes)
        folder = quantize_folder(plain, tmp_path / "stored", form)
        original = folder / "meant"
    arch = as_kept(arch_from_folder(folder), jnp.dtype("float32"), "tpu", 1)
    params: Any = load_params(folder, arch, jnp.dtype("float32"), mesh_of())
    of_experts = [layer["mlp"] for layer in params["layers"].values() if "router" in layer["mlp"]]
    assert {(str(each["down"].dtype), str(each["down_scale"].dtype)) for each in of_experts} == {
        ("int4", "float32" if form == "awq" else "uint8")
    }
    logits, expected = plain_logits(arch, params, list(range(3, 40))), checkpoint_logits(original, list(range(3, 40)))
    assert np.linalg.norm(logits - expected) < 1e-3 * np.linalg.norm(expected)
