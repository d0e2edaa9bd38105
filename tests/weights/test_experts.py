"""Experts load alike from every layout of their tensors, and what can't be told apart is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from ml_dtypes import float8_e4m3fn
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from jaxsgl.engine.weight_formats import as_kept
from jaxsgl.errors import CheckpointError
from jaxsgl.models import ModelArch, abstract_model, arch_from_folder
from jaxsgl.models.layer_spec import MoeMlp
from jaxsgl.models.matrix import part_name
from jaxsgl.models.quantization import FORMATS_AT_LOAD
from jaxsgl.weights import as_stored, load_params, save_converted
from pallas_kernels.packed import FLOAT8, FRAGMENTS, MXFP4, MXFP4_FRAGMENTS, PackedMatrix
from tests.checkpoints import load_reference, make_checkpoint
from tests.plain_model import checkpoint_logits, mesh_of, plain_logits
from tests.weights.stored_weights import FORMATS, fp4, fp8_blocks, quantize_folder

FILE = "model.safetensors"


def parameters(folder: Path) -> dict[tuple, np.ndarray]:
    arch = as_stored(arch_from_folder(folder), folder)
    params = load_params(folder, arch, jnp.dtype("float32"), mesh_of())
    return {path: np.asarray(param[...]) for path, param in nnx.to_flat_state(params)}


def stack_in_fp8(folder: Path, turn: Callable[[torch.Tensor], torch.Tensor], scale: str) -> None:
    """Replaces the experts' numbers and their scales by stacks of all of a layer, as Qwen3-VL's are published."""
    tensors = load_file(folder / FILE)
    blocks = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for block in blocks:
        for part, name in (("weight", ""), (scale, scale.removeprefix("weight"))):
            each = [f"{block}.experts.{e}." for e in range(10)]
            gates, ups, downs = (
                [tensors.pop(f"{expert}{kind}_proj.{part}") for expert in each] for kind in ("gate", "up", "down")
            )
            pairs = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
            tensors[f"{block}.experts.gate_up_proj{name}"] = turn(torch.stack(pairs)).contiguous()
            tensors[f"{block}.experts.down_proj{name}"] = turn(torch.stack(downs)).contiguous()
    save_file(tensors, folder / FILE)


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
def test_stacks_in_fp8_are_their_experts_one_by_one(layout: str, tmp_path: Path) -> None:
    """Dequantized, and kept as published where a CPU's kernels multiply them."""
    form = FORMATS["fp8 in blocks"][0] | {"weight_block_size": [64, 64]}, partial(fp8_blocks, block=(64, 64))
    sizes: Any = {"moe_intermediate_size": 64}
    folder = quantize_folder(make_checkpoint("qwen3_moe", tmp_path / "plain", **sizes), tmp_path / "stored", form)

    def both() -> dict[tuple, np.ndarray]:
        arch = arch_from_folder(folder)
        assert arch.weight_format is not None
        kept = replace(arch, weight_format=arch.weight_format.on_cpu("float32", packs=True))
        params = load_params(folder, kept, jnp.dtype("float32"), mesh_of())
        formats = {path: param.get_metadata().get("format") for path, param in nnx.to_flat_state(params)}
        assert formats["layers", 0, "mlp", "gate_up"].packing == formats["layers", 0, "mlp", "down"].packing == FLOAT8
        found = {("kept", *path): np.asarray(param[...]) for path, param in nnx.to_flat_state(params)}
        return {**parameters(folder), **found}

    expected = both()
    stack_in_fp8(folder, (lambda x: x.mT) if layout == "in_out" else (lambda x: x), "weight_scale_inv")
    found = both()
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg=str(path))


