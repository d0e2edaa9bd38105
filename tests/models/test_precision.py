"""Which formats a model runs in on which platform, and that products are right in all of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsgl.errors import ConfigError
from jaxsgl.models import Precision, cpu_multiplies_bfloat16, resolve_precision
from jaxsgl.models.precision import FEW_ROWS, num_parts_of, product, product_in_parts, product_of_few
from pallas_kernels.native import library
from tests.models.test_arch import DEEPSEEK, read
from tests.pallas_kernels.lower_everything import on_a_device

F32, F16, BF16, BITS = (jnp.dtype(name) for name in ("float32", "float16", "bfloat16", "uint16"))
F8, F8_BITS = jnp.dtype("float8_e4m3fn"), jnp.dtype("uint8")
FLOAT8_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def formats(
    folder: Path,
    flag: str,
    platform: str,
    *,
    kv: str = "auto",
    stored: str = "bfloat16",
    native: bool = True,
    **in_config: Any,
) -> Precision:
    arch = read(folder, dtype=stored, **in_config)
    return resolve_precision(flag, kv, arch, platform, cpu_multiplies_bfloat16=lambda: native)


def test_an_accelerator_computes_in_the_checkpoints_format(tmp_path: Path) -> None:
    assert formats(tmp_path, "auto", "gpu") == (BF16, BF16, BF16)
    assert formats(tmp_path, "float16", "tpu") == (F16, F16, F16)


def test_a_cpu_multiplies_bfloat16_where_it_can_and_keeps_the_rest_in_float32(tmp_path: Path) -> None:
    assert formats(tmp_path, "auto", "cpu") == (BF16, F32, BITS)
    assert formats(tmp_path, "auto", "cpu", native=False) == (F32, F32, F32)
    assert formats(tmp_path, "auto", "cpu", stored="float32") == (F32, F32, F32)


def test_a_requested_format_is_used(tmp_path: Path) -> None:
    assert formats(tmp_path, "float32", "cpu") == (F32, F32, F32)
    assert formats(tmp_path, "float16", "cpu") == (F16, F32, F16)
    assert formats(tmp_path, "bfloat16", "cpu", native=False) == (BF16, F32, BITS)


def test_a_kv_cache_of_float8_goes_with_all_weights_and_is_kept_as_bits_on_a_cpu(tmp_path: Path) -> None:
    for weights, dtype in (("float32", F32), ("bfloat16", BF16), ("float16", F16)):
        for platform in ("gpu", "tpu"):
            assert formats(tmp_path, weights, platform, kv="fp8_e4m3") == (dtype, dtype, F8)
        assert formats(tmp_path, weights, "cpu", kv="fp8_e4m3") == (dtype, F32, F8_BITS)


def test_a_kv_cache_of_bfloat16_needs_such_weights_on_accelerators_only(tmp_path: Path) -> None:
    assert formats(tmp_path, "float32", "cpu", kv="bfloat16") == (F32, F32, BITS)
    assert formats(tmp_path, "bfloat16", "gpu", kv="bfloat16") == (BF16, BF16, BF16)
    with pytest.raises(ConfigError, match="--kv-cache-dtype bfloat16 does not go with weights in float16 on a gpu"):
        formats(tmp_path, "float16", "gpu", kv="bfloat16")


def test_auto_is_the_kv_cache_that_the_checkpoint_was_calibrated_for(tmp_path: Path) -> None:
    calibrated: dict[str, Any] = {
        "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": FLOAT8_SCHEME}
    }
    assert formats(tmp_path, "auto", "gpu", **calibrated) == (BF16, BF16, F8)
    assert formats(tmp_path, "auto", "cpu", **calibrated) == (BF16, F32, F8_BITS)
    assert formats(tmp_path, "auto", "gpu", kv="bfloat16", **calibrated) == (BF16, BF16, BF16)


def test_kernels_are_loaded_only_if_the_format_depends_on_them(tmp_path: Path) -> None:
    def ask() -> bool:
        raise AssertionError("this may compile")

    for flag, platform, stored in (
        ("auto", "gpu", "bfloat16"),
        ("auto", "cpu", "float32"),
        ("bfloat16", "cpu", "bfloat16"),
    ):
        resolve_precision(flag, "auto", read(tmp_path, dtype=stored), platform, cpu_multiplies_bfloat16=ask)


@pytest.mark.parametrize(
    ("line", "can"),
    [("flags : fpu avx512_bf16 avx2", True), ("flags : amx_bf16", True), ("flags : avx512f", False), ("", False)],
)
def test_without_kernels_the_processor_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, can: bool
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{line}\nmodel name : avx512_bf16\n")
    monkeypatch.setattr(library, "load", lambda: "no compiler")
    assert cpu_multiplies_bfloat16(tmp_path / "cpuinfo") is can
    assert not cpu_multiplies_bfloat16(tmp_path / "nowhere")
    monkeypatch.setattr(library, "load", lambda: None)
    assert cpu_multiplies_bfloat16(tmp_path / "cpuinfo")


@pytest.mark.parametrize("num_rows", [1, 2, 7, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("heads", [(3, 8), (4, 8)])  # for the second a CPU with bfloat16 products has a kernel
def test_a_product_is_the_sum_over_the_last_axis(num_rows: int, dtype: str, heads: tuple[int, int]) -> None:
    rng = np.random.default_rng(num_rows)
    x = jnp.asarray(rng.standard_normal((num_rows, 64)), jnp.float32)
    weights = jnp.asarray(rng.standard_normal((*heads, 64)), dtype)
    out = jax.jit(product)(x, weights)
    rounded = np.asarray(x.astype(dtype), np.float64)
    expected = np.einsum("td,chd->tch", rounded, np.asarray(weights, np.float64))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=1e-4)


def test_latents_are_not_kept_in_float8(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fp8_e4m3 does not go with DeepseekV3ForCausalLM, whose cache holds latents"):
        formats(tmp_path, "auto", "gpu", kv="fp8_e4m3", **DEEPSEEK)


def test_latents_keep_the_weights_format_though_a_checkpoint_was_calibrated_for_float8(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As nvidia/DeepSeek-V3.1-NVFP4 was."""
    calibrated: dict[str, Any] = {"quantization_config": {"quant_method": "modelopt", "kv_cache_scheme": FLOAT8_SCHEME}}
    with caplog.at_level(logging.INFO):
        assert formats(tmp_path, "auto", "gpu", **DEEPSEEK, **calibrated) == (BF16, BF16, BF16)
    assert "calibrated for a KV cache of fp8_e4m3; its latents stay bfloat16" in caplog.text


