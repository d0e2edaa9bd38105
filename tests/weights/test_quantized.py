"""Weights that are quantized as they are loaded, and those of quantized checkpoints."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.torch import load_file, save_file

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.weight_formats import as_kept
from jaxsgl.errors import CheckpointError, ConfigError
from jaxsgl.models import ModelArch, abstract_model, arch_from_folder
from jaxsgl.models.matrix import Matrices, dequantized
from jaxsgl.models.quantization import FORMATS_AT_LOAD, WeightFormat, weight_format
from jaxsgl.weights import as_stored, load_params, random_params
from pallas_kernels.native import library as native_library
from pallas_kernels.packed import FLOAT8, FRAGMENTS
from tests.checkpoint_kinds import DELTA_KINDS, two_layers
from tests.checkpoints import make_checkpoint
from tests.grids import count, daily
from tests.plain_model import checkpoint_logits, mesh_of, plain_logits
from tests.vision_models import make_model
from tests.weights.stored_weights import (
    FORMATS,
    MODELOPT_FP4,
    STATIC_FP8,
    Quantize,
    fp4,
    fp8_blocks,
    gptq,
    gptq_8_bits,
    hybrid_in_fp8,
    quantize_each,
    quantize_folder,
)

TOKENS = list(range(3, 60))
# Half a step of 127; half a unit of a mantissa of 3 bits, or half a unit of the smallest numbers.
LARGEST_ERROR = {
    "int8": lambda row: np.abs(row).max(-1, keepdims=True) / 254,
    "fp8": lambda row: np.maximum(np.abs(row) / 16, np.abs(row).max(-1, keepdims=True) / 448 / 1024),
}


def quantized(folder: Path, flag: str) -> tuple[ModelArch, nnx.State]:
    arch = replace(arch_from_folder(folder), weight_format=FORMATS_AT_LOAD[flag])
    return arch, load_params(folder, arch, jnp.dtype("float32"), mesh_of())


@pytest.mark.parametrize(
    ("kind", "flag"), [("qwen3", "int8"), ("llama_linear_rope_bias", "fp8"), ("qwen3_moe", "int8")]
)
def test_every_matrix_is_rounded_to_the_nearest_numbers_of_its_rows(kind: str, flag: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path)
    plain: Any = load_params(folder, arch_from_folder(folder), jnp.dtype("float32"), mesh_of())
    arch, params = quantized(folder, flag)
    leaves = {path: np.asarray(param[...].astype(jnp.float32)) for path, param in nnx.to_flat_state(params)}
    scaled = [path for path in leaves if f"{path[-1]}_scale" in {other[-1] for other in leaves}]
    assert len(scaled) == 4 * arch.num_layers + (2 - arch.tie_embeddings if flag == "int8" else 0)
    for path, param in nnx.to_flat_state(plain):
        weights = np.asarray(param[...])
        if path not in scaled:
            np.testing.assert_array_equal(leaves[path], weights)
            continue
        dequantized = leaves[path] * leaves[(*path[:-1], f"{path[-1]}_scale")]
        assert (np.abs(dequantized - weights) <= LARGEST_ERROR[flag](weights) * 1.001 + 1e-7).all()
        assert np.abs(dequantized).max(-1) == pytest.approx(np.abs(weights).max(-1), rel=1e-6)


@pytest.mark.parametrize("kind", daily(["qwen3_5", "qwen3_next", "kimi_linear"], every=2))
def test_delta_nets_are_quantized_at_load_but_for_their_gates(kind: str, tmp_path: Path) -> None:
    folder = make_checkpoint(kind, tmp_path)
    whole: Any = load_params(folder, arch_from_folder(folder), jnp.dtype("float32"), mesh_of())
    arch, params = quantized(folder, "int8")
    assert arch.recurrent_net is not None
    module = arch.recurrent_net.module
    found, plain = ({name: np.asarray(param[...]) for name, param in each["layers"][0][module].items()}
                    for each in (params, whole))  # fmt: skip
    num_rows = found["qkvz"].shape[1]
    np.testing.assert_array_equal(found["gates"], plain["inputs"][:, num_rows:])
    for name, weights in (("qkvz", plain["inputs"][:, :num_rows]), ("output", plain["output"])):
        assert found[name].dtype == np.int8
        errors = np.abs(found[name] * found[f"{name}_scale"] - weights)
        assert (errors <= LARGEST_ERROR["int8"](weights) * 1.001 + 1e-7).all(), name


@pytest.mark.parametrize("flag", ["int8", "fp8"])
def test_logits_stay_close_to_the_unquantized_ones(flag: str, tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    arch, params = quantized(folder, flag)
    logits, exact = plain_logits(arch, params, TOKENS), checkpoint_logits(folder, TOKENS)
    off = np.linalg.norm(logits - exact) / np.linalg.norm(exact)
    assert off < {"int8": 0.06, "fp8": 0.25}[flag], off


@pytest.mark.parametrize("flag", ["int8", "fp8"])
def test_random_weights_of_a_format_have_the_deviation_of_unquantized_ones(flag: str, tmp_path: Path) -> None:
    arch = replace(arch_from_folder(make_checkpoint("qwen3", tmp_path)), weight_format=FORMATS_AT_LOAD[flag])
    params: Any = random_params(arch, jnp.dtype("float32"), mesh_of(), 0)
    _, abstract = abstract_model(arch, jnp.dtype("float32"))
    assert {path: param.dtype for path, param in nnx.to_flat_state(abstract)} == {
        path: param[...].dtype for path, param in nnx.to_flat_state(params)
    }
    mlp = params["layers"][0]["mlp"]
    down = np.asarray(mlp["down"][...].astype(jnp.float32)) * np.asarray(mlp["down_scale"][...])
    assert down.std() == pytest.approx(arch.ffn_size**-0.5, rel=0.1)


def test_the_flag_goes_with_unquantized_checkpoints() -> None:
    stored = WeightFormat("awq", "int4", group=128, has_zeros=True)
    assert weight_format(None, None) is None
    assert weight_format(None, stored) == stored
    assert weight_format("awq", stored) == stored
    assert weight_format("int8", None) == FORMATS_AT_LOAD["int8"]
    with pytest.raises(ConfigError, match="--quantization is gptq, but the checkpoint's weights are not quantized"):
        weight_format("gptq", None)
    with pytest.raises(ConfigError, match="--quantization is int8, but the checkpoint's weights are quantized already"):
        weight_format("int8", stored)
    with pytest.raises(ConfigError, match="--quantization is int2, but must be one of int8, int4, fp8, awq"):
        EngineConfig(quantization="int2")


def matrices(arch: ModelArch, params: nnx.State) -> list[np.ndarray]:
    """The weights of all layers' matrices."""
    graphdef, _ = abstract_model(arch, jnp.dtype("float32"))
    model = nnx.merge(graphdef, params)
    names = (("attention", "qkv"), ("attention", "o"), ("mlp", "gate_up"), ("mlp", "down"))
    return [
        np.asarray(dequantized(getattr(layer, part).matrix(name), jnp.float32))
        for layer in model.layers
        for part, name in names
    ]