def test_llama_4_in_fp8_loads_from_single_experts_and_from_stacks(tmp_path: Path) -> None:
    """With a scale for each output, next to a tower, and with exceptions that name modules of the whole model."""
    plain = make_checkpoint("llama4", tmp_path / "plain")
    tensors = load_file(plain / FILE)
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
        block = name.removesuffix("gate_up_proj")
        for e, (both, down) in enumerate(zip(tensors.pop(name), tensors.pop(f"{block}down_proj"), strict=True)):
            for kind, matrix in zip(("gate", "up", "down"), (*both.chunk(2, dim=1), down), strict=True):
                tensors[f"{block}{e}.{kind}_proj.weight"] = matrix.T.contiguous()
    save_file(tensors, plain / FILE)
    excepted = [name.removesuffix(".weight") for name in tensors if re.search(r"(router|_attn\.._proj)\.weight", name)]
    form = "compressed-tensors fp8 per channel"
    folder = quantize_folder(plain, tmp_path / "stored", form, excepted=r"router|self_attn")
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    quantization["ignore"] = [f"language_model.{name}" for name in ("lm_head", *excepted)] + ["vision_model.fc"]
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": config, "vision_config": {"depth": 1}}
    (folder / "config.json").write_text(json.dumps({**whole, "quantization_config": quantization}))
    stored = {f"language_model.{name}": tensor for name, tensor in load_file(folder / FILE).items()}
    save_file({**stored, "vision_model.fc.weight": torch.zeros(3, 3)}, folder / FILE)
    prompt = list(range(3, 40))
    np.testing.assert_allclose(
        checkpoint_logits(folder, prompt), checkpoint_logits(folder / "meant", prompt), atol=1e-4
    )
    single = parameters(folder)
    stack_in_fp8(folder, lambda x: x.mT, "weight_scale")
    stacked = parameters(folder)
    assert single.keys() == stacked.keys() and single["layers", 1, "mlp", "gate_up"].dtype == np.dtype(float8_e4m3fn)
    for path, array in single.items():
        np.testing.assert_array_equal(stacked[path], array, err_msg=str(path))


@pytest.mark.parametrize("form", ["compressed-tensors int4", "awq", "fp8 in blocks"])
@pytest.mark.parametrize("layout", ["stacked", "single"])
def test_experts_that_are_not_quantized_need_no_exception(form: str, layout: str, tmp_path: Path) -> None:
    """Software that quantizes modules leaves stacks alone, and names only modules."""
    plain = make_checkpoint("qwen3_moe", tmp_path / "plain")
    excepted = quantize_folder(plain, tmp_path / "told", form, excepted="experts", exceptions=["mlp.experts"])
    folder = quantize_folder(plain, tmp_path / "untold", form, excepted="experts")
    if layout == "stacked":
        stack(folder, lambda x: x)
    arch = as_stored(arch_from_folder(folder), folder)
    assert arch == arch_from_folder(excepted) == as_stored(arch, folder)
    expected = parameters(excepted)
    for path, param in nnx.to_flat_state(load_params(folder, arch, jnp.dtype("float32"), mesh_of())):
        np.testing.assert_array_equal(np.asarray(param[...]), expected[path], err_msg=str(path))


@pytest.mark.parametrize("form", ["gptq", "awq", "compressed-tensors int8"])
def test_matrices_that_are_not_quantized_need_no_exception(form: str, tmp_path: Path) -> None:
    """Software for GPTQ and AWQ leaves out modules that it doesn't know, without a word."""
    plain, left = make_checkpoint("qwen3_5", tmp_path / "plain", head_dim=32), r"in_proj_(qkv|z|a|b)\.|self_attn"
    folder = quantize_folder(plain, tmp_path / "untold", form, excepted=left)
    arch = as_stored(arch_from_folder(folder), folder)
    assert [sorted(layer.unquantized) for layer in arch.layers] == [["state_inputs"]] * 3 + [["o", "qkv"]]
    found, expected = parameters(folder), parameters(folder / "meant")
    for path in (("layers", 0, "delta_net", "inputs"), ("layers", 3, "attention", "qkv")):
        np.testing.assert_array_equal(found[path], expected[path], err_msg=str(path))
    save_converted(folder, tmp_path / "again", load_params(folder, arch, jnp.dtype("float32"), mesh_of()))
    again = as_stored(arch_from_folder(tmp_path / "again"), tmp_path / "again")
    assert replace(again, next_layer=None) == replace(arch, next_layer=None)  # which converted folders lack


