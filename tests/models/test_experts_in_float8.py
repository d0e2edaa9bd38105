"""Experts of FP8 checkpoints on GPUs that multiply float8: which stay as published, and what layers make of them."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxsgl.engine import weight_formats
from jaxsgl.engine.kernels.choice import kernel_shapes, may_round_rows_of_experts
from jaxsgl.engine.weight_formats import as_kept
from jaxsgl.models import ModelArch, abstract_model, arch_from_folder, moe
from jaxsgl.models.layer_spec import Clamp, MoeMlp
from jaxsgl.models.moe import MoE
from jaxsgl.models.precision import Precision
from jaxsgl.models.quantization import WeightFormat
from jaxsgl.weights import load_params
from pallas_kernels import Choices, KernelChoice, float8_rows, grouped_float8_product
from pallas_kernels.kept_heads import KeptHeads
from tests.checkpoints import make_checkpoint
from tests.models.test_arch import read
from tests.pallas_kernels.lower_everything import on_a_device
from tests.plain_model import mesh_of
from tests.weights.stored_weights import fp8_blocks, quantize_folder

FLOAT8 = "float8_e4m3fn"
BFLOAT16 = jnp.dtype("bfloat16")
BLOCKS = WeightFormat("fp8", FLOAT8, group=128)
MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 256,
    "moe_intermediate_size": 256, "head_dim": 16, "num_key_value_heads": 2,
}  # fmt: skip


def mixture(folder: Path, fmt: WeightFormat = BLOCKS, **changes: Any) -> ModelArch:
    return replace(read(folder, **MIXTURE | changes), weight_format=fmt)


def dtype_of_experts(arch: ModelArch) -> str:
    _, params = abstract_model(arch, BFLOAT16)
    mlp: Any = params["layers"][0]["mlp"]
    assert mlp["gate_up"].dtype == mlp["down"].dtype
    return str(mlp["down"].dtype)


@pytest.mark.parametrize(
    ("changes", "devices", "kept"),
    [
        ({}, 1, True),
        ({}, 2, True),
        ({}, 4, False),  # 64 inputs of each expert on each device; 128 would be twice as many
        ({"by_experts": True}, 4, True),
        ({"may_pack": False}, 1, False),  # converted, with weights of 16 bits
        ({"weight_format": replace(BLOCKS, group=64)}, 1, False),
        ({"weight_format": replace(BLOCKS, numbers="int8")}, 1, False),
    ],
)
def test_experts_in_blocks_stay_so_where_the_kernel_takes_each_devices_part(
    changes: dict[str, Any], devices: int, kept: bool, tmp_path: Path
) -> None:
    arch = replace(mixture(tmp_path), **changes)
    found = as_kept(arch, BFLOAT16, "gpu", devices, rounds_rows=True)
    assert dtype_of_experts(found) == (FLOAT8 if kept else "bfloat16")
    assert dtype_of_experts(as_kept(arch, BFLOAT16, "gpu", devices)) == "bfloat16"


def test_parts_that_would_cut_blocks_are_wider_by_zeros(tmp_path: Path) -> None:
    """The kernels' tests have the wider products, too."""
    arch = mixture(tmp_path, moe_intermediate_size=768)
    found = as_kept(arch, BFLOAT16, "gpu", 4, rounds_rows=True)
    assert dtype_of_experts(found) == FLOAT8
    shapes = kernel_shapes(found, Precision(*[BFLOAT16] * 3), 64, KeptHeads(2, 2, 64), 4).experts
    assert [(each.outputs, each.inputs, each.float8_group) for each in shapes] == [(512, 256, 128), (256, 256, 128)]
    assert as_kept(arch, BFLOAT16, "gpu", 2, rounds_rows=True).mixture == arch.mixture


def test_experts_that_a_checkpoint_excepts_are_neither_padded_nor_said_to_be_widened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight_formats._log_once.cache_clear()
    arch = mixture(tmp_path, moe_intermediate_size=768)
    plain = replace(arch, layers=tuple(replace(layer, unquantized=frozenset({"experts"})) for layer in arch.layers))
    for rounds in (True, False):
        assert as_kept(plain, BFLOAT16, "gpu", 4, rounds_rows=rounds).mixture == arch.mixture
    assert not caplog.text


def test_what_widens_experts_in_blocks_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weight_formats._log_once.cache_clear()
    as_kept(mixture(tmp_path), BFLOAT16, "gpu", 4, rounds_rows=True)
    assert "((64, 256), (256, 64)) of one, in groups of 128;" in caplog.text and "with --ep" in caplog.text
    as_kept(mixture(tmp_path), BFLOAT16, "gpu", 1)
    assert "GPUs since Ada" in caplog.text


@pytest.mark.parametrize(
    ("kernels", "may"),
    [
        ({}, True),
        ({"grouped_product": "triton"}, True),
        ({"float8_product": "xla"}, False),  # as --weight-only says, and a kernel that failed its test
        ({"grouped_product": "xla"}, False),
    ],
)
def test_flags_and_failed_kernels_keep_rows_as_they_are(kernels: dict[str, str], may: bool) -> None:
    assert may_round_rows_of_experts(KernelChoice(**kernels)) == may


