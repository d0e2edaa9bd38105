"""What a checkpoint says of its KV cache and of its weights, together and alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxsgl.errors import CheckpointError
from jaxsgl.models import ModelArch, arch_from_folder
from tests.checkpoints import configuration
from tests.models.test_arch import read

FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
QUARK_OUTPUT = {"weight": None, "output_tensors": {"dtype": "fp8_e4m3", "is_dynamic": False}}
QUARK = {
    "quant_method": "quark",
    "global_quant_config": {"weight": None},
    "layer_quant_config": {"*k_proj": QUARK_OUTPUT, "*v_proj": QUARK_OUTPUT},
    "export": {"kv_cache_group": ["*k_proj", "*v_proj"]},
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": FLOAT8}, "fp8_e4m3"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": None}}}, None),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": FLOAT8}, "fp8_e4m3"),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8_e4m3"),
        ({"quant_method": "fp8", "kv_cache_scheme": "static"}, "fp8_e4m3"),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_scheme": "FP8"}, "fp8_e4m3"),
        (QUARK, "fp8_e4m3"),
        ({**QUARK, "export": {"kv_cache_group": []}}, None),
    ],
)
def test_the_kv_cache_that_a_checkpoint_was_calibrated_for_is_read(
    config: dict[str, Any], expected: str | None, tmp_path: Path
) -> None:
    assert read(tmp_path, quantization_config=config).kv_cache_dtype == expected


def test_modelopts_own_file_counts_as_the_configuration_does(tmp_path: Path) -> None:
    path = tmp_path / "hf_quant_config.json"
    path.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    assert read(tmp_path).kv_cache_dtype == "fp8_e4m3"
    weights = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "model.layers.0.self_attn*"]}
    path.write_text(json.dumps({"quantization": {**weights, "kv_cache_quant_algo": "FP8"}}))
    arch = read(tmp_path)
    assert arch.kv_cache_dtype == "fp8_e4m3" and arch.weight_format is not None and arch.weight_format.group == 16
    assert [layer.unquantized for layer in arch.layers] == [{"qkv", "o"}, *[frozenset()] * (len(arch.layers) - 1)]
    for algo, words in (
        ("W4A16_AWQ", "quant_algo is W4A16_AWQ; supported are"),
        ("MIXED_PRECISION", "quant_algo is MIXED_PRECISION, but quantized_layers"),
    ):
        path.write_text(json.dumps({"quantization": {"quant_algo": algo}}))
        with pytest.raises(CheckpointError, match=rf"hf_quant_config\.json: .*{words}"):
            read(tmp_path)


def test_of_several_formats_matrices_that_are_multiplied_at_once_have_one(tmp_path: Path) -> None:
    def told(**layers: str) -> dict[str, Any]:
        of_layers = {f"model.layers.0.{name}": {"quant_algo": algo} for name, algo in layers.items()}
        return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": of_layers}

    arch = read(tmp_path, quantization_config=told(**{"self_attn": "FP8", "mlp.down_proj": "NVFP4"}))
    assert arch.weight_format is not None and arch.weight_format.numbers == "float8_e4m3fn"
    assert arch.layers[0].unquantized == {"gate_up", "down"} and [name for name, _ in arch.layers[0].stored_in] == [
        "down"
    ]
    assert arch.layers[1].unquantized == arch.layers[1].matrices and not arch.layers[1].stored_in
    with pytest.raises(CheckpointError, match=r"several formats for layers\.0\.mlp\.gate_proj.*give them one"):
        read(tmp_path, quantization_config=told(**{"mlp.gate_proj": "FP8", "mlp.up_proj": "NVFP4"}))
    with pytest.raises(CheckpointError, match="names no matrix of the decoder's layers"):
        read(tmp_path, quantization_config=told(other="FP8"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**QUARK, "layer_quant_config": {"*mlp*": {"weight": {"dtype": "fp8_e4m3"}}}}, "weights quantized by quark"),
        ({"quant_method": "bitsandbytes", "kv_cache_scheme": FLOAT8}, "weights quantized by bitsandbytes"),
        (["fp8"], "must be an object"),
    ],
)
def test_quantized_weights_are_refused_by_name_whatever_the_kv_cache_is(
    config: Any, words: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(tmp_path, quantization_config=config)


def test_weights_and_kv_cache_may_both_be_float8(tmp_path: Path) -> None:
    weights = {**FLOAT8, "strategy": "channel"}
    config = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "kv_cache_scheme": FLOAT8,
        "config_groups": {"g": {"weights": weights}}, "ignore": ["lm_head"],
    }  # fmt: skip
    arch = read(tmp_path, quantization_config=config)
    assert arch.kv_cache_dtype == "fp8_e4m3"
    assert arch.weight_format is not None
    assert (arch.weight_format.numbers, arch.weight_format.group) == ("float8_e4m3fn", None)


@pytest.mark.parametrize(
    "scheme", [{**FLOAT8, "num_bits": 4}, {**FLOAT8, "type": "int"}, {**FLOAT8, "dynamic": True}, "dynamic"]
)
def test_another_kv_cache_is_left_unquantized_with_a_warning(
    scheme: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    assert read(tmp_path, quantization_config=config).kv_cache_dtype is None
    assert "supported is fp8_e4m3 with static scales" in caplog.text


FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}},
}
AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "group_size": 32}
PLAIN = {"bits": 16, "data_type": "float"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}


def targeting(*targets: str) -> dict[str, Any]:
    return {**INT4, "config_groups": {"g": {**INT4["config_groups"]["g"], "targets": list(targets)}}}


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({**GPTQ, "dynamic": {"-:.*self_attn": {}}}, {"qkv", "o"}),
        ({**GPTQ, "dynamic": {r"-:.*\.down_proj": {}, "-:.*o_proj": {}}}, {"o", "down"}),
        (
            {**AUTO_ROUND, "extra_config": {"model.layers.1.self_attn.o_proj": PLAIN, r".*\.down_proj": PLAIN}},
            {"o", "down"},
        ),
        (targeting("Linear"), set()),
        (targeting("re:.*mlp.*"), {"qkv", "o"}),
        (targeting(r"re:.*self_attn.*", r"re:.*\.(gate|up)_proj$"), {"down"}),
        ({**FP8_BLOCKS, "modules_to_not_convert": ["model.layers.0.", "model.layers.1.mlp"]}, {"gate_up", "down"}),
    ],
)
def test_matrices_that_a_configuration_leaves_out_are_known(
    config: dict[str, Any], kept: set[str], tmp_path: Path
) -> None:
    assert read(tmp_path, quantization_config=config).layers[1].unquantized == kept


@pytest.mark.parametrize(
    "exception", ["model.language_model.layers.1.experts", "re:.*layers.1.experts.*", "re:.*1\\.experts\\.\\d+"]
)
def test_experts_next_to_an_mlp_are_excepted_by_their_own_names(exception: str, tmp_path: Path) -> None:
    values = {**configuration("gemma4_moe"), "quantization_config": {**INT4, "ignore": [exception]}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    arch = arch_from_folder(tmp_path)
    assert [layer.unquantized for layer in arch.layers[:2]] == [set(), {"experts"}]


def test_exceptions_of_an_mlp_leave_the_experts_next_to_it_quantized(tmp_path: Path) -> None:
    """As nvidia/Gemma-4-26B-A4B-NVFP4 is published."""
    exceptions = ["model.language_model.layers.0.mlp*", "model.language_model.layers.0.self_attn*"]
    for config in (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": exceptions},
        {**INT4, "ignore": [f"re:.*{each.removesuffix('*')}.*" for each in exceptions]},
    ):
        values = {**configuration("gemma4_moe"), "quantization_config": config}
        (tmp_path / "config.json").write_text(json.dumps(values))
        layer = arch_from_folder(tmp_path).layers[0]
        assert layer.matrices - layer.unquantized == {"experts"}


def test_sparse_weights_and_rotated_activations_are_refused_and_what_weights_hold_is_taken(tmp_path: Path) -> None:
    group = {"targets": ["Linear"], "weights": {**FLOAT8, "strategy": "channel"}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g": group}}

    def rotations(*places: str) -> dict[str, Any]:
        return {"config_groups": {"R": {"type": "hadamard", "apply": [{"location": place} for place in places]}}}

    taken = {"sparsity_config": {"format": "dense"}, "transform_config": rotations("weight_input", "weight_output")}
    assert read(tmp_path, quantization_config={**config, **taken}).weight_format is not None
    for refused, words in (
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is sparse-24-bitmask"),
        ({"transform_config": rotations("weight_input", "input")}, "transform_config rotates at input"),
    ):
        with pytest.raises(CheckpointError, match=words):
            read(tmp_path, quantization_config={**config, **refused})


def test_blocks_are_two_numbers_in_either_spelling(tmp_path: Path) -> None:
    def block(told: Any) -> tuple[int | None, int]:
        weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": told}
        config = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"g": {"weights": weights}},
        }
        fmt = read(tmp_path, quantization_config=config).weight_format
        assert fmt is not None and fmt.storage is not None
        return fmt.group, fmt.storage.block_rows

    assert block([64, 128]) == block("64x128") == (128, 64)
    with pytest.raises(CheckpointError, match=r"block_structure is None, but must be two numbers"):
        block(None)
    for told in ([128], 128, ["a", 128]):
        with pytest.raises(CheckpointError, match=r"weight_block_size is .*, but must be two numbers"):
            read(tmp_path, quantization_config={**FP8_BLOCKS, "weight_block_size": told})
    fmt = read(tmp_path, quantization_config={**FP8_BLOCKS, "weight_block_size": "64x32"}).weight_format
    assert fmt is not None and fmt.storage is not None and (fmt.storage.block_rows, fmt.group) == (64, 32)


@pytest.mark.parametrize("told", [[1], "all", {"group_0": 1}])
def test_groups_that_are_no_objects_are_refused(told: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config_groups is .*, but must be an object of objects"):
        read(tmp_path, quantization_config={**INT4, "config_groups": told})


def numbers(arch: ModelArch, layer: int) -> dict[str, tuple[str, int, int | None]]:
    """How the matrices of a layer are kept or stored: the dtype, bits in the files, and the group."""
    found = {}
    for matrix in arch.layers[layer].matrices - {"shared"}:
        fmt = arch.format_of(arch.layers[layer], matrix) or arch.stored_format_of(arch.layers[layer], matrix)
        if fmt is not None and fmt.storage is not None:
            found[matrix] = fmt.numbers, fmt.storage.bits, fmt.group
    return found


def test_rules_of_gptqmodel_are_read_as_they_are_published(tmp_path: Path) -> None:
    rules = {
        "-:model\\.layers\\.([2-9]\\d*|[1-9]\\d+)\\..*": {},
        ".*\\.1\\..*": {"bits": 8, "group_size": 64, "desc_act": False},
    }
    arch = read(tmp_path, quantization_config={**GPTQ, "desc_act": True, "dynamic": rules}, num_hidden_layers=4)
    names = ("qkv", "o", "gate_up", "down")
    assert numbers(arch, 0) == dict.fromkeys(names, ("int4", 4, 32))
    assert numbers(arch, 1) == dict.fromkeys(names, ("int8", 8, 64))
    assert numbers(arch, 2) == numbers(arch, 3) == {}
    assert arch.weight_format is not None and arch.weight_format.reorders


def test_other_numbers_for_some_modules_of_autoround_are_read_by_names_and_expressions(tmp_path: Path) -> None:
    own = {
        **{f"model.layers.0.self_attn.{each}_proj": {"bits": 8, "group_size": 64} for each in "qkv"},
        "model.layers.1.mlp": PLAIN,
        "o_proj$": {"bits": 2},
        "lm_head": {"bits": 8},
    }
    form = {**AUTO_ROUND, "packing_format": "auto_round:auto_gptq"}
    arch = read(tmp_path, quantization_config={**form, "extra_config": own})
    small = {"o": ("int4", 2, 32)}
    whole = dict.fromkeys(("gate_up", "down"), ("int4", 4, 32))
    assert numbers(arch, 0) == {**whole, **small, "qkv": ("int8", 8, 64)}
    assert numbers(arch, 1) == {**small, "qkv": ("int4", 4, 32)}
    assert arch.head_format is not None and arch.head_format.numbers == "int8"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**GPTQ, "dynamic": {".*mlp": {"bits": 5}}}, r"dynamic \.\*mlp: bits is 5; supported are 2, 3, 4, 8"),
        ({**GPTQ, "dynamic": {"+:.*up_proj": {"bits": 8}}}, "several formats for layers.0.mlp.gate_proj.*give"),
        ({**GPTQ, "dynamic": {"-:.*k_proj": {}}}, "several formats for layers.0.self_attn.q_proj.*give them one"),
        ({**GPTQ, "dynamic": ["-:.*mlp"]}, "dynamic is .*, but must be an object that gives each module an object"),
        ({**GPTQ, "dynamic": {"-:*mlp": {}}}, r"names modules by 're:\*mlp', which is no regular expression"),
        ({**AUTO_ROUND, "extra_config": {"mlp": {"data_type": "mx_fp"}}}, "extra_config mlp: data_type is mx_fp"),
        ({**AUTO_ROUND, "extra_config": {"mlp": {"bits": 8}}}, "extra_config mlp: bits is 8; supported are 4"),
    ],
)  # fmt: skip
def test_rules_that_cannot_be_kept_are_refused_by_name(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(tmp_path, quantization_config=config)