@pytest.mark.parametrize("form", ["compressed-tensors int4", "compressed-tensors int8"])
def test_a_converted_folder_tells_as_the_original_does(form: str, tmp_path: Path) -> None:
    plain = make_checkpoint("qwen3_moe", tmp_path / "plain")
    for excepted in ("", "experts"):
        folder = quantize_folder(plain, tmp_path / f"original{excepted}", form, excepted=excepted)
        arch = as_stored(arch_from_folder(folder), folder)
        converted = tmp_path / f"converted{excepted}"
        save_converted(folder, converted, load_params(folder, arch, jnp.dtype("float32"), mesh_of()))
        told = as_stored(arch_from_folder(converted), converted)
        assert told == arch or (excepted and "int4" in form)  # whose experts are dequantized in any case
        restored, expected = parameters(converted), parameters(folder)
        assert all(np.array_equal(restored[path], array) for path, array in expected.items())


@pytest.mark.parametrize("form", ["compressed-tensors int4", "compressed-tensors int8"])
def test_stacks_may_be_called_as_modules_are(form: str, tmp_path: Path) -> None:
    sizes: Any = {"moe_intermediate_size": 64}
    folder = quantize_folder(make_checkpoint("qwen3_moe", tmp_path / "plain", **sizes), tmp_path / "stored", form)
    expected, tensors = parameters(folder), load_file(folder / FILE)
    for block in {name.split(".experts.")[0] for name in tensors if ".mlp.experts." in name}:
        for part in {name.rpartition(".")[2] for name in tensors if f"{block}.experts.0.down" in name}:
            gates, ups, downs = (
                [tensors.pop(f"{block}.experts.{e}.{kind}_proj.{part}") for e in range(10)]
                for kind in ("gate", "up", "down")
            )
            pairs = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
            tensors[f"{block}.experts.gate_up_proj.{part}"] = torch.stack(pairs)
            tensors[f"{block}.experts.down_proj.{part}"] = torch.stack(downs)
    save_file(tensors, folder / FILE)
    found = parameters(folder)
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg=str(path))


def in_fp4(plain: Path, folder: Path, *, is_in_out: bool, has_one_scale: bool) -> None:
    """Writes the stacks of experts of `plain` in NVFP4, as ModelOpt does, to `folder`; what they mean to its `meant`.

    All experts of a stack have one scale of scales, or each has its own.
    """
    rng, stored, meant = np.random.default_rng(0), {}, {}
    for name, tensor in load_file(plain / FILE).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = meant[name] = tensor
            continue
        stack = (tensor.mT if is_in_out else tensor).float().numpy()  # [E, out, in]
        if has_one_scale:
            whole, values = fp4(stack.reshape(-1, stack.shape[-1]), rng)
            parts = {part: x.reshape(*stack.shape[:2], -1) if x.ndim else x for part, x in whole.items()}
        else:
            each, of_each = zip(*(fp4(matrix, rng) for matrix in stack), strict=True)
            parts, values = {part: torch.stack([one[part] for one in each]) for part in each[0]}, np.stack(of_each)
        weights = torch.from_numpy(np.ascontiguousarray(values.reshape(stack.shape), np.float32))
        meant[name] = (weights.mT if is_in_out else weights).contiguous()
        for part, x in parts.items():
            stored[name if part == "weight" else f"{name}_{part}"] = x.mT.contiguous() if is_in_out and x.ndim else x
    config = json.loads((plain / "config.json").read_text())
    fmt = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*attn*", "*shared_expert*", "lm_head"]}
    for place, tensors, added in ((folder, stored, {"quantization_config": fmt}), (folder / "meant", meant, {})):
        place.mkdir(parents=True)
        save_file(tensors, place / FILE)
        (place / "config.json").write_text(json.dumps(config | added))