@pytest.mark.parametrize(
    ("fmt", "devices", "dtype", "groups"),
    [
        (replace(BLOCKS, groups_of_experts=True), 1, "bfloat16", [128, 128]),
        (replace(BLOCKS, groups_of_experts=True, group=256), 2, "bfloat16", [256, 128]),
        (WeightFormat("fp8", FLOAT8), 2, FLOAT8, [256, 128]),
        (BLOCKS, 1, "bfloat16", [None, None]),
    ],
)
def test_the_test_of_kernels_at_start_has_products_in_float8(
    fmt: WeightFormat, devices: int, dtype: str, groups: list[int | None], tmp_path: Path
) -> None:
    """And the products that take their place if they fail."""
    shapes = kernel_shapes(mixture(tmp_path, fmt), Precision(*[BFLOAT16] * 3), 64, KeptHeads(2, 2, 64), devices)
    assert [each.float8_group for each in shapes.experts] == groups
    assert {each.dtype for each in shapes.experts} == {dtype}


def launched(arch: ModelArch, kind: str, kernels: KernelChoice = KernelChoice()) -> list[str]:
    """Pallas's kernels between the groups of experts and the sum of their results."""
    graphdef, params = abstract_model(arch, BFLOAT16)

    def layer(params: Any, x: jax.Array) -> Any:
        mlp = nnx.merge(graphdef, params).layers[0].mlp
        assert mlp is not None
        return mlp(x, kernels=kernels)

    x = jax.ShapeDtypeStruct((32, arch.hidden_size), BFLOAT16)
    with on_a_device("cuda", kind, 132):
        equations = jax.make_jaxpr(layer)(params, x).eqns
        text = jax.jit(layer).trace(params, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "dynamic_slice" not in text and "stablehlo.while" not in text  # no loop over experts by XLA
    called = [str(each.params["name"]) for each in equations if each.primitive.name in ("jit", "pjit")]
    return [name for name in called if re.fullmatch(r"float8_rows|\w+_product", name)]


def test_two_products_in_float8_round_the_rows_and_the_gated_unit(tmp_path: Path) -> None:
    in_float8 = ["float8_rows", "grouped_float8_product"] * 2
    blocks = as_kept(mixture(tmp_path), BFLOAT16, "gpu", 1, rounds_rows=True)
    assert launched(blocks, "NVIDIA H200") == in_float8
    outputs = mixture(tmp_path, WeightFormat("fp8", FLOAT8))
    assert launched(outputs, "NVIDIA H200") == in_float8
    weight_only = KernelChoice(float8_product="xla")
    assert launched(outputs, "NVIDIA H200", weight_only) == ["grouped_product"] * 2
    assert launched(mixture(tmp_path), "NVIDIA A100-SXM4-80GB") == ["gated_product", "grouped_product"]


@pytest.mark.parametrize("clamp", [None, Clamp(2.0, 1.5)])
def test_a_layers_kernels_make_of_blocks_what_widened_weights_make_but_for_the_rounding(
    clamp: Clamp | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates by the kernel that rounds, and units that it doesn't know."""
    plain = make_checkpoint("qwen3_moe", tmp_path / "plain", hidden_size=256, moe_intermediate_size=256)
    form = (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        partial(fp8_blocks, block=(128, 128)),
    )
    folder = quantize_folder(plain, tmp_path / "stored", form)
    arch = arch_from_folder(folder)
    spec = arch.layers[-1].mlp
    assert isinstance(spec, MoeMlp)
    last = replace(arch.layers[-1], mlp=replace(spec, clamp=clamp))
    arch = replace(arch, layers=(*arch.layers[:-1], last))
    x = jax.random.normal(jax.random.key(0), (7, arch.hidden_size), BFLOAT16)

    def layer(rounds: bool) -> np.ndarray:
        kept = as_kept(arch, BFLOAT16, "gpu", 1, rounds_rows=rounds)
        assert dtype_of_experts(kept) == (FLOAT8 if rounds else "bfloat16")
        graphdef, _ = abstract_model(kept, BFLOAT16)
        mlp = nnx.merge(graphdef, load_params(folder, kept, BFLOAT16, mesh_of())).layers[-1].mlp
        assert isinstance(mlp, MoE)
        out = mlp(x, jnp.arange(7) != 3)
        return np.asarray(out.total() if isinstance(out, Choices) else out, np.float64)

    widened = layer(False)
    with monkeypatch.context() as patched:
        patched.setattr(moe, "_float8_backend", lambda dtype, weights: "xla")
        by_xla = layer(True)
    with monkeypatch.context() as patched:
        triton: dict[str, Any] = {"backend": "triton", "interpret": True}
        patched.setattr(moe, "_float8_backend", lambda dtype, weights: "triton")
        patched.setattr(moe, "float8_rows", lambda *args, backend: float8_rows(*args, **triton))
        patched.setattr(
            moe,
            "grouped_float8_product",
            lambda *args, of_tokens, backend: grouped_float8_product(*args, of_tokens=of_tokens, **triton),
        )
        by_kernels = layer(True)
    norm = np.linalg.norm(widened)
    assert not by_kernels[3].any()
    assert np.linalg.norm(by_kernels - by_xla) < 2.5e-2 * norm  # gates in bfloat16: other ties of the rounding
    assert 1e-2 < np.linalg.norm(by_kernels - widened) / norm < 6e-2
