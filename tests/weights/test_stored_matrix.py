"""Quantized matrices of every format, read row by row, mean what the software that packs them says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from jaxsgl.errors import CheckpointError
from jaxsgl.models.layer_spec import DeltaNet, DenseMlp, Latent, LayerSpec, MoeMlp
from jaxsgl.models.quantization import WeightFormat
from jaxsgl.models.quantized_checkpoints import read_format, read_unquantized
from jaxsgl.weights.stored_matrix import StoredMatrix, tensor_names
from pallas_kernels import Router
from tests.weights.stored_weights import FORMATS, Tensors

SHAPE = (72, 128)
PATH = Path("config.json")


def as_numpy(tensors: Tensors) -> dict[str, Any]:
    views = {
        torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
        torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    }
    arrays = {}
    for name, tensor in tensors.items():
        bits, dtype = views.get(tensor.dtype, (None, None))
        arrays[name] = tensor.numpy() if bits is None else tensor.view(bits).numpy().view(dtype)
    return arrays


def stored(name: str, fmt: WeightFormat | None = None) -> tuple[StoredMatrix, np.ndarray, WeightFormat]:
    config, quantize = FORMATS[name]
    rng = np.random.default_rng(3)
    tensors, meant = quantize(rng.standard_normal(SHAPE).astype(np.float32), rng)
    fmt = fmt or read_format(PATH, config)
    return StoredMatrix(fmt, as_numpy(tensors), SHAPE, "q_proj"), meant, fmt


def dequantized(matrix: StoredMatrix, fmt: WeightFormat, rows: Any) -> np.ndarray:
    """By the definition of `Matrix`."""
    group = np.arange(SHAPE[1]) // fmt.group_of(SHAPE[1])
    values = matrix.numbers(rows).astype(np.float32)
    if fmt.has_zeros:
        values = values - matrix.zero(rows)[:, group]
    values = values * matrix.scale(rows)[:, group]
    out = np.empty_like(values)
    out[:, matrix.order() if fmt.reorders else slice(None)] = values
    return out


@pytest.mark.parametrize("on_cpu", [False, True], ids=["accelerator", "cpu"])
@pytest.mark.parametrize("name", FORMATS)
def test_rows_mean_what_was_packed(name: str, on_cpu: bool) -> None:
    fmt = read_format(PATH, FORMATS[name][0])
    matrix, meant, fmt = stored(name, fmt.on_cpu("bfloat16") if on_cpu else fmt)
    assert not on_cpu or (fmt.numbers in ("int8", "bfloat16") and not fmt.has_zeros)
    for rows in (slice(None), slice(40, 41), slice(16, 72), np.array([71, 3, 3, 40])):
        np.testing.assert_allclose(dequantized(matrix, fmt, rows), meant[rows], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", FORMATS)
def test_another_shape_than_the_configuration_says_is_an_error_with_both(name: str) -> None:
    config, quantize = FORMATS[name]
    tensors, _ = quantize(np.ones(SHAPE, np.float32), np.random.default_rng(0))
    with pytest.raises(CheckpointError, match=r"q_proj: (numbers|scales) are .*config\.json asks for"):
        StoredMatrix(read_format(PATH, config), as_numpy(tensors), (SHAPE[0], SHAPE[1] - 32), "q_proj")


def test_a_symmetric_checkpoint_with_other_offsets_is_refused() -> None:
    config = {**FORMATS["gptq"][0], "sym": True}
    with pytest.raises(CheckpointError, match="says symmetric, but the stored zero points differ"):
        stored("gptq", read_format(PATH, config))


def test_the_tensors_of_a_format_replace_weight_in_its_name() -> None:
    def names(name: str) -> tuple[str, ...]:
        fmt = read_format(PATH, FORMATS[name][0])
        assert fmt.storage is not None
        return tensor_names(fmt.storage, fmt.reorders)

    assert names("fp8 in blocks") == ("weight", "weight_scale_inv")
    assert names("modelopt nvfp4") == ("weight", "weight_scale", "weight_scale_2")
    assert names("compressed-tensors nvfp4") == ("weight_packed", "weight_scale", "weight_global_scale")
    assert names("awq") == ("qweight", "scales", "qzeros")
    assert names("gptq desc_act") == ("qweight", "scales", "qzeros", "g_idx")
    assert names("compressed-tensors int4 asymmetric") == ("weight_packed", "weight_scale", "weight_zero_point")


COMPRESSED = FORMATS["compressed-tensors int8"][0]
WEIGHTS = COMPRESSED["config_groups"]["group_0"]["weights"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantized by bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo is W4A16_AWQ; supported are FP8, "),
        ({**FORMATS["modelopt nvfp4"][0], "group_size": 32}, "group_size is 32; supported are 16"),
        ({**FORMATS["awq"][0], "version": "gemv"}, "version is gemv; supported are gemm"),
        ({**FORMATS["awq"][0], "bits": 3}, "bits is 3; supported are 4"),
        ({**FORMATS["gptq"][0], "bits": 5}, "bits is 5; supported are 2, 3, 4, 8"),
        ({**COMPRESSED, "format": "mxfp8-pack-quantized"}, "format is mxfp8-pack-quantized"),
        ({**COMPRESSED, "format": "marlin-24"}, "format is marlin-24"),
        ({**COMPRESSED, "config_groups": {"a": {"weights": {**WEIGHTS, "type": "float", "num_bits": 4}}}}, "4 bits of"),
    ],
)  # fmt: skip
def test_formats_and_options_that_are_not_supported_are_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_format(PATH, config)
    assert words in str(caught.value)


NOTHING = frozenset[str]()
MIXTURE = MoeMlp(4, 8, Router(2))
# One with a plain MLP, one with experts, one with a latent and experts.
LAYERS = (LayerSpec(DenseMlp(8)), LayerSpec(MIXTURE), LayerSpec(MIXTURE, mixer=Latent(8, 8, 2, 6, 6)))
OF_LATENT = frozenset({"q_a", "q_b", "kv_a", "kv_b", "o"})
EXCEPTIONS: list[tuple[list[str], list[frozenset[str]]]] = [
    (
        ["lm_head", "model.embed_tokens", "model.norm", "model.layers.1.post_attention_layernorm", "re:.*lm_head",
         "gate", "mlp.gate", "model.layers.0.mlp.gate", "re:.*mlp\\.gate$", "e_score_correction_bias", "visual",
         "model.visual.blocks.0.attn.qkv", "shared_expert_gate"],
        [NOTHING] * 3,
    ),
    (["self_attn"], [frozenset({"qkv", "o"}), frozenset({"qkv", "o"}), OF_LATENT]),
    (["self_attn.kv_b_proj", "q_a_proj"], [NOTHING, NOTHING, frozenset({"q_a", "kv_b"})]),
    (["model.layers.2"], [NOTHING, NOTHING, OF_LATENT | {"experts", "shared"}]),
    (["mlp.down_proj", "re:.*layers\\.1\\.mlp\\.experts\\."], [frozenset({"down"}), frozenset({"experts"}), NOTHING]),
    (["model.language_model.layers.1.self_attn.qkv_proj"], [NOTHING, frozenset({"qkv"}), NOTHING]),
    (["shared_experts"], [NOTHING, frozenset({"shared"}), frozenset({"shared"})]),
]  # fmt: skip


@pytest.mark.parametrize(("told", "expected"), EXCEPTIONS)
def test_exceptions_name_matrices_of_layers_by_parts_of_names_or_expressions(
    told: list[str], expected: list[frozenset[str]]
) -> None:
    assert read_unquantized(PATH, {**COMPRESSED, "ignore": told}, LAYERS) == expected
    assert read_unquantized(PATH, {**FORMATS["awq"][0], "modules_to_not_convert": told}, LAYERS) == expected


def test_exceptions_of_hybrids_name_what_is_multiplied_at_once() -> None:
    layers = LayerSpec(DenseMlp(8), mixer=DeltaNet(2, 4, 8, 8, 4)), LayerSpec(DenseMlp(8))

    def excepted(*told: str) -> list[frozenset[str]]:
        return read_unquantized(PATH, {**FORMATS["fp8 in blocks"][0], "modules_to_not_convert": told}, layers)

    small = ("conv1d", "norm", "in_proj_a", "in_proj_b", "in_proj_ba")
    assert excepted(*(f"model.language_model.layers.0.linear_attn.{each}" for each in small)) == [NOTHING] * 2
    assert excepted("linear_attn") == [frozenset({"state_inputs", "state_output"}), NOTHING]
    assert excepted("re:.*linear_attn\\.in_proj_.*") == [frozenset({"state_inputs"}), NOTHING]
    assert excepted("model.layers.0.linear_attn.in_proj_qkvz") == [frozenset({"state_inputs"}), NOTHING]
    assert excepted("linear_attn.out_proj", "self_attn") == [frozenset({"state_output"}), frozenset({"qkv", "o"})]
    with pytest.raises(CheckpointError, match=r"leaves linear_attn.in_proj_z of layers.0 unquantized"):
        excepted("linear_attn.in_proj_z")


def test_exceptions_of_a_draft_head_have_names_of_its_own() -> None:
    layers = LayerSpec(DenseMlp(8), mixer=DeltaNet(2, 4, 8, 8, 4)), LayerSpec(DenseMlp(8))

    def excepted(*told: str) -> list[frozenset[str]]:
        config = {**FORMATS["fp8 in blocks"][0], "modules_to_not_convert": told}
        return read_unquantized(PATH, config, layers, draft_head=True)

    assert excepted("mtp.fc", "model.layers.1.mlp") == [NOTHING] * 2
    assert excepted("mtp.layers.0.self_attn") == [NOTHING, frozenset({"qkv", "o"})]
    assert excepted("re:^mtp.*") == excepted("mtp") == [NOTHING, frozenset({"qkv", "o", "gate_up", "down"})]


def test_an_exception_for_a_part_of_what_is_multiplied_at_once_is_refused() -> None:
    config = {**COMPRESSED, "ignore": ["model.layers.0.mlp.up_proj"]}
    with pytest.raises(CheckpointError, match=r"leaves mlp.up_proj of layers.0 unquantized and mlp.gate_proj not"):
        read_unquantized(PATH, config, LAYERS)


def test_an_expression_that_is_none_is_refused_by_its_text() -> None:
    with pytest.raises(CheckpointError, match=r"names modules by 're:\*mlp', which is no regular expression"):
        read_unquantized(PATH, {**COMPRESSED, "ignore": ["re:*mlp"]}, LAYERS)
