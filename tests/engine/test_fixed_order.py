"""--enable-deterministic-inference: programs for GPUs leave no sum to XLA, and what depends on company is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from bench.targets.programs import Program
from bench.targets.steps import ordered_programs, programs_of_models
from bench.targets.targets import TARGETS

from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.config.features import LoraConfig, SpeculationConfig
from jaxsgl.engine.start.fixed_order import asks_for_fixed_order, check_kernels
from jaxsgl.engine.weight_store import read_arch
from jaxsgl.errors import ConfigError
from jaxsgl.weights import resolve_model_folder
from jaxsgl.weights.sharding import make_mesh
from pallas_kernels.native import library
from pallas_kernels.selftest.report import PASSED, WRONG, Verdict
from tests.engine.conftest import ConfigMaker
from tests.pallas_kernels.lower_everything import on_a_device

# A product, or a sum of floats, that XLA would cut into parts as the batch asks.
SUM = re.compile(
    r"stablehlo\.(?:dot_general|dot|convolution)\b|stablehlo\.reduce\(.* applies stablehlo\.add .*x(?:f32|bf16|f16)>"
)


def sums_left(programs: Iterable[Program], name: str) -> list[str]:
    """The sums and products of XLA in the program of this name, lowered for an H200."""
    (program,) = (each for each in programs if each.name == name)
    with on_a_device("cuda", "NVIDIA H200", 132):
        text = program.trace().lower(lowering_platforms=("cuda",)).as_text()
    return [match.group() for match in SUM.finditer(text)]


def test_steps_in_fixed_order_leave_no_product_and_no_sum_of_floats_to_xla(tmp_path: Path) -> None:
    mesh, h200 = make_mesh(jax.devices()[:1]), TARGETS["h200"]
    ordered = list(ordered_programs(h200, mesh, tmp_path))
    for name in ("qwen3-0.6b decode 32 triton", "qwen3-0.6b extend 4096 triton", "sampled 32 of 151936"):
        assert sums_left(ordered, f"{name} ordered") == []
    plain = programs_of_models(h200, mesh, tmp_path, models=["qwen3-0.6b"])
    assert sums_left(plain, "qwen3-0.6b decode 32 triton") and sums_left(plain, "sampled 32 of 151936")


BFLOAT16, FLOAT32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


@pytest.mark.parametrize(
    ("changes", "platform", "dtype", "message"),
    [
        ({}, "tpu", BFLOAT16, "XLA chooses the tiles of a TPU's products by the batch: leave it out"),
        ({}, "cpu", FLOAT32, "float32 is XLA's, .* give --dtype bfloat16, or leave it out"),
        ({}, "cpu", jnp.dtype(jnp.float16), "float16 is XLA's, .* give --dtype bfloat16, or leave it out"),
        ({"attention_backend": "xla"}, "cpu", BFLOAT16, "take xla out of --attention-backend and --kernels"),
        ({"attention_backend": "xla"}, "gpu", BFLOAT16, "take xla out of --attention-backend and --kernels"),
        ({"kernels": ("norm=xla",)}, "gpu", BFLOAT16, "take xla out of --attention-backend and --kernels"),
        ({"quantization": "int8"}, "gpu", BFLOAT16, "products with weights in int8 take tiles by the batch"),
        ({"lora": LoraConfig(enable_lora=True)}, "gpu", BFLOAT16, "or --enable-lora and --lora-paths"),
        ({"speculation": SpeculationConfig("NGRAM")}, "gpu", BFLOAT16, "or --speculative-algorithm out"),
        ({"scheduling": SchedulingConfig(enable_mixed_chunk=True)}, "gpu", BFLOAT16, "or --enable-mixed-chunk out"),
        ({"tp": 2, "dp_size": 2, "enable_dp_attention": True}, "gpu", BFLOAT16, "or --enable-dp-attention out"),
    ],
)
def test_what_depends_on_company_is_refused_with_the_way_out(
    tiny_config: ConfigMaker, changes: dict[str, Any], platform: str, dtype: jnp.dtype, message: str
) -> None:
    config = tiny_config(enable_deterministic_inference=True, **changes)
    arch = read_arch(config, resolve_model_folder(config.model, None))
    with pytest.raises(ConfigError, match=f"--enable-deterministic-inference: .*{message}"):
        asks_for_fixed_order(config, arch, platform, dtype)
    assert not asks_for_fixed_order(replace(config, enable_deterministic_inference=False), arch, platform, dtype)


def test_without_the_kernels_in_cpp_a_cpu_refuses(tiny_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda: "there is no compiler")
    config = tiny_config(enable_deterministic_inference=True)
    arch = read_arch(config, resolve_model_folder(config.model, None))
    with pytest.raises(ConfigError, match="it takes the C\\+\\+ kernels, and there is no compiler: leave it out"):
        asks_for_fixed_order(config, arch, "cpu", BFLOAT16)


def test_heads_that_cpp_cannot_take_are_refused_on_a_cpu(
    tiny_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "load", lambda: None)
    config = tiny_config(enable_deterministic_inference=True)
    arch = replace(read_arch(config, resolve_model_folder(config.model, None)), head_dim=80)
    with pytest.raises(ConfigError, match="the head size is 80; it takes multiples of 32 up to 512: leave it out"):
        asks_for_fixed_order(config, arch, "cpu", BFLOAT16)


def test_only_a_gpu_needs_other_programs(tiny_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda: None)
    config = tiny_config(enable_deterministic_inference=True)
    arch = replace(read_arch(config, resolve_model_folder(config.model, None)), head_dim=32)
    assert asks_for_fixed_order(config, arch, "gpu", BFLOAT16)
    assert not asks_for_fixed_order(config, arch, "cpu", BFLOAT16)


def test_a_failed_kernel_is_replaced_by_another_kernel_and_not_by_xla() -> None:
    mosaic = Verdict("paged_decode_attention", "mosaic_gpu", WRONG, "error 1")
    check_kernels((mosaic, Verdict("paged_decode_attention", "triton", PASSED, "")))
    failed = Verdict("ordered_product", "triton", WRONG, "error 1")
    for verdicts in ((mosaic,), (failed,)):
        with pytest.raises(ConfigError, match=r"failed its test .* and XLA's order depends on the batch: leave it out"):
            check_kernels(verdicts)
