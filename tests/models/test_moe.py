"""Routers choose as they are described, and tokens that are none reach no expert."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.engine.kernels.choice import kernel_shapes
from jaxsgl.engine.weight_formats import as_kept
from jaxsgl.errors import CheckpointError, ConfigError
from jaxsgl.models import ModelArch, abstract_model, arch_from_folder, moe
from jaxsgl.models.layer_spec import DenseMlp, MoeMlp
from jaxsgl.models.moe import MoE
from jaxsgl.models.precision import Precision
from jaxsgl.models.quantization import Storage, WeightFormat, weight_format
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.weights import load_params
from pallas_kernels import GatedUnit, Router, choose_experts, group_by_expert
from pallas_kernels.kept_heads import KeptHeads
from pallas_kernels.native import library as native_library
from pallas_kernels.order import fixed_order
from tests.checkpoints import make_checkpoint
from tests.end_to_end.offline import serve
from tests.grids import NIGHTLY
from tests.models.test_arch import read
from tests.pallas_kernels.test_dispatch import on_an_h100
from tests.plain_model import mesh_of

LOGITS = np.array([[1.0, 3.0, 2.0, 0.0, -1.0, 2.5]], np.float32)
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "moe_intermediate_size": 48,
    "head_dim": 16,
}
GLM4_MOE = {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "moe_intermediate_size": 48}


def chosen(router: Router, bias: list[float] | None = None) -> tuple[list[int], np.ndarray]:
    experts, shares = choose_experts(router, jnp.asarray(LOGITS), None if bias is None else jnp.asarray(bias))
    return experts[0].tolist(), np.asarray(shares[0], np.float64)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64))
    return e / e.sum()


def test_sparse_mixer_chooses_as_in_transformers() -> None:
    """Shares count those that are left and near the best one, which depends on the signs of logits."""
    logits = np.random.default_rng(3).normal(size=(300, 6)).astype(np.float32) - np.float32(1.0)
    for margin in (0.01, 0.2):
        shares, experts = sparsemixer(torch.from_numpy(logits), margin, training=False)
        found = choose_experts(Router(2, "sparse_mixer", margin=margin), jnp.asarray(logits))
        np.testing.assert_array_equal(found[0], experts.numpy())
        np.testing.assert_allclose(found[1], shares.numpy(), rtol=1e-6)
        assert 0.02 < np.mean(shares.numpy() < 0.99) < 0.9


def test_a_softmax_before_the_choice_is_over_all_experts_and_after_it_over_the_chosen_ones() -> None:
    experts, shares = chosen(Router(3))
    assert experts == [1, 5, 2]
    np.testing.assert_allclose(shares, softmax(LOGITS[0])[experts], rtol=1e-6)
    after = softmax(LOGITS[0][experts])
    for router in (Router(3, "softmax_of_chosen"), Router(3, renormalize=True)):
        np.testing.assert_allclose(chosen(router)[1], after, rtol=1e-6)
    np.testing.assert_allclose(chosen(Router(3, "softmax_of_chosen", scale=2.5))[1], 2.5 * after, rtol=1e-6)


def test_a_bias_of_the_choice_changes_which_experts_but_not_their_shares() -> None:
    bias = [0.0, -9.0, 0.0, 9.0, 0.0, 0.0]
    experts, shares = chosen(Router(2, "sigmoid", choice_bias=True), bias)
    assert experts == [3, 5]
    np.testing.assert_allclose(shares, 1 / (1 + np.exp(-LOGITS[0, experts].astype(np.float64))), rtol=1e-6)


def test_experts_come_from_the_groups_whose_two_best_have_the_highest_sums() -> None:
    """Groups of 3: (1, 3, 2) has the sum 5, (0, -1, 2.5) has 2.5; with groups of 2 (1, 3), (2, 0) and (-1, 2.5)."""
    assert chosen(Router(2, "softmax_of_chosen", num_groups=2, top_groups=1))[0] == [1, 2]
    assert chosen(Router(3, "softmax_of_chosen", num_groups=3, top_groups=2))[0] == [1, 2, 0]
    assert chosen(Router(3, "softmax_of_chosen", num_groups=3, top_groups=3))[0] == [1, 5, 2]


def test_a_clamped_unit_bounds_the_gate_above_and_up_on_both_sides() -> None:
    gate, up = jnp.array([-9.0, 0.5, 9.0]), jnp.array([-9.0, 0.5, 9.0])
    found = np.asarray(GatedUnit(limit=2.0, alpha=1.5)(gate, up))
    bounded, factor = np.array([-9.0, 0.5, 2.0]), np.array([-1.0, 1.5, 3.0])
    np.testing.assert_allclose(found, bounded / (1 + np.exp(-1.5 * bounded)) * factor, rtol=1e-6)


def test_padding_reaches_no_expert_and_changes_no_token(tmp_path: Path) -> None:
    """Experts that the one token doesn't choose are spoilt: what used them would be NaN."""
    arch = arch_from_folder(make_checkpoint("mixtral", tmp_path))
    params = load_params(tmp_path, arch, jnp.dtype("float32"), mesh_of())
    graphdef, _ = abstract_model(arch, jnp.dtype("float32"))
    layer = nnx.merge(graphdef, params).layers[0].mlp
    assert isinstance(layer, MoE)
    x = jax.random.normal(jax.random.key(0), (6, arch.hidden_size))
    is_token = jnp.arange(6) == 2
    among_tokens = np.asarray(layer(x))
    router = layer.matrix("router")
    assert isinstance(router, jax.Array)
    experts, _ = choose_experts(layer.spec.router, x[2:3] @ router.T)
    is_used = jnp.isin(jnp.arange(layer.spec.num_experts), experts)
    gate_up: nnx.Param[jax.Array] = vars(layer)["gate_up"]
    gate_up[...] = jnp.where(is_used[:, None, None, None], gate_up[...], jnp.nan)
    padded = np.asarray(layer(x, is_token))
    np.testing.assert_array_equal(padded[2], among_tokens[2])
    assert not np.delete(padded, 2, 0).any()


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("deepseek_v3", {}),
        ("qwen2_moe", {"moe_intermediate_size": 36, "shared_expert_intermediate_size": 72}),
        ("nemotron_h", {"moe_shared_expert_intermediate_size": 96}),
    ],
)
def test_shared_experts_among_the_others_are_those_of_an_mlp(
    kind: str, sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU takes them, three with the share 1 and two with a token's own, but with XLA's products."""
    arch = arch_from_folder(make_checkpoint(kind, tmp_path, seed=5, **sizes))
    params = load_params(tmp_path, arch, jnp.dtype("float32"), mesh_of())
    graphdef, _ = abstract_model(arch, jnp.dtype("float32"))
    mlps = (layer.mlp for layer in nnx.merge(graphdef, params).layers)
    layer = next(mlp for mlp in mlps if isinstance(mlp, MoE))
    assert layer.spec.shared_ffn_size % layer.spec.ffn_size == 0
    x, is_token = jax.random.normal(jax.random.key(0), (6, arch.hidden_size)), jnp.arange(6) != 3
    as_mlp: list[jax.Array] = []
    right = np.asarray(layer(x, is_token, as_mlp))
    monkeypatch.setattr(moe, "joins_shared", lambda *weights, **backend: True)
    monkeypatch.setattr(MoE, "_shared", None)  # no MLP
    joined: list[jax.Array] = []
    found = np.asarray(layer(x, is_token, joined))
    np.testing.assert_allclose(found[is_token], right[is_token], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(joined[0], as_mlp[0])  # which were chosen, without the shared ones


def test_on_a_gpu_few_rows_take_shared_experts_for_two_more(tmp_path: Path) -> None:
    """Then router and gate alone are products. Many rows, parts of experts and other formats have an MLP."""
    mixture: dict[str, Any] = {"architectures": ["Qwen2MoeForCausalLM"], "num_key_value_heads": 2, "hidden_size": 256}
    mixture |= {"num_experts": 16, "moe_intermediate_size": 128, "num_experts_per_tok": 2, "norm_topk_prob": True}
    arch = read(tmp_path, **mixture, shared_expert_intermediate_size=256)

    def products(arch: ModelArch, num_rows: int, fixed: bool = False) -> int:
        """How many matrix products XLA makes next to the kernels of experts."""
        graphdef, params = abstract_model(arch, jnp.dtype("bfloat16"))
        shape = jax.ShapeDtypeStruct((num_rows, arch.hidden_size), jnp.bfloat16)

        def layer(params: Any, x: jax.Array) -> Any:
            mlp = nnx.merge(graphdef, params).layers[-1].mlp
            assert mlp is not None
            return mlp(x)

        with on_an_h100(), fixed_order() if fixed else nullcontext():
            text = jax.jit(layer).trace(params, shape).lower(lowering_platforms=("cuda",)).as_text()
        assert "gated_product" in text or "grouped_product" in text
        return text.count("stablehlo.dot_general")

    most = moe.MOST_ROWS_WITH_SHARED * 16 // 2
    assert products(arch, 32) == products(arch, most) == 2
    assert products(arch, most + 1) == 4
    assert products(replace(arch, by_experts=True), 32) == 2  # one device has all of them
    for others in (192, 5 * 128):  # no whole ones, and many
        assert products(read(tmp_path, **mixture, shared_expert_intermediate_size=others), 32) == 4
    quantized = replace(arch, weight_format=WeightFormat("int8", "int8"))
    assert products(quantized, 32) == 4
    assert products(arch, 32, fixed=True) == 0  # each is a kernel of ours


@pytest.mark.parametrize(
    ("shared", "devices", "by_experts", "count"),
    [(512, 1, False, 2), (512, 2, False, 2), (512, 2, True, 0), (384, 1, False, 0)],
)
def test_the_test_of_kernels_at_start_has_as_many_shared_experts(
    shared: int, devices: int, by_experts: bool, count: int, tmp_path: Path
) -> None:
    mixture: dict[str, Any] = {"architectures": ["Qwen2MoeForCausalLM"], "num_key_value_heads": 2}
    mixture |= {"num_experts": 16, "moe_intermediate_size": 256, "shared_expert_intermediate_size": shared}
    arch = replace(read(tmp_path, **mixture), by_experts=by_experts)
    formats = Precision(*[jnp.dtype("bfloat16")] * 3)
    shapes = kernel_shapes(arch, formats, 64, KeptHeads(2, 2, 64), devices)
    assert [each.router.num_shared for each in shapes.experts] == [count, count]


@pytest.mark.skipif(not NIGHTLY, reason="an engine of its own; by night")
def test_the_engine_sends_a_buckets_padding_to_no_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def noting(experts: jax.Array, num_experts: int, is_token: jax.Array | None, **options: Any) -> Any:
        groups = group_by_expert(experts, num_experts, is_token, **options)
        jax.debug.callback(lambda counts: sizes.append(int(counts.sum())), groups.sizes)
        return groups

    monkeypatch.setattr(moe, "group_by_expert", noting)
    folder = make_checkpoint("mixtral", tmp_path, num_hidden_layers=1)
    flags: dict[str, Any] = {"decode_buckets": (8,), "extend_buckets": (16,), "compilation_cache_dir": ""}
    engine = Engine(
        EngineConfig(model=str(folder), context_length=64, max_total_tokens=512, page_size=8, max_running_requests=8,
                     chunked_prefill_size=16, **flags),
        progress=False,
    )  # fmt: skip
    sizes.clear()
    serve(engine, [[Request("a", [5, 6, 7, 8, 9], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))]])
    jax.effects_barrier()
    top_k = 2
    assert sizes[0] == 5 * top_k
    assert set(sizes[1:]) == {top_k}
    engine.close()


def test_config_json_says_which_layers_are_dense(tmp_path: Path) -> None:
    def dense(**changes: Any) -> list[bool]:
        arch = read(tmp_path, num_hidden_layers=6, num_key_value_heads=2, **changes)
        return [isinstance(layer.mlp, DenseMlp) for layer in arch.layers]

    assert dense(**QWEN3_MOE) == [False] * 6
    steps = dense(**QWEN3_MOE, decoder_sparse_step=2, mlp_only_layers=[3])
    assert steps == [True, False, True, True, True, False]
    assert dense(**GLM4_MOE) == [True] + [False] * 5
    assert dense(**GLM4_MOE, first_k_dense_replace=3) == [True] * 3 + [False] * 3


def test_shares_add_up_to_1_where_the_folder_or_its_family_says_so(tmp_path: Path) -> None:
    def mixture(**changes: Any) -> MoeMlp:
        found = read(tmp_path, num_key_value_heads=2, num_hidden_layers=2, **changes).mixture
        assert found is not None
        return found

    assert not mixture(**QWEN3_MOE).router.renormalize
    assert mixture(**QWEN3_MOE, norm_topk_prob=True).router.renormalize
    assert mixture(**GLM4_MOE).router.renormalize
    assert mixture(architectures=["MixtralForCausalLM"]).router == Router(2, renormalize=True)
    glm = mixture(**GLM4_MOE, n_group=4, topk_group=2, routed_scaling_factor=2.5, num_experts_per_tok=3)
    assert glm.router == Router(3, "sigmoid", True, 2.5, 4, 2, choice_bias=True)
    assert (glm.num_experts, glm.ffn_size, glm.shared_ffn_size) == (8, 48, 48)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({**QWEN3_MOE, "num_experts_per_tok": 9}, "9 of 8 experts"),
        ({**GLM4_MOE, "n_group": 3}, "of 3 groups can't be chosen"),
        ({**GLM4_MOE, "n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "3 experts .* 1 groups of 2"),
        ({**QWEN3_MOE, "num_experts": None}, "num_experts is None"),
    ],
)
def test_experts_that_cannot_be_chosen_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(tmp_path, num_key_value_heads=2, **changes)


@pytest.mark.parametrize(
    ("experts", "quantization", "parts"),
    [
        (False, None, []),
        (False, "int8", [native_library.INTEGERS]),
        (True, None, [native_library.GROUPED]),
        (True, "int8", [native_library.INTEGERS, native_library.GROUPED]),
    ],
)
def test_a_cpu_compiles_the_kernels_that_a_model_needs_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, experts: bool, quantization: str | None, parts: list[Any]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(native_library, "load", lambda *parts: asked.extend(parts))
    monkeypatch.setattr(native_library, "multiplies_bytes", lambda: True)
    arch = read(tmp_path, num_key_value_heads=2, **(QWEN3_MOE if experts else {}))
    as_kept(replace(arch, weight_format=weight_format(quantization, None)), jnp.dtype("bfloat16"), "cpu", 1)
    assert asked == parts


@pytest.mark.parametrize(
    ("name", "weight_only", "multiplies", "bits"),
    [
        ("bfloat16", False, True, 8), ("bfloat16", True, True, 16), ("bfloat16", False, False, 16),
        ("float32", False, True, 32), ("float32", True, False, 32),
    ],
)  # fmt: skip
def test_a_cpu_rounds_rows_unless_weights_alone_are_to_be_quantized_or_all_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, weight_only: bool, multiplies: bool, bits: int
) -> None:
    monkeypatch.setattr(native_library, "multiplies_bytes", lambda: multiplies)
    sizes = {**QWEN3_MOE, "num_key_value_heads": 2, "moe_intermediate_size": 64}
    arch = replace(read(tmp_path, **sizes), weight_format=weight_format("int8", None))
    dtype = jnp.dtype(name)
    _, params = abstract_model(as_kept(arch, dtype, "cpu", 1, weight_only=weight_only), dtype)
    for path in (("mlp", "down"), ("attention", "o")):
        param: Any = params["layers"][0][path[0]][path[1]]
        assert param.get_metadata("format").row_bits == bits


def test_experts_are_quantized_at_load_where_a_kernel_multiplies_them(tmp_path: Path) -> None:
    arch = read(tmp_path, num_key_value_heads=2, **QWEN3_MOE)
    flagged, dtype = replace(arch, weight_format=weight_format("int8", None)), jnp.dtype("bfloat16")
    for platform in ("cpu", "gpu"):
        _, params = abstract_model(as_kept(flagged, dtype, platform, 1), dtype)
        assert params["layers"][0]["mlp"]["down"].dtype == jnp.int8
    with pytest.raises(ConfigError, match=r"can't be quantized on TPUs: .* the weights have 64 inputs"):
        as_kept(flagged, dtype, "tpu", 1)
    stored = replace(flagged, weight_format=WeightFormat("fp8", "float8_e4m3fn", storage=Storage("plain")))
    _, params = abstract_model(as_kept(stored, dtype, "tpu", 1), dtype)
    assert params["layers"][0]["mlp"]["down"].dtype == dtype and params["layers"][0]["attention"]["o"].dtype != dtype