@pytest.mark.parametrize(("kind", "is_in_out"), [("gpt_oss", True), ("qwen3_5_moe", False)])
def test_stacks_in_nvfp4_are_dequantized(kind: str, is_in_out: bool, tmp_path: Path) -> None:
    """As ModelOpt writes those of gpt-oss, with gates and ups in turns, and of Qwen3.5."""
    plain = tmp_path / "plain"
    sizes: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 48} if not is_in_out else {}
    make_checkpoint(kind, plain, **sizes)
    in_fp4(plain, tmp_path / "stored", is_in_out=is_in_out, has_one_scale=is_in_out)
    found, expected = parameters(tmp_path / "stored"), parameters(tmp_path / "stored" / "meant")
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_allclose(found[path], array, rtol=1e-6, atol=1e-9, err_msg=str(path))


def test_quantized_experts_stay_quantized_whatever_their_layout(tmp_path: Path) -> None:
    plain = make_checkpoint("qwen3_moe", tmp_path / "plain")
    for form in ("compressed-tensors int4", "awq", "fp8 in blocks", "fp8 per tensor"):
        folder = quantize_folder(plain, tmp_path / form, form)
        arch = arch_from_folder(folder)
        assert as_stored(arch, folder) == arch
    stack_in_fp8(tmp_path / "fp8 in blocks", lambda x: x, "weight_scale_inv")
    arch = arch_from_folder(tmp_path / "fp8 in blocks")
    assert as_stored(arch, tmp_path / "fp8 in blocks") == arch


def test_a_stack_that_is_quantized_in_part_is_refused_by_name(tmp_path: Path) -> None:
    folder = quantize_folder(make_checkpoint("qwen3_moe", tmp_path / "plain"), tmp_path / "stored", "fp8 in blocks")
    stack_in_fp8(folder, lambda x: x, "weight_scale_inv")
    tensors = load_file(folder / FILE)
    del tensors["model.layers.0.mlp.experts.down_proj_scale_inv"]
    save_file(tensors, folder / FILE)
    with pytest.raises(CheckpointError, match=r"layers\.0.*down_proj is a stack of experts.*must except it"):
        parameters(folder)


def stack(folder: Path, turn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replaces the experts' tensors by stacks of all of a layer."""
    tensors = load_file(folder / FILE)
    experts = {name: tensors.pop(name) for name in list(tensors) if ".mlp.experts." in name}
    blocks = {name.split(".experts.")[0] for name in experts}
    for block in blocks:
        each = [f"{block}.experts.{e}." for e in range(len([n for n in experts if n.startswith(f"{block}.")]) // 3)]
        gate_up = [torch.cat([experts[e + "gate_proj.weight"], experts[e + "up_proj.weight"]]) for e in each]
        tensors[f"{block}.experts.gate_up_proj"] = turn(torch.stack(gate_up)).contiguous()
        tensors[f"{block}.experts.down_proj"] = turn(
            torch.stack([experts[e + "down_proj.weight"] for e in each])
        ).contiguous()
    save_file(tensors, folder / FILE)


@pytest.mark.parametrize("ffn_size", [48, 64])  # with 64, a stack of gates and ups is square
def test_stacked_experts_load_in_both_layouts_as_single_ones_do(ffn_size: int, tmp_path: Path) -> None:
    sizes: Any = {"moe_intermediate_size": ffn_size}
    expected = parameters(make_checkpoint("qwen3_moe", tmp_path / "single", **sizes))
    gate_up = load_file(tmp_path / "single" / FILE)["model.layers.2.mlp.experts.7.up_proj.weight"].numpy()
    np.testing.assert_array_equal(expected["layers", 2, "mlp", "gate_up"][7, 1], gate_up)
    for layout, turn in {"out_in": lambda x: x, "in_out": lambda x: x.swapaxes(1, 2)}.items():
        folder = make_checkpoint("qwen3_moe", tmp_path / layout, **sizes)
        stack(folder, turn)
        found = parameters(folder)
        assert found.keys() == expected.keys()
        for path, array in expected.items():
            np.testing.assert_array_equal(found[path], array, err_msg=str(path))


@pytest.mark.parametrize("kind", ["mixtral", "minimax_m2", "ernie4_5_moe"])
def test_experts_load_by_the_names_that_transformers_has_in_memory(kind: str, tmp_path: Path) -> None:
    """So trainers hand them over, and so folders are saved with `save_original_format=False`."""
    published = make_checkpoint(kind, tmp_path / "published")
    load_reference(published).save_pretrained(tmp_path / "own", save_original_format=False)
    assert load_file(published / FILE).keys() != load_file(tmp_path / "own" / FILE).keys()
    expected, found = parameters(published), parameters(tmp_path / "own")
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg=str(path))


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint("mixtral", tmp_path)
    tensors = load_file(folder / FILE)
    missing = "model.layers.1.block_sparse_moe.experts.4.w2.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != missing}, folder / FILE)
    with pytest.raises(CheckpointError, match=f"tensor {missing} is missing"):
        parameters(folder)


def test_layers_that_predict_further_tokens_are_left_out_where_the_family_has_them(tmp_path: Path) -> None:
    for kind, is_known in (("glm4_moe", True), ("qwen3_moe", False)):
        folder = make_checkpoint(kind, tmp_path / kind)
        tensors = load_file(folder / FILE)
        layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        save_file({**tensors, f"model.layers.{layers}.eh_proj.weight": torch.zeros(3)}, folder / FILE)
        if is_known:
            parameters(folder)
        else:
            with pytest.raises(CheckpointError, match=f"layers.{layers}.eh_proj"):
                parameters(folder)


def pack(folder: Path, seed: int) -> None:
    """Replaces the experts' tensors by random ones in MXFP4, as gpt-oss is published."""
    rng = np.random.default_rng(seed)
    tensors = load_file(folder / FILE)
    for name in [name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))]:
        num_experts, num_in, out = tensors.pop(name).shape
        scales = rng.integers(118, 124, (num_experts, out, num_in // 32), np.uint8)
        tensors[name + "_blocks"] = torch.tensor(rng.integers(0, 256, (*scales.shape, 16), np.uint8))
        tensors[name + "_scales"] = torch.tensor(scales)
    save_file(tensors, folder / FILE)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))


