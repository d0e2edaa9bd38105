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
from jaxsgl.models.quantization import Storage, WeightFormat
from jaxsgl.models.quantized_checkpoints import read_unquantized
from jaxsgl.models.quantized_formats import read_format
from jaxsgl.weights.stored_matrix import StoredMatrix, tensor_names
from pallas_kernels import Router
from tests.weights.stored_weights import FORMATS, GROUP, Tensors, compressed

SHAPE = (72, 128)
PATH = Path("config.json")
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}


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


def with_tensors(name: str, **config: Any) -> tuple[dict[str, Any], np.ndarray, WeightFormat]:
    """The tensors of a matrix in a format, what they mean, and the format by its configuration with `config`."""
    told, quantize = FORMATS[name]
    rng = np.random.default_rng(3)
    tensors, meant = quantize(rng.standard_normal(SHAPE).astype(np.float32), rng)
    return as_numpy(tensors), meant, read_format(PATH, {**told, **config})


def test_an_order_of_inputs_that_the_configuration_says_nothing_of_is_refused() -> None:
    tensors, _, fmt = with_tensors("gptq desc_act", desc_act=False)
    with pytest.raises(CheckpointError, match=r"q_proj\.g_idx has inputs in another order .*: give it desc_act true"):
        StoredMatrix(fmt, tensors, SHAPE, "q_proj.weight")
    tensors, meant, fmt = with_tensors("compressed-tensors int4")
    tensors["weight_g_idx"] = np.full(SHAPE[1], -1, np.int32)  # one that was never set
    ordered = read_format(PATH, compressed("pack-quantized", **INT4, actorder="group"))
    for each in (fmt, ordered):
        np.testing.assert_allclose(StoredMatrix(each, tensors, SHAPE, "q_proj").weights(slice(None)), meant, rtol=1e-6)
    tensors["weight_g_idx"] = np.arange(SHAPE[1], dtype=np.int32)[::-1] // GROUP
    with pytest.raises(CheckpointError, match=r'weight_g_idx has inputs in another order .*actorder "group"'):
        StoredMatrix(fmt, tensors, SHAPE, "q_proj.weight")


@pytest.mark.parametrize("name", ["fp8 in blocks", "awq", "compressed-tensors int8", "modelopt nvfp4"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_scale_that_is_not_finite_is_refused_by_its_name(name: str, value: float) -> None:
    tensors, _, fmt = with_tensors(name)
    assert fmt.storage is not None
    whole = "weight_scale_2" if "weight_scale_2" in tensors else fmt.storage.scale  # float8 has no infinity
    tensors[whole] = tensors[whole].copy()
    tensors[whole][(0,) * tensors[whole].ndim] = value
    with pytest.raises(CheckpointError, match=rf"q_proj\.{whole} holds (nan|inf), but scales must be finite"):
        StoredMatrix(fmt, tensors, SHAPE, "q_proj.weight").weights(slice(None))


def test_zero_points_of_4_bits_may_be_bytes_as_older_software_has_them() -> None:
    tensors, meant, fmt = with_tensors("compressed-tensors int4 asymmetric")
    zeros = StoredMatrix(fmt, tensors, SHAPE, "q_proj").zero(slice(None))
    matrix = StoredMatrix(fmt, {**tensors, "weight_zero_point": zeros}, SHAPE, "q_proj")
    np.testing.assert_allclose(matrix.weights(slice(None)), meant, rtol=1e-6, atol=1e-9)
    with pytest.raises(CheckpointError, match=r"zero points are int8 \(72, 3\), but .* asks for \(72, 4\) of int8"):
        StoredMatrix(fmt, {**tensors, "weight_zero_point": zeros[:, :3]}, SHAPE, "q_proj")
    with pytest.raises(CheckpointError, match=r"zero points are float32 .* asks for \(9, 4\) of int8 or int32"):
        StoredMatrix(fmt, {**tensors, "weight_zero_point": zeros.astype(np.float32)}, SHAPE, "q_proj")


def test_scales_of_mxfp4_may_have_a_dtype_of_their_own() -> None:
    tensors, meant, fmt = with_tensors("compressed-tensors mxfp4")
    scales = tensors["weight_scale"].view(ml_dtypes.float8_e8m0fnu)
    matrix = StoredMatrix(fmt, {**tensors, "weight_scale": scales}, SHAPE, "q_proj")
    np.testing.assert_array_equal(matrix.weights(slice(None)), meant)
    with pytest.raises(CheckpointError, match=r"scales are float32 .* of uint8 or float8_e8m0fnu"):
        StoredMatrix(fmt, {**tensors, "weight_scale": scales.astype(np.float32)}, SHAPE, "q_proj")


@pytest.mark.parametrize("told", [{"checkpoint_format": "gptq_v2"}, {"format": "gptq_v2"}])
def test_either_key_says_that_zero_points_of_gptq_are_stored_as_they_are(told: dict[str, Any]) -> None:
    def storage(**config: Any) -> Storage | None:
        return read_format(PATH, {**FORMATS["gptq"][0], **config}).storage

    plain, second = storage(), storage(**told)
    assert plain is not None and second is not None
    assert (plain.zeros_one_less, second.zeros_one_less) == (True, False)


def test_awq_without_zero_points_is_read_by_those_that_it_stores() -> None:
    tensors, meant, fmt = with_tensors("awq", zero_point=False)
    np.testing.assert_allclose(StoredMatrix(fmt, tensors, SHAPE, "q").weights(slice(None)), meant, rtol=1e-6, atol=1e-9)


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
        ({**FORMATS["gptq"][0], "format": "gptq_v2", "checkpoint_format": "gptq"}, "checkpoint_format is gptq,"),
        ({**FORMATS["auto-round"][0], "packing_format": None, "backend": "auto_round:exllamav2"}, "backend is auto_"),
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