@pytest.mark.parametrize(
    ("num_rows", "num_columns", "length", "parts"),
    [
        *((256, 1024, 2048, 8), (256, 4096, 12288, 2), (64, 4096, 4096, 8), (4096, 1024, 3072, 1), (32, 1024, 3000, 1)),
        *((32, 5120, 2880, 5), (256, 5120, 2880, 3), (32, 1024, 128, 1), (32, 1024, 64 * 77, 11), (32, 32, 2880, 15)),
    ],
)
def test_a_gpus_products_with_few_results_come_in_parts(
    num_rows: int, num_columns: int, length: int, parts: int
) -> None:
    """Enough of them for one and a half tiles on each of an H200's 132 multiprocessors, if the length divides."""
    assert num_parts_of(num_rows, num_columns, length, num_cores=132) == parts

    def shapes(x: jax.Array, weights: jax.Array) -> jax.Array:
        return product_in_parts(x, weights)

    arguments = [jax.ShapeDtypeStruct(dims, BF16) for dims in ((num_rows, length), (num_columns, length))]
    with on_a_device("cuda", "NVIDIA H200", 132):
        out = jax.eval_shape(shapes, *arguments)
    assert out.shape == ((parts, num_rows, num_columns) if parts > 1 else (num_rows, num_columns))
    assert out.dtype == (F32 if parts > 1 else BF16)
    assert jax.eval_shape(shapes, *arguments).shape == (num_rows, num_columns)  # a CPU adds up itself


def test_the_parts_of_a_product_add_up_to_it() -> None:
    rng = np.random.default_rng(3)
    x, weights = (jnp.asarray(rng.standard_normal((rows, 1024)), BF16) for rows in (3, 8))
    with on_a_device("cuda", "NVIDIA H200", 132):
        parts = jax.jit(product_in_parts)(x, weights)
    exact = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    assert parts.shape == (4, 3, 8)
    np.testing.assert_allclose(np.asarray(parts, np.float64).sum(axis=0), exact, atol=1e-3)


def test_products_of_few_outputs_are_sums_on_a_gpu_which_other_kernels_can_make() -> None:
    rng = np.random.default_rng(0)
    x, weights = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((8, 512), (4, 512)))
    expected = np.asarray(x, np.float64) @ np.asarray(weights, np.float64).T
    assert "dot_general" in str(jax.make_jaxpr(product_of_few)(x, weights))
    with on_a_device("cuda", "NVIDIA H200", 132):
        assert "dot_general" not in str(jax.make_jaxpr(product_of_few)(x, weights))
        found = product_of_few(x, weights)
    assert found.dtype == x.dtype
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=2**-8, atol=1e-4)