def test_experts_in_mxfp4_are_decoded(tmp_path: Path) -> None:
    folder = make_checkpoint("gpt_oss", tmp_path, intermediate_size=64)
    pack(folder, seed=1)
    tensors, found = load_file(folder / FILE), parameters(folder)
    for layer in range(3):
        experts = f"model.layers.{layer}.mlp.experts."
        expected = {
            kind: convert_moe_packed_tensors(tensors[experts + kind + "_blocks"], tensors[experts + kind + "_scales"])
            for kind in ("gate_up_proj", "down_proj")
        }  # [E, in, out]
        gate_up, down = (expected[kind].swapaxes(1, 2).float().numpy() for kind in ("gate_up_proj", "down_proj"))
        np.testing.assert_array_equal(found["layers", layer, "mlp", "down"], down)
        in_halves = np.stack([gate_up[:, ::2], gate_up[:, 1::2]], axis=1)
        np.testing.assert_array_equal(found["layers", layer, "mlp", "gate_up"], in_halves)


def test_a_cpu_keeps_experts_in_mxfp4_as_they_are_published(tmp_path: Path) -> None:
    folder = make_checkpoint("gpt_oss", tmp_path, intermediate_size=64)
    pack(folder, seed=1)
    arch = arch_from_folder(folder)
    assert arch.expert_format is not None
    arch = replace(arch, expert_format=arch.expert_format.on_cpu("float32", packs=True))
    params: Any = load_params(folder, arch, jnp.dtype("float32"), mesh_of())
    decoded, tensors = parameters(folder), load_file(folder / FILE)
    for layer in range(3):
        mlp = params["layers"][layer]["mlp"]
        for name, tensor in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
            numbers, scale = mlp[name][...], mlp[f"{name}_scale"][...]
            stored = [
                tensors[f"model.layers.{layer}.mlp.experts.{tensor}_{part}"].numel() for part in ("blocks", "scales")
            ]
            assert [numbers.nbytes, scale.nbytes] == stored
            widened = PackedMatrix(numbers, scale, None, 32, MXFP4).widened("float32")
            np.testing.assert_array_equal(widened, decoded["layers", layer, "mlp", name])
    logits = plain_logits(arch, params, list(range(3, 40)))
    np.testing.assert_array_equal(logits, checkpoint_logits(folder, list(range(3, 40))))