def stored_arch(folder: Path, on_cpu: str | None) -> ModelArch:
    arch = arch_from_folder(folder)
    assert arch.weight_format is not None
    return arch if on_cpu is None else replace(arch, weight_format=arch.weight_format.on_cpu(on_cpu))


# As accelerators keep it, and as a CPU does; by day in turns.
KEPT = [(name, (None, "bfloat16")[(i + night) % 2]) for night in range(2) for i, name in enumerate(FORMATS)]


@pytest.mark.parametrize(("name", "on_cpu"), KEPT[: count(len(FORMATS), len(KEPT))])
def test_a_quantized_checkpoint_is_its_dequantized_weights(name: str, on_cpu: str | None, tmp_path: Path) -> None:
    folder = quantize_folder(make_checkpoint("qwen2", tmp_path / "plain"), tmp_path / "stored", name)
    arch, plain = stored_arch(folder, on_cpu), arch_from_folder(folder / "meant")
    dtype = jnp.dtype("float32")
    stored, meant = load_params(folder, arch, dtype, mesh_of()), load_params(folder / "meant", plain, dtype, mesh_of())
    for found, expected in zip(matrices(arch, stored), matrices(plain, meant), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


def test_an_order_that_the_configuration_says_nothing_of_is_found_in_the_files(tmp_path: Path) -> None:
    config, quantize = FORMATS["gptq desc_act"]
    form = {**config, "desc_act": False}, quantize
    folder = quantize_folder(make_checkpoint("qwen2", tmp_path / "plain"), tmp_path / "stored", form)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.\S+\.g_idx has inputs in another order"):
        load_params(folder, arch_from_folder(folder), jnp.dtype("float32"), mesh_of())


# A file, or a key of config.json, that describes the format; what of it is left out.
ELSEWHERE = [
    ("gptq", "quantize_config.json", ("quant_method",)),
    ("awq", "quant_config.json", ("quant_method",)),
    ("gptq", "quantization_config", ("quant_method", "desc_act")),
    ("auto-round", "quantization_config", ("quant_method",)),
    ("compressed-tensors int8", "compression_config", ()),
    ("fp8 in blocks", "quantization_config", ("quant_method",)),
]


@pytest.mark.parametrize(("name", "place", "left_out"), ELSEWHERE)
def test_older_software_describes_its_formats_elsewhere(
    name: str, place: str, left_out: tuple[str, ...], tmp_path: Path
) -> None:
    config = json.loads((make_checkpoint("qwen3", tmp_path) / "config.json").read_text())

    def written(values: dict[str, Any], key: str) -> ModelArch:
        if key.endswith(".json"):
            (tmp_path / key).write_text(json.dumps(values))
        told = {} if key.endswith(".json") else {key: values}
        (tmp_path / "config.json").write_text(json.dumps({**config, **told}))
        return arch_from_folder(tmp_path)

    told = FORMATS[name][0]
    elsewhere = written({key: value for key, value in told.items() if key not in left_out}, place)
    assert elsewhere.weight_format is not None and elsewhere == written(told, "quantization_config")


def test_formats_that_name_no_method_are_refused_by_the_name_of_their_software(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path) / "config.json"
    config = json.loads(path.read_text())
    of_mlx = {"group_size": 64, "bits": 4}
    cases = (
        ({"quantization": of_mlx, "quantization_config": of_mlx}, "quantized by MLX are not supported"),
        ({"quantization_config": {"load_in_4bit": True}}, "quantized by bitsandbytes are not supported"),
    )
    for told, words in cases:
        path.write_text(json.dumps({**config, **told}))
        with pytest.raises(CheckpointError, match=words):
            arch_from_folder(tmp_path)


def test_numbers_of_a_dtype_that_numpy_lacks_are_refused_by_name(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight_packed"
    form = FORMATS["compressed-tensors nvfp4"]
    folder = quantize_folder(make_checkpoint("qwen2", tmp_path / "plain"), tmp_path / "stored", form)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header[name]["dtype"] = "F4"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(CheckpointError, match=rf"tensor {name} is F4; supported are F64, .* as U8"):
        load_params(folder, arch_from_folder(folder), jnp.dtype("float32"), mesh_of())


def test_one_scale_of_a_tensor_goes_by_the_name_of_scales_of_blocks_too(tmp_path: Path) -> None:
    folder = quantize_folder(make_checkpoint("qwen2", tmp_path / "plain"), tmp_path / "stored", STATIC_FP8)
    arch, plain, dtype = arch_from_folder(folder), arch_from_folder(folder / "meant"), jnp.dtype("float32")
    stored, meant = load_params(folder, arch, dtype, mesh_of()), load_params(folder / "meant", plain, dtype, mesh_of())
    for found, expected in zip(matrices(arch, stored), matrices(plain, meant), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


# By the bits of rows: not what has blocks of 40 by 48, int8 for rows of 16 bits, or a layer's float8 with one scale.
PACKINGS = {
    ("gptq desc_act", 16): "int4",
    ("compressed-tensors int8", 8): "int8",
    ("awq", 16): "int4",
    ("gptq 8 bits", 8): "int8",
    ("compressed-tensors int4 asymmetric", 16): "int4",
    ("compressed-tensors mxfp4", 16): "mxfp4",
    ("auto-round 3 bits", 16): "int4",
    ("fp8 per tensor", 16): "",
    ("fp8 in blocks", 16): "",
    ("compressed-tensors int8", 16): "",
}


@pytest.mark.parametrize(("name", "row_bits"), daily(list(PACKINGS), every=3))
def test_a_cpu_packs_what_its_kernels_take_without_loss(name: str, row_bits: int, tmp_path: Path) -> None:
    if row_bits == 8 and not native_library.multiplies_bytes():
        pytest.skip("the processor has no products of bytes, or there are no kernels")
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
    folder = quantize_folder(make_checkpoint("qwen3", tmp_path / "plain", **sizes), tmp_path / "stored", name)
    arch, plain = arch_from_folder(folder), arch_from_folder(folder / "meant")
    assert arch.weight_format is not None
    arch = replace(arch, weight_format=arch.weight_format.on_cpu("float32", row_bits=row_bits, packs=True))
    dtype = jnp.dtype("float32")
    stored, meant = load_params(folder, arch, dtype, mesh_of()), load_params(folder / "meant", plain, dtype, mesh_of())
    for found, expected in zip(matrices(arch, stored), matrices(plain, meant), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)
    formats = [param.get_metadata().get("format") for _, param in nnx.to_flat_state(abstract_model(arch, dtype)[1])]
    packings = {fmt.packing for fmt in formats if fmt is not None}
    assert packings == {PACKINGS[name, row_bits]}
    logits, expected = plain_logits(arch, stored, TOKENS), checkpoint_logits(folder / "meant", TOKENS)
    assert np.linalg.norm(logits - expected) < {8: 5e-2, 16: 1e-3}[row_bits] * np.linalg.norm(expected)


GROUPS_OF_FOUR_BITS = ("awq", "gptq desc_act", "compressed-tensors int4 asymmetric", "auto-round 3 bits")


@pytest.mark.parametrize("name", daily(GROUPS_OF_FOUR_BITS, every=2))
def test_gpus_pack_four_bits_without_loss(name: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192}
    folder = quantize_folder(make_checkpoint("qwen3", tmp_path / "plain", **sizes), tmp_path / "stored", name)
    arch, plain = arch_from_folder(folder), arch_from_folder(folder / "meant")
    kept, dtype = as_kept(arch, jnp.dtype("bfloat16"), "gpu", 1), jnp.dtype("float32")
    stored, meant = load_params(folder, kept, dtype, mesh_of()), load_params(folder / "meant", plain, dtype, mesh_of())
    for found, expected in zip(matrices(kept, stored), matrices(plain, meant), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)
    formats = [param.get_metadata().get("format") for _, param in nnx.to_flat_state(abstract_model(kept, dtype)[1])]
    assert {fmt.packing for fmt in formats if fmt is not None} == {FRAGMENTS}
    assert as_kept(arch, dtype, "gpu", 1) == arch  # float32 is not packed


@pytest.mark.parametrize(("name", "on_cpu"), daily(list(itertools.product(FORMATS, [None, "float32"])), every=5))
def test_logits_of_a_quantized_checkpoint_are_those_of_its_dequantized_weights(
    name: str, on_cpu: str | None, tmp_path: Path
) -> None:
    folder = quantize_folder(make_checkpoint("qwen3", tmp_path / "plain"), tmp_path / "stored", name)
    arch = stored_arch(folder, on_cpu)
    logits = plain_logits(arch, load_params(folder, arch, jnp.dtype("float32"), mesh_of()), TOKENS)
    expected = checkpoint_logits(folder / "meant", TOKENS)
    assert np.linalg.norm(logits - expected) < 1e-3 * np.linalg.norm(expected)


# Kind, format, exceptions, and an expression for the tensors that they mean.
EXCEPTED: list[tuple[str, str, list[str], str]] = [
    ("qwen3", "fp8 in blocks", ["model.layers.1.self_attn", "mlp.down_proj"], r"layers\.1\.self_attn|down_proj"),
    ("qwen3", "gptq desc_act", ["model.layers.0"], r"layers\.0\."),
    ("glm4_moe", "compressed-tensors int8", ["re:.*layers.1.mlp.experts", "shared_experts"], r"1\.mlp\.exp|shared"),
    ("glm4_moe", "fp8 in blocks", ["model.layers.1.mlp.experts"], r"1\.mlp\.experts"),
    ("deepseek_v3", "fp8 in blocks", ["lm_head"], ""),  # what makes keys and values is dequantized
    ("deepseek_v3", "compressed-tensors int8", ["re:.*kv_b_proj", "re:.*mlp"], r"kv_b_proj|mlp"),
    ("qwen3_next", "fp8 in blocks", ["linear_attn.in_proj_ba", "mlp.gate", "mtp.fc"], "in_proj_ba"),
    ("qwen3_5", "awq", ["linear_attn"], "linear_attn"),
    ("gemma4_small", "compressed-tensors int8", ["per_layer_input_gate", "per_layer_projection"], ""),
    ("qwen3_5", "fp8 in blocks", ["lm_head"], ""),  # gates are dequantized
    ("qwen3_next", "compressed-tensors int8", ["lm_head"], "in_proj_ba"),  # nothing is said of gates that aren't
    ("qwen3_5_moe", "gptq desc_act", ["in_proj_a", "in_proj_b", "model.layers.1.linear_attn"], r"in_proj_[ab]|1\.lin"),
    ("deepseek_v32", "fp8 in blocks", ["indexer"], "indexer"),
    ("hy_v3", "fp8 in blocks", ["shared_mlp", "lm_head"], "shared_mlp"),
    ("kolibri1", "compressed-tensors int8", ["re:.*layers.1.mlp.experts", "lm_head"], r"1\.mlp\.exp"),
    ("mimo_v2_flash", "fp8 in blocks", ["self_attn.o_proj"], "o_proj"),
    ("apertus", "fp8 in blocks", ["model.layers.0.mlp", "lm_head"], r"layers\.0\.mlp"),
]


@pytest.mark.parametrize(("kind", "name", "exceptions", "excepted"), daily(EXCEPTED, every=2))
def test_matrices_that_a_checkpoint_excepts_keep_their_numbers(
    kind: str, name: str, exceptions: list[str], excepted: str, tmp_path: Path
) -> None:
    plain = make_checkpoint(kind, tmp_path / "plain")
    folder = quantize_folder(plain, tmp_path / "stored", name, exceptions=exceptions, excepted=excepted)
    arch = arch_from_folder(folder)
    logits = plain_logits(arch, load_params(folder, arch, jnp.dtype("float32"), mesh_of()), TOKENS)
    expected, unquantized = (checkpoint_logits(each, TOKENS) for each in (folder / "meant", plain))
    # A token of a mixture whose experts are nearly level may choose another one.
    tokens = np.argsort(np.linalg.norm(logits - expected, axis=-1))[: None if arch.mixture is None else -1]
    assert np.linalg.norm((logits - expected)[tokens]) < 1e-3 * np.linalg.norm(expected)
    assert np.linalg.norm((logits - unquantized)[tokens]) > 3e-3 * np.linalg.norm(expected)


# Kind, format, and an expression for modules besides the layers' projections.
MORE: list[tuple[str, str, str]] = [
    ("seed_oss", "gptq desc_act", "lm_head"),
    ("qwen2_moe", "compressed-tensors fp8 per channel", "lm_head|shared_expert_gate"),
    ("gemma4_small", "compressed-tensors int4", r"per_layer_(model_projection|projection|input_gate)\."),
    ("gemma4_moe", "fp8 in blocks", r"router\.proj|lm_head"),
    ("llama_linear_rope_bias", "compressed-tensors nvfp4", "lm_head"),
    ("glm_moe_dsa", "fp8 in blocks", r"indexer\.w"),  # of which the weights of heads are
]


@pytest.mark.parametrize(("kind", "name", "also"), daily(MORE, every=2))
def test_whatever_a_checkpoint_has_quantized_besides_is_dequantized(
    kind: str, name: str, also: str, tmp_path: Path
) -> None:
    """Software that quantizes all linear modules takes heads and gates, too, unless it is told not to."""
    sizes: Any = {"hidden_size_per_layer_input": 32} if "per_layer" in also else {}  # a group of int4
    plain = make_checkpoint(kind, tmp_path / "plain", **sizes)
    folder = quantize_folder(plain, tmp_path / "stored", name, also=also)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"ignore": []} if "ignore" in config["quantization_config"] else {}
    (folder / "config.json").write_text(json.dumps(config))
    arch = as_stored(arch_from_folder(folder), folder)
    logits = plain_logits(arch, load_params(folder, arch, jnp.dtype("float32"), mesh_of()), TOKENS)
    expected = checkpoint_logits(folder / "meant", TOKENS)
    assert np.linalg.norm(logits - expected) < 1e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", ["awq", "modelopt nvfp4"])
def test_a_quantized_head_next_to_ties_is_not_the_embedding(name: str, tmp_path: Path) -> None:
    """As folders have it that don't say whether they are tied, and mean no by having a head."""
    plain = make_checkpoint("llama_untied_llama3_rope", tmp_path / "plain")
    folder = quantize_folder(plain, tmp_path / "stored", name, also="lm_head")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= {"ignore": []} if "ignore" in config["quantization_config"] else {}
    path.write_text(json.dumps(config | {"tie_word_embeddings": True}))
    arch = as_stored(arch_from_folder(folder), folder)
    assert not arch.tie_embeddings
    logits = plain_logits(arch, load_params(folder, arch, jnp.dtype("float32"), mesh_of()), TOKENS)
    expected = checkpoint_logits(folder / "meant", TOKENS)
    assert np.linalg.norm(logits - expected) < 1e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("kind", daily(DELTA_KINDS[::-1], every=3))
def test_a_hybrid_in_blocks_of_fp8_keeps_all_but_its_gates_as_published(kind: str, tmp_path: Path) -> None:
    folder = hybrid_in_fp8(kind, tmp_path)
    arch = arch_from_folder(folder)
    assert arch.weight_format is not None and not any(layer.unquantized for layer in arch.layers)
    arch = replace(arch, weight_format=arch.weight_format.on_cpu("float32", packs=True))
    params = load_params(folder, arch, jnp.dtype("float32"), mesh_of())
    kept = {path[2:]: param.get_metadata().get("format") for path, param in nnx.to_flat_state(params)}
    experts = [] if arch.mixture is None else [("mlp", "gate_up"), ("mlp", "down"), ("mlp", "shared", "gate_up")]
    for matrix in [("delta_net", "qkvz"), ("delta_net", "output"), ("attention", "qkv"), ("attention", "o"), *experts]:
        assert kept[matrix].packing == FLOAT8, matrix
    assert kept["delta_net", "gates"] is None and ("delta_net", "inputs") not in kept
    logits, expected = plain_logits(arch, params, TOKENS), checkpoint_logits(folder / "meant", TOKENS)
    assert np.linalg.norm(logits - expected) < 1e-3 * np.linalg.norm(expected)


def test_delta_nets_of_olmo_keep_all_but_their_gates_as_published(tmp_path: Path) -> None:
    gates = "b_proj", "a_proj"
    names = [f"model.layers.{layer}.linear_attn.{gate}" for layer in range(2) for gate in gates]
    sizes: dict[str, Any] = {**two_layers("olmo_hybrid"), "head_dim": 16}
    plain = make_checkpoint("olmo_hybrid", tmp_path / "plain", **sizes)
    excepted = "|".join(map(re.escape, names))
    folder = quantize_folder(plain, tmp_path / "stored", "compressed-tensors int8", exceptions=names, excepted=excepted)
    arch = as_stored(arch_from_folder(folder), folder)
    assert arch.weight_format is not None and not any(layer.unquantized for layer in arch.layers)
    params = load_params(folder, arch, jnp.dtype("float32"), mesh_of())
    kept = {path[2:]: param.get_metadata().get("format") for path, param in nnx.to_flat_state(params)}
    assert kept["delta_net", "qkvz"] is not None and kept["delta_net", "gates"] is None
    logits, expected = plain_logits(arch, params, TOKENS), checkpoint_logits(folder / "meant", TOKENS)
    assert np.linalg.norm(logits - expected) < 1e-3 * np.linalg.norm(expected)


# With sizes that are whole groups.
MAMBA_IN: list[tuple[str, str, dict[str, Any]]] = [
    ("bamba", "fp8 in blocks", {}),
    ("granite_hybrid", "compressed-tensors int4", {"shared_intermediate_size": 96}),
    ("nemotron_h", "modelopt fp8", {}),
    (
        "nemotron_h_latent",
        "modelopt nvfp4",
        {"mamba_head_dim": 16, "moe_latent_size": 80, "moe_shared_expert_intermediate_size": 64},
    ),
    ("falcon_h1", "compressed-tensors int8", {}),
]


@pytest.mark.parametrize(("kind", "method", "sizes"), daily(MAMBA_IN, every=3))
def test_layers_of_mamba_keep_all_but_their_time_steps_as_published(
    kind: str, method: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """All but a first layer that is excepted, where blocks have NVIDIA's names."""
    names = [f"backbone.layers.0.mixer.{each}" for each in ("in_proj", "out_proj") if "nemotron" in kind]
    plain, stored = make_checkpoint(kind, tmp_path / "plain", **sizes), tmp_path / "stored"
    folder = quantize_folder(plain, stored, method, exceptions=names, excepted="|".join(map(re.escape, names)))
    arch = as_stored(arch_from_folder(folder), folder)
    assert arch.weight_format is not None
    arch = replace(arch, weight_format=arch.weight_format.on_cpu("float32", packs=True))
    params = load_params(folder, arch, jnp.dtype("float32"), mesh_of())
    kept = {path[2:]: param.get_metadata().get("format") for path, param in nnx.to_flat_state(params)}
    matrices = [("mamba", "qkvz"), ("mamba", "output"), ("attention", "qkv"), ("attention", "o")]
    assert all(kept[matrix] is not None for matrix in matrices)
    assert kept["mamba", "gates"] is None and (("mamba", "inputs") in kept) == bool(names)
    assert ({"state_inputs", "state_output"} <= arch.layers[0].unquantized) == bool(names)
    logits, expected = plain_logits(arch, params, TOKENS), checkpoint_logits(folder / "meant", TOKENS)
    assert np.linalg.norm(logits - expected) < 1e-3 * np.linalg.norm(expected)


CONVOLUTIONS_IN: list[tuple[str, str, dict[str, Any]]] = [
    ("lfm2", "fp8 in blocks", {"intermediate_size": 192}),
    ("lfm3", "compressed-tensors int8", {}),
    ("lfm2_moe", "compressed-tensors int4", {"moe_intermediate_size": 64, "head_dim": 16, "intermediate_size": 64}),
]


@pytest.mark.parametrize(("kind", "method", "sizes"), daily(CONVOLUTIONS_IN, every=3))
def test_short_convolutions_keep_their_products_as_published(
    kind: str, method: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """Gates of attention, a row for each head, are dequantized."""
    plain = make_checkpoint(kind, tmp_path / "plain", **sizes)
    folder = quantize_folder(plain, tmp_path / "stored", method, also=r"\.w[123]\.weight")
    arch = as_stored(arch_from_folder(folder), folder)
    assert arch.weight_format is not None
    arch = replace(arch, weight_format=arch.weight_format.on_cpu("float32", packs=True))
    params = load_params(folder, arch, jnp.dtype("float32"), mesh_of())
    kept = {path[2:]: param.get_metadata().get("format") for path, param in nnx.to_flat_state(params)}
    for matrix in [("conv", "inputs"), ("conv", "output"), ("attention", "qkv"), ("attention", "o"), ("mlp", "down")]:
        assert kept[matrix] is not None, matrix
    assert kept.get(("attention", "gates")) is None and (("attention", "gates") in kept) == (kind == "lfm3")
    logits, expected = plain_logits(arch, params, TOKENS), checkpoint_logits(folder / "meant", TOKENS)
    assert np.linalg.norm(logits - expected) < 1e-3 * np.linalg.norm(expected)


def test_gates_that_are_quantized_in_part_are_dequantized(tmp_path: Path) -> None:
    plain = make_checkpoint("qwen3_5", tmp_path / "plain")
    folder = quantize_folder(plain, tmp_path / "stored", "fp8 in blocks", excepted="in_proj_a")
    arch = arch_from_folder(folder)
    logits = plain_logits(arch, load_params(folder, arch, jnp.dtype("float32"), mesh_of()), TOKENS)
    np.testing.assert_allclose(logits, checkpoint_logits(folder / "meant", TOKENS), atol=1e-4)


def in_two_formats(plain: Path, folder: Path, method: str) -> None:
    """As Qwen3.6's mixtures are published: experts and head in NVFP4, other matrices in FP8, to `folder`; or likewise.

    The first layer's attention is not quantized.
    """
    of_experts, others = {
        "modelopt": ("modelopt nvfp4", "modelopt fp8"),
        "compressed-tensors": ("compressed-tensors nvfp4", "compressed-tensors fp8 per channel"),
    }[method]  # fmt: skip
    left = r"layers\.0\.self_attn|in_proj_(ba|a|b)\."
    also = r"lm_head|experts\.\d+\.\w+_proj"
    first = quantize_folder(plain, folder / "first", of_experts, also=also, excepted=rf"{left}|attn|shared_expert")
    quantize_folder(first / "meant", folder / "second", others, excepted=rf"{left}|experts\.\d|lm_head")
    tensors = load_file(folder / "second" / "model.safetensors")
    of_first = load_file(first / "model.safetensors")
    plain_names = load_file(plain / "model.safetensors").keys()
    gone = {name for name in plain_names if re.search(also, name)}
    stored = {name: x for name, x in tensors.items() if name not in gone}
    stored |= {name: x for name, x in of_first.items() if re.search(also, name)}
    modules = sorted(
        name.removesuffix(".weight") for name in plain_names if re.search(r"_proj(_\w+)?\.weight|lm_head", name)
    )
    in_fp4 = [each for each in modules if re.search(also, each)]
    in_fp8 = [each for each in modules if each not in in_fp4 and not re.search(left, f"{each}.")]
    config: dict[str, Any]
    if method == "modelopt":
        blocks = sorted({re.sub(r"(\.experts)\..*", r"\1", each) for each in in_fp4})
        told = {each: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for each in blocks}
        told |= {each: {"quant_algo": "FP8"} for each in in_fp8}
        config = {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": told,
            "ignore": ["mtp*"],
        }
    else:
        groups = [
            {**FORMATS[form][0]["config_groups"]["group_0"], "format": FORMATS[form][0]["format"], "targets": targets}
            for form, targets in ((of_experts, [r"re:.*\.experts\.\d+\..*", "lm_head"]), (others, ["Linear"]))
        ]
        config = {
            "quant_method": "compressed-tensors", "format": "mixed-precision",
            "ignore": [r"re:.*layers\.0\.self_attn.*"], "config_groups": {"group_0": groups[0], "group_1": groups[1]},
        }  # fmt: skip
    save_file(stored, folder / "model.safetensors")
    text = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | {"quantization_config": config}))
    shutil.move(folder / "second" / "meant", folder / "meant")


@pytest.mark.parametrize(("kind", "method"), [("qwen3_next", "modelopt"), ("glm4_moe", "compressed-tensors")])
def test_of_two_formats_one_is_kept_and_the_other_dequantized(kind: str, method: str, tmp_path: Path) -> None:
    sizes: Any = {"linear_value_head_dim": 16, "moe_intermediate_size": 48} if kind == "qwen3_next" else {}
    plain = make_checkpoint(kind, tmp_path / "plain", **sizes)
    in_two_formats(plain, tmp_path / "stored", method)
    folder = tmp_path / "stored"
    arch = as_stored(arch_from_folder(folder), folder)
    assert arch.weight_format is not None and arch.weight_format.numbers == "float8_e4m3fn"
    assert all(layer.unquantized == layer.matrices & {"experts"} for layer in arch.layers[1:])
    logits = plain_logits(arch, load_params(folder, arch, jnp.dtype("float32"), mesh_of()), TOKENS)
    expected, unquantized = (checkpoint_logits(each, TOKENS) for each in (folder / "meant", plain))
    tokens = np.argsort(np.linalg.norm(logits - expected, axis=-1))[:-1]
    assert np.linalg.norm((logits - expected)[tokens]) < 1e-3 * np.linalg.norm(expected)
    assert np.linalg.norm((logits - unquantized)[tokens]) > 3e-3 * np.linalg.norm(expected)


# Of GPTQ's `dynamic`: an expression, the modules' numbers, and how they are made. The first that fits a module counts.
RULES: list[tuple[str, dict[str, Any], Quantize | None]] = [
    ("+:.*layers\\.2\\.self_attn", {"group_size": 64}, partial(gptq, group=64)),
    ("-:.*self_attn", {}, None),
    (".*layers\\.[01]\\..*down_proj", {"bits": 8, "sym": True}, gptq_8_bits),
    ("+:lm_head", {"bits": 2}, partial(gptq, bits=2)),
]


def test_rules_of_gptqmodel_change_modules_numbers_and_the_first_one_counts(tmp_path: Path) -> None:
    plain = make_checkpoint("seed_oss", tmp_path / "plain", head_dim=16)

    def form_of(tensor: str) -> Quantize | None:
        if re.search(r"embed|norm|bias", tensor):
            return None
        rules = (form for rule, _, form in RULES if re.match(rule.removeprefix("+:").removeprefix("-:"), tensor))
        return next(rules, gptq)

    config = {**FORMATS["gptq"][0], "lm_head": True, "dynamic": {rule: values for rule, values, _ in RULES}}
    folder = quantize_each(plain, tmp_path / "stored", config, form_of)
    arch = as_stored(arch_from_folder(folder), folder)
    assert [layer.unquantized for layer in arch.layers] == [*[{"qkv", "o", "down"}] * 2, {"qkv", "o"}]
    assert [{name for name, _ in layer.stored_in} for layer in arch.layers] == [{"down"}, {"down"}, {"qkv", "o"}]
    logits = plain_logits(arch, load_params(folder, arch, jnp.dtype("float32"), mesh_of()), TOKENS)
    expected, unquantized = (checkpoint_logits(each, TOKENS) for each in (folder / "meant", plain))
    assert np.linalg.norm(logits - expected) < 1e-3 * np.linalg.norm(expected)
    assert np.linalg.norm(logits - unquantized) > 3e-3 * np.linalg.norm(expected)


def test_experts_in_mxfp4_stay_so_where_kernels_take_them(tmp_path: Path) -> None:
    plain = make_checkpoint("qwen3_moe", tmp_path / "plain", moe_intermediate_size=64, intermediate_size=96)
    folder = quantize_folder(plain, tmp_path / "stored", "compressed-tensors mxfp4")
    arch = arch_from_folder(folder)
    assert arch.weight_format is not None
    expected = checkpoint_logits(folder / "meant", TOKENS)
    for packs in (True, False):
        kept = replace(arch, weight_format=arch.weight_format.on_cpu("float32", packs=packs))
        params: Any = load_params(folder, kept, jnp.dtype("float32"), mesh_of())
        down = params["layers"][arch.num_layers - 1]["mlp"]["down"][...]
        assert down.dtype == (jnp.uint8 if packs else jnp.float32) and down.shape[-1] == (32 if packs else 64)
        logits = plain_logits(kept, params, TOKENS)
        assert np.linalg.norm(logits - expected) < 1e-3 * np.linalg.norm(expected)


def test_experts_of_int8_in_groups_stay_so_where_kernels_take_them(tmp_path: Path) -> None:
    if not native_library.multiplies_bytes():
        pytest.skip("the processor has no products of bytes, or there are no kernels")
    plain = make_checkpoint("qwen3_moe", tmp_path / "plain", moe_intermediate_size=64, intermediate_size=96)
    folder = quantize_folder(plain, tmp_path / "stored", "gptq 8 bits")
    arch = arch_from_folder(folder)
    assert arch.weight_format is not None
    expected = checkpoint_logits(folder / "meant", TOKENS)
    for row_bits in (8, 16):
        kept = replace(arch, weight_format=arch.weight_format.on_cpu("float32", row_bits=row_bits, packs=True))
        params: Any = load_params(folder, kept, jnp.dtype("float32"), mesh_of())
        assert params["layers"][0]["mlp"]["down"].dtype == (jnp.uint8 if row_bits == 8 else jnp.float32)
        logits = plain_logits(kept, params, TOKENS)
        assert np.linalg.norm(logits - expected) < {8: 5e-2, 16: 1e-3}[row_bits] * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("kind", "name", "exceptions", "excepted"),
    [
        (
            "qwen3_vl",
            "fp8 in blocks",
            ["model.visual.blocks.0.attn.qkv", "model.visual.merger.linear_fc1", "visual", "lm_head"],
            "visual",
        ),
        ("qwen2_5_vl", "fp8 in blocks", ["visual", "lm_head"], "visual"),
        (
            "glm4v",
            "compressed-tensors fp8 per channel",
            [
                *(f"model.visual.blocks.{i}.{name}" for i in range(4) for name in ("attn.qkv", "attn.proj")),
                *(f"model.visual.blocks.{i}.mlp.{name}_proj" for i in range(4) for name in ("gate", "up", "down")),
                *(f"model.visual.merger.{name}" for name in ("proj", "gate_proj", "up_proj", "down_proj")),
                "lm_head",
            ],
            "visual",
        ),
        ("glm4v_moe", "compressed-tensors fp8 per channel", ["re:.*visual.*", "re:.*mlp.gate$", "lm_head"], "visual"),
        (
            "mistral",
            "fp8 in blocks",
            ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
            "vision_tower|projector",
        ),
        ("mistral", "fp8 in blocks", [], ""),
    ],
)
def test_a_quantized_model_that_sees_images_keeps_its_tower(
    kind: str, name: str, exceptions: list[str], excepted: str, tmp_path: Path
) -> None:
    """As published: the decoder in FP8, each module of the tower an exception. Else it is dequantized."""
    make_model(tmp_path / "plain", kind)
    folder = quantize_folder(tmp_path / "plain", tmp_path / "stored", name, exceptions=exceptions, excepted=excepted)
    found, meant = arch_from_folder(folder), arch_from_folder(folder / "meant")
    assert found.tower == meant.tower and found.weight_format is not None
    assert not any(layer.unquantized for layer in found.layers)
    dtype = jnp.dtype("float32")
    loaded: Any = load_params(folder, found, dtype, mesh_of())
    expected: Any = load_params(folder / "meant", meant, dtype, mesh_of())
    for one, other in zip(matrices(found, loaded), matrices(meant, expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)
    same = np.testing.assert_array_equal if excepted else partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-9)
    jax.tree.map(same, nnx.to_pure_dict(loaded["visual"]), nnx.to_pure_dict(expected["visual"]))


def list_experts(folder: Path, name_of: str) -> None:
    """Replaces the stacks of experts by tensors of their own, by names such as "{kind}_proj.{expert}"."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        stack, block = tensors.pop(name), name.rpartition(".")[0]  # [E, out, in]
        kinds = (
            {"down": stack} if name.endswith("down_proj") else dict(zip(("gate", "up"), stack.chunk(2, 1), strict=True))
        )
        for kind, of_kind in kinds.items():
            for expert, matrix in enumerate(of_kind):
                tensors[f"{block}.{name_of.format(kind=kind, expert=expert)}.weight"] = matrix.contiguous()
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("name_of", ["{kind}_proj.{expert}", "{expert}.{kind}_proj"])
def test_experts_are_served_as_modelopt_lists_them(name_of: str, tmp_path: Path) -> None:
    """Those of Qwen3-VL by kind, then by number."""
    make_model(tmp_path / "plain", "qwen3_vl_moe", moe_intermediate_size=48)
    whole = checkpoint_logits(tmp_path / "plain", TOKENS)
    list_experts(tmp_path / "plain", name_of)
    np.testing.assert_array_equal(checkpoint_logits(tmp_path / "plain", TOKENS), whole)
    form = MODELOPT_FP4 | {"exclude_modules": ["lm_head", "model.visual*", "*.mlp.gate"]}, fp4
    also = r"experts\.(\w+_proj\.\d+|\d+\.\w+_proj)\.weight"
    folder = quantize_folder(tmp_path / "plain", tmp_path / "stored", form, excepted="visual", also=also)
    arch = as_stored(arch_from_folder(folder), folder)
    assert not any("experts" in layer.unquantized for layer in arch.layers)
    logits = plain_logits(arch, load_params(folder, arch, jnp.dtype("float32"), mesh_of()), TOKENS)
    expected = checkpoint_logits(folder / "meant", TOKENS)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert np.abs(logits - whole).max() > 1e-3


def test_matrices_that_are_multiplied_at_once_need_one_order_of_inputs(tmp_path: Path) -> None:
    folder = quantize_folder(make_checkpoint("qwen3", tmp_path / "plain"), tmp_path / "stored", "gptq desc_act")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.g_idx"] = tensors["model.layers.1.self_attn.k_proj.g_idx"].flip(0)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"k_proj.*are multiplied at once, but their g_idx differ"):
        load_params(folder, arch_from_folder(folder), jnp.dtype("float32"), mesh_of())


@pytest.mark.parametrize(
    "name", daily(["compressed-tensors int8", "compressed-tensors fp8 per channel", "fp8 per tensor"], every=3)
)
def test_experts_with_a_scale_per_output_stay_quantized(name: str, tmp_path: Path) -> None:
    folder = quantize_folder(make_checkpoint("qwen3_moe", tmp_path / "plain"), tmp_path / "stored", name)
    arch = arch_from_folder(folder)
    params: Any = load_params(folder, arch, jnp.dtype("float32"), mesh_of())
    experts = params["layers"][arch.num_layers - 1]["mlp"]
    assert experts["gate_up"][...].dtype.itemsize == 1 and experts["gate_up_scale"][...].shape[-1] == 1
    logits, expected = plain_logits(arch, params, TOKENS), checkpoint_logits(folder / "meant", TOKENS)
    assert np.linalg.norm(logits - expected) < 1e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize(("kind", "name"), [("qwen3_moe", "gptq desc_act"), ("glm4_moe", "fp8 in blocks")])
def test_experts_in_groups_are_dequantized_as_they_are_loaded(kind: str, name: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"moe_intermediate_size": 64} if kind == "qwen3_moe" else {}
    plain = make_checkpoint(kind, tmp_path / "plain", **changes)
    folder = quantize_folder(plain, tmp_path / "stored", name)
    dtype = jnp.dtype("float32")
    arch, of_plain = arch_from_folder(folder), arch_from_folder(folder / "meant")
    found = dict(nnx.to_flat_state(load_params(folder, arch, dtype, mesh_of())))
    expected = dict(nnx.to_flat_state(load_params(folder / "meant", of_plain, dtype, mesh_of())))
    num_experts = 0
    for path, param in expected.items():
        if param[...].ndim == {"gate_up": 4, "down": 3}.get(str(path[-1])):
            num_experts += len(param[...])
            np.testing.assert_allclose(found[path][...], param[...], rtol=1e-6, atol=1e-9)
    assert arch.mixture is not None and num_experts >= 2 * arch.mixture.num_experts


# Kinds whose matrices are fused, cut by heads, or turned as they are loaded; sizes that are no multiples of a block.
BLOCK_KINDS = daily(
    (
        "qwen3", "qwen3_moe", "phi3", "deepseek_v3", "qwen3_5", "qwen3_next", "glm4", "glm_moe_dsa", "mimo_v2_flash",
    ),
    every=3,
)  # fmt: skip


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_outputs_that_are_said_to_share_scales_do(kind: str, tmp_path: Path) -> None:
    plain = make_checkpoint(kind, tmp_path / "plain")
    form: Any = {"quant_method": "fp8", "weight_block_size": [32, 48]}, partial(fp8_blocks, block=(32, 48))
    folder = quantize_folder(
        plain, tmp_path / "stored", form, excepted=r"in_proj_(ba|a|b)\.|weights_proj", also=r"indexer\.w(k|q_b)\."
    )
    arch = arch_from_folder(folder)
    params = load_params(folder, arch, jnp.dtype("float32"), mesh_of())
    graphdef, _ = abstract_model(arch, jnp.dtype("float32"))
    found = set()
    for _, module in nnx.iter_graph(nnx.merge(graphdef, params)):
        for name in [each for each in vars(module) if each.endswith("_scale")] if isinstance(module, Matrices) else ():
            matrix: Any = module.matrix(name.removesuffix("_scale"))
            scale = np.asarray(matrix.scale)
            runs = scale.reshape(*scale.shape[:-2], -1, matrix.block_outputs, scale.shape[-1])
            assert (runs == runs[..., :1, :]).all(), name
            found.add(matrix.block_outputs)
    assert max(found) >= 8, "some outputs share scales"