def kept_on_gpus(folder: Path, parts: int = 1) -> ModelArch:
    """As on so many GPUs, but with products in float32."""
    arch = as_kept(arch_from_folder(folder), jnp.dtype("bfloat16"), "gpu", parts)
    formats = (arch.weight_format, arch.expert_format)
    weights, experts = (None if fmt is None else replace(fmt, widened_to="float32") for fmt in formats)
    return replace(arch, weight_format=weights, expert_format=experts)


def part_names(matrix: str) -> tuple[str, str, str]:
    return matrix, part_name(matrix, "scale"), part_name(matrix, "zero")


def packings_of_experts(params: Any) -> set[str]:
    found, flat = set(), dict(nnx.to_flat_state(params))
    for path, param in flat.items():
        if path[2:] in (("mlp", "gate_up"), ("mlp", "down")) and (*path[:3], "router") in flat:
            fmt = param.get_metadata().get("format")
            found.add("" if fmt is None else fmt.packing)
    return found


def test_a_gpu_keeps_experts_in_mxfp4_as_4_bits(tmp_path: Path) -> None:
    folder = make_checkpoint("gpt_oss", tmp_path, intermediate_size=64)
    pack(folder, seed=1)
    arch = kept_on_gpus(folder)
    params: Any = load_params(folder, arch, jnp.dtype("float32"), mesh_of())
    assert packings_of_experts(params) == {MXFP4_FRAGMENTS}
    decoded, tensors = parameters(folder), load_file(folder / FILE)
    for layer in range(3):
        mlp = params["layers"][layer]["mlp"]
        for name in ("gate_up", "down"):
            numbers, scale = mlp[name][...], mlp[f"{name}_scale"][...]
            stored = tensors[f"model.layers.{layer}.mlp.experts.{name}_proj_blocks"].numel()
            assert [numbers.nbytes, scale.nbytes] == [stored, stored // 8]
            widened = PackedMatrix(numbers, scale, None, 32, MXFP4_FRAGMENTS).widened("float32")
            np.testing.assert_array_equal(widened, decoded["layers", layer, "mlp", name])
    logits, expected = plain_logits(arch, params, list(range(3, 40))), checkpoint_logits(folder, list(range(3, 40)))
    assert np.linalg.norm(logits - expected) < 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("form", ["awq", "compressed-tensors mxfp4"])
def test_a_gpu_keeps_experts_of_groups_as_4_bits(form: str, tmp_path: Path) -> None:
    sizes: Any = {"moe_intermediate_size": 64, "intermediate_size": 128}
    folder = quantize_folder(make_checkpoint("qwen3_moe", tmp_path / "plain", **sizes), tmp_path / "stored", form)
    arch = kept_on_gpus(folder)
    params = load_params(folder, arch, jnp.dtype("float32"), mesh_of())
    assert packings_of_experts(params) == {FRAGMENTS if form == "awq" else MXFP4_FRAGMENTS}
    logits, expected = (
        plain_logits(arch, params, list(range(3, 40))),
        checkpoint_logits(folder / "meant", list(range(3, 40))),
    )
    assert np.linalg.norm(logits - expected) < 1e-3 * np.linalg.norm(expected)


def test_gpus_widen_experts_that_they_cannot_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each would have half a block of inputs."""
    folder = make_checkpoint("gpt_oss", tmp_path, intermediate_size=64)
    pack(folder, seed=1)
    params = load_params(folder, kept_on_gpus(folder, parts=2), jnp.dtype("float32"), mesh_of())
    assert packings_of_experts(params) == {""}
    assert "with --ep each device has whole experts" in caplog.text
    expected = parameters(folder)
    for path, param in nnx.to_flat_state(params):
        np.testing.assert_array_equal(np.asarray(param[...]), expected[path], err_msg=str(path))
    by_experts = replace(kept_on_gpus(folder, parts=2), by_experts=True)
    assert packings_of_experts(abstract_model(by_experts, jnp.dtype("float32"))[1]) == {MXFP4_FRAGMENTS}


@pytest.mark.parametrize("form", ["gpt-oss", "awq", "compressed-tensors mxfp4"])
def test_gpus_add_units_of_zeros_where_their_parts_of_experts_would_cut_groups(form: str, tmp_path: Path) -> None:
    """Two have 64 units each in the place of 48, and the second one's last 32 are zeros."""
    if form == "gpt-oss":
        folder = original = make_checkpoint("gpt_oss", tmp_path, intermediate_size=96)
        pack(folder, seed=1)
    else:
        plain = make_checkpoint("qwen3_moe", tmp_path / "plain", moe_intermediate_size=96, intermediate_size=128)
        folder = quantize_folder(plain, tmp_path / "stored", form)
        original = folder / "meant"
    arch = kept_on_gpus(folder, parts=2)
    assert arch.mixture is not None
    assert (arch.mixture.ffn_size, arch.mixture.num_units) == (96, 128)
    params: Any = load_params(folder, arch, jnp.dtype("float32"), mesh_of())
    assert packings_of_experts(params) == {FRAGMENTS if form == "awq" else MXFP4_FRAGMENTS}
    layer = next(i for i, spec in enumerate(arch.layers) if isinstance(spec.mlp, MoeMlp))
    whole, mlp = parameters(original), params["layers"][layer]["mlp"]
    for name in ("gate_up", "down"):
        parts: Any = (mlp[part][...] if part in mlp else None for part in part_names(name))
        numbers, scale, zero = parts
        matrix = PackedMatrix(numbers, scale, zero, 32, packings_of_experts(params).pop())
        widened = np.asarray(matrix.widened("float32"))  # [E, 2, F, D], [E, D, F]
        assert widened.shape[2] == 128 and not widened[:, :, 96:].any()
        np.testing.assert_allclose(widened[:, :, :96], whole["layers", layer, "mlp", name], rtol=1e-5, atol=1e-7)
    logits, expected = plain_logits(arch, params, list(range(3, 40))), checkpoint_logits(original, list(range(3, 40)))
    assert np.linalg.norm(logits - expected) < 1e-3 * np.linalg.norm(expected)


def test_scales_that_a_gpu_cannot_keep_are_named(tmp_path: Path) -> None:
    folder = make_checkpoint("gpt_oss", tmp_path, intermediate_size=64)
    pack(folder, seed=1)
    tensors = load_file(folder / FILE)
    tensors["model.layers.1.mlp.experts.down_proj_scales"][0, 3, 1] = 161
    save_file(tensors, folder / FILE)
    parameters(folder)
    with pytest.raises(CheckpointError, match=r"layers\.1\..*a scale is 2 \*\* 34.* largest here is 2 \*\* 33"):
        load_params(folder, kept_on_gpus(folder), jnp.dtype("float32"), mesh_of())


def test_experts_in_mxfp4_may_be_quantized_again_at_load(tmp_path: Path) -> None:
    folder = make_checkpoint("gpt_oss", tmp_path, intermediate_size=64)
    pack(folder, seed=1)
    arch = replace(arch_from_folder(folder), weight_format=FORMATS_AT_LOAD["int8"])
    params = load_params(folder, arch, jnp.dtype("bfloat16"), mesh_of())
    decoded = parameters(folder)["layers", 1, "mlp", "down"]
    mlp: Any = params["layers"][1]["mlp"]
    found = np.asarray(mlp["down"][...], np.float32) * np.asarray(mlp["down_scale"][...])
    assert (np.abs(found - decoded) <= np.abs(decoded).max(-1, keepdims=True) / 253).all()


def test_experts_in_mxfp4_of_another_size_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("gpt_oss", tmp_path, intermediate_size=64)
    pack(folder, seed=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    with pytest.raises(CheckpointError, match=r"experts\.\w+ in MXFP4 has shape .* asks for"):
        parameters(folder)
