"""Checkpoints quantized in every format, packed here number by number as each format's software stores them."""
# ruff: noqa: E501 - a line per format

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint

Tensors = dict[str, torch.Tensor]
Quantize = Callable[[np.ndarray, np.random.Generator], tuple[Tensors, np.ndarray]]

GROUP = 32
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def words_along(values: np.ndarray, axis: int, bits: int = 4, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Numbers packed into int32 along `axis`, one after the other from the lowest bits of a word on.

    Of 3 bits, some begin in a word and end in the next one. With an `order` the n-th of eight is that of place
    `order[n]`.
    """
    moved = np.moveaxis(values.astype(np.uint64), axis, -1)
    if order is not None:
        moved = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, -moved.shape[-1] % len(order))])
        moved = moved.reshape(*moved.shape[:-1], -1, len(order))[..., order].reshape(moved.shape)
    ones = (moved[..., None] >> np.arange(bits, dtype=np.uint64) & np.uint64(1)).reshape(*moved.shape[:-1], -1)
    ones = np.pad(ones, [(0, 0)] * (ones.ndim - 1) + [(0, -ones.shape[-1] % 32)])
    words = ones.reshape(*ones.shape[:-1], -1, 32) << np.arange(32, dtype=np.uint64)
    packed = words.sum(-1)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed, -1, axis).astype(np.uint32).view(np.int32)))


def _groups(num_in: int, group: int = GROUP) -> np.ndarray:
    return np.arange(num_in) // group


def _scales(weights: np.ndarray, groups: np.ndarray, levels: float) -> np.ndarray:
    """`[out, G]`, rounded to float16 as checkpoints keep them."""
    largest = np.stack([np.abs(weights[:, groups == g]).max(1) for g in range(groups.max() + 1)], 1)
    return (largest / levels).astype(np.float16).astype(np.float32)


def _float8(values: np.ndarray) -> np.ndarray:
    return values.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)


def _torch8(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.view(np.uint8).copy()).view(torch.float8_e4m3fn)


def fp8_blocks(
    weights: np.ndarray, rng: np.random.Generator, block: tuple[int, int] = (40, 48)
) -> tuple[Tensors, np.ndarray]:
    """Blocks of so many outputs by so many inputs, cut at the edges."""
    out, num_in = weights.shape
    rows, columns = block
    scale = rng.uniform(0.002, 0.01, (-(-out // rows), -(-num_in // columns))).astype(np.float32)
    full = np.repeat(np.repeat(scale, rows, 0)[:out], columns, 1)[:, :num_in]
    numbers = _float8(weights / full)
    tensors = {"weight": _torch8(numbers), "weight_scale_inv": torch.from_numpy(scale)}
    return tensors, numbers.astype(np.float32) * full


def fp8_tensor(weights: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """One scale, and a static one of the inputs, which W8A16 does not use."""
    scale = np.float32(np.abs(weights).max() / 400)
    numbers = _float8(weights / scale)
    tensors = {"weight": _torch8(numbers), "weight_scale": torch.tensor([scale]), "input_scale": torch.tensor([0.5])}
    return tensors, numbers.astype(np.float32) * scale


def fp8_static(weights: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """The same as transformers stores it, and Mistral publishes."""
    tensors, meant = fp8_tensor(weights, rng)
    scale, of_inputs = tensors["weight_scale"].reshape(()), tensors["input_scale"]
    return {"weight": tensors["weight"], "weight_scale_inv": scale, "activation_scale": of_inputs}, meant


def fp8_channels(weights: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """One scale per output, in bfloat16."""
    scale = (np.abs(weights).max(1, keepdims=True) / 400).astype(ml_dtypes.bfloat16).astype(np.float32)
    numbers = _float8(weights / scale)
    tensors = {"weight": _torch8(numbers), "weight_scale": torch.from_numpy(scale).bfloat16()}
    return tensors, numbers.astype(np.float32) * scale


def int8_channels(weights: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    scale = (np.abs(weights).max(1, keepdims=True) / 127).astype(np.float32)
    numbers = np.rint(weights / scale).astype(np.int8)
    return {"weight": torch.from_numpy(numbers), "weight_scale": torch.from_numpy(scale)}, numbers * scale


def _asymmetric(
    weights: np.ndarray, rng: np.random.Generator, groups: np.ndarray, bits: int = 4
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Numbers 0 .. 15, offsets 0 .. 15 and scales `[out, G]`, and the weights that they mean."""
    scale = _scales(weights, groups, 6 * 2**bits / 16)
    zeros = rng.integers(0, 2**bits, scale.shape)
    numbers = (np.rint(weights / scale[:, groups]) + zeros[:, groups]).clip(0, 2**bits - 1)
    return numbers, zeros, scale, (numbers - zeros[:, groups]) * scale[:, groups]


def awq(weights: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    numbers, zeros, scale, meant = _asymmetric(weights, rng, _groups(weights.shape[1]))
    tensors = {
        "qweight": words_along(numbers.T, 1, order=AWQ_COLUMNS),
        "qzeros": words_along(zeros.T, 1, order=AWQ_COLUMNS),
        "scales": torch.from_numpy(np.ascontiguousarray(scale.T)).half(),
    }
    return tensors, meant


def gptq(
    weights: np.ndarray, rng: np.random.Generator, *, desc_act: bool = False, bits: int = 4, group: int = GROUP,
    one_less: bool = True,
) -> tuple[Tensors, np.ndarray]:  # fmt: skip
    """Offsets are stored less one; with `desc_act`, inputs belong to groups in a random order, alike in all matrices."""
    groups = _groups(weights.shape[1], group)
    if desc_act:
        groups = np.random.default_rng(weights.shape[1]).permutation(groups)
    numbers, zeros, scale, meant = _asymmetric(weights, rng, groups, bits)
    tensors = {
        "qweight": words_along(numbers.T, 0, bits),
        "qzeros": words_along((zeros.T - one_less) % 2**bits, 1, bits),
        "scales": torch.from_numpy(np.ascontiguousarray(scale.T)).half(),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return tensors, meant


def gptq_8_bits(weights: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    groups = _groups(weights.shape[1])
    scale = _scales(weights, groups, 127)
    numbers = np.rint(weights / scale[:, groups]).clip(-128, 127) + 128
    tensors = {
        "qweight": words_along(numbers.T, 0, bits=8),
        "qzeros": words_along(np.full(scale.T.shape, 127), 1, bits=8),
        "scales": torch.from_numpy(np.ascontiguousarray(scale.T)).half(),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return tensors, (numbers - 128) * scale[:, groups]


def packed_int4(weights: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    groups = _groups(weights.shape[1])
    scale = _scales(weights, groups, 7)
    numbers = np.rint(weights / scale[:, groups]).clip(-8, 7)
    tensors = {
        "weight_packed": words_along(numbers + 8, 1),
        "weight_scale": torch.from_numpy(scale).half(),
        "weight_shape": torch.tensor(weights.shape),
    }
    return tensors, numbers * scale[:, groups]


def packed_int4_asymmetric(weights: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    numbers, zeros, scale, meant = _asymmetric(weights, rng, _groups(weights.shape[1]))
    tensors = {
        "weight_packed": words_along(numbers, 1),
        "weight_scale": torch.from_numpy(scale).half(),
        "weight_zero_point": words_along(zeros, 0),
        "weight_shape": torch.tensor(weights.shape),
    }
    return tensors, meant


def fp4(weights: np.ndarray, rng: np.random.Generator, *, is_modelopt: bool = True) -> tuple[Tensors, np.ndarray]:
    """Groups of 16 with scales of float8, which have one scale of their own; or its reciprocal."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    groups = weights.reshape(len(weights), -1, 16)
    whole = np.float32(np.abs(weights).max() / (6 * 448))
    scale = (np.abs(groups).max(-1) / 6 / whole).clip(2**-6, 448).astype(ml_dtypes.float8_e4m3fn)
    full = scale.astype(np.float32)[..., None] * whole
    codes = np.abs(np.abs(groups / full)[..., None] - values).argmin(-1)
    signs = groups < 0
    nibbles = (codes + 8 * signs).astype(np.uint8).reshape(len(weights), -1)
    packed = torch.from_numpy(nibbles[:, ::2] | (nibbles[:, 1::2] << 4))
    meant = (values[codes] * np.where(signs, -1, 1) * full).reshape(weights.shape)
    if is_modelopt:
        tensors = {"weight": packed, "weight_scale_2": torch.tensor(whole), "input_scale": torch.tensor(0.01)}
    else:
        inverse = torch.tensor([1 / whole])
        tensors = {"weight_packed": packed, "weight_global_scale": inverse, "input_global_scale": torch.tensor([9.0])}
    return {**tensors, "weight_scale": _torch8(scale)}, meant


def mxfp4(weights: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """Groups of 32 with powers of two, of which the largest number is at most 6 times one."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    groups = weights.reshape(len(weights), -1, 32)
    exponents = np.ceil(np.log2(np.abs(groups).max(-1) / 6)).astype(np.int32)
    full = np.ldexp(np.float32(1), exponents)[..., None]
    codes = np.abs(np.abs(groups / full)[..., None] - values).argmin(-1)
    signs = groups < 0
    nibbles = (codes + 8 * signs).astype(np.uint8).reshape(len(weights), -1)
    tensors = {
        "weight_packed": torch.from_numpy(nibbles[:, ::2] | (nibbles[:, 1::2] << 4)),
        "weight_scale": torch.from_numpy((exponents + 127).astype(np.uint8)),
    }
    return tensors, (values[codes] * np.where(signs, -1, 1) * full).reshape(weights.shape)


def _e8m0(exponents: np.ndarray) -> torch.Tensor:
    return torch.from_numpy((exponents + 127).astype(np.uint8)).view(torch.float8_e8m0fnu)


def fp8_of_powers(
    weights: np.ndarray, rng: np.random.Generator, block: tuple[int, int] = (16, 32)
) -> tuple[Tensors, np.ndarray]:
    """Blocks as `fp8_blocks`, whose scales are the least powers of two that keep all numbers."""
    (out, num_in), (rows, columns) = weights.shape, block
    full = np.pad(np.abs(weights), ((0, -out % rows), (0, -num_in % columns)))
    largest = full.reshape(-(-out // rows), rows, -1, columns).max((1, 3))
    exponents = np.ceil(np.log2(largest / 448)).astype(np.int32)
    scale = np.repeat(np.repeat(np.ldexp(np.float32(1), exponents), rows, 0)[:out], columns, 1)[:, :num_in]
    numbers = _float8(weights / scale)
    return {"weight": _torch8(numbers), "scale": _e8m0(exponents)}, numbers.astype(np.float32) * scale


def fp4_of_powers(weights: np.ndarray, rng: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    """`mxfp4` in bytes that are called int8."""
    tensors, meant = mxfp4(weights, rng)
    scale = tensors["weight_scale"].view(torch.float8_e8m0fnu)
    return {"weight": tensors["weight_packed"].view(torch.int8), "scale": scale}, meant


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors."""
    defaults = {"symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": {**defaults, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


MODELOPT_FP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
STATIC_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}, fp8_static
# Name -> (quantization_config, how a matrix is quantized).
FORMATS: dict[str, tuple[dict[str, Any], Quantize]] = {
    "fp8 in blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [40, 48], "activation_scheme": "dynamic",
         "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"]}, fp8_blocks,
    ),
    "fp8 per tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    "compressed-tensors fp8 per tensor": (
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor"), fp8_tensor,
    ),
    "compressed-tensors fp8 per channel": (
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"), fp8_channels,
    ),
    "compressed-tensors nvfp4": (
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        lambda weights, rng: fp4(weights, rng, is_modelopt=False),
    ),
    "compressed-tensors mxfp4": (
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32), mxfp4,
    ),
    "modelopt nvfp4": (MODELOPT_FP4, fp4),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head*"]}, fp8_tensor),
    "compressed-tensors int8": (compressed("int-quantized", num_bits=8, type="int", strategy="channel"), int8_channels),
    "compressed-tensors int4": (
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP), packed_int4,
    ),
    "compressed-tensors int4 asymmetric": (
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False),
        packed_int4_asymmetric,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}, gptq),
    "gptq desc_act": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
        lambda weights, rng: gptq(weights, rng, desc_act=True),
    ),
    "auto-round": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int", "bits": 4,
         "group_size": GROUP, "sym": False, "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}}}, gptq,
    ),
    "auto-round 3 bits": (
        {"quant_method": "auto-round", "packing_format": "auto_round", "data_type": "int", "bits": 3,
         "group_size": GROUP, "sym": False}, partial(gptq, bits=3, one_less=False),
    ),
    "gptq 2 bits": (
        {"quant_method": "gptq", "bits": 2, "group_size": GROUP, "desc_act": False, "sym": False}, partial(gptq, bits=2),
    ),
    "gptq 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": False, "sym": True}, gptq_8_bits),
}  # fmt: skip


def quantize_folder(
    plain: Path,
    folder: Path,
    name: str | tuple[dict[str, Any], Quantize],
    seed: int = 0,
    *,
    excepted: str = "",
    exceptions: Sequence[str] = (),
    also: str = "",
) -> Path:
    """Writes the checkpoint of `plain` in a format to `folder`, and what its numbers mean to `folder/meant`.

    The format is one of `FORMATS` by its name, or another.

    Tensors that the expression `excepted` is found in stay as they are, as `exceptions` of the configuration say. Those
    that `also` is found in are quantized with the layers' projections.
    """
    config, quantize = FORMATS[name] if isinstance(name, str) else name
    if exceptions:
        key = "ignore" if "ignore" in config else "modules_to_not_convert"
        config = {**config, key: [*config.get(key, ()), *exceptions]}

    def form_of(key: str) -> Quantize | None:
        is_meant = re.search(r"_proj(_\w+)?\.weight$", key) or (also and re.search(also, key))
        return quantize if is_meant and not (excepted and re.search(excepted, key)) else None

    return quantize_each(plain, folder, config, form_of, seed)


def quantize_each(
    plain: Path, folder: Path, config: dict[str, Any], form_of: Callable[[str], Quantize | None], seed: int = 0
) -> Path:
    """`quantize_folder` with a form for each tensor, by its name; None: it stays as it is."""
    rng = np.random.default_rng(seed)
    stored: Tensors = {}
    meant: Tensors = {}
    for key, tensor in load_file(plain / "model.safetensors").items():
        quantize = form_of(key)
        if quantize is None:
            stored[key] = meant[key] = tensor
            continue
        parts, values = quantize(tensor.float().numpy(), rng)
        stored |= {key.removesuffix("weight") + part: value for part, value in parts.items()}
        meant[key] = torch.from_numpy(np.ascontiguousarray(values, np.float32))
    for place, tensors, added in ((folder, stored, {"quantization_config": config}), (folder / "meant", meant, {})):
        place.mkdir(parents=True)
        save_file(tensors, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps(json.loads((plain / "config.json").read_text()) | added))
    return folder


HYBRID_LAYERS = ["linear_attention", "full_attention"]
HYBRID_BLOCK = (48, 64)
# Sizes that a CPU's kernels take packed in such blocks.
OF_HYBRID: dict[str, Any] = {
    "num_hidden_layers": len(HYBRID_LAYERS),
    "layer_types": HYBRID_LAYERS,
    "head_dim": 32,
    "intermediate_size": 96,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
OF_HYBRID_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(HYBRID_BLOCK), "activation_scheme": "dynamic"}
UNQUANTIZED = (
    "linear_attn.conv1d", "linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.in_proj_ba",
    "linear_attn.norm", "mlp.gate", "mlp.shared_expert_gate", "input_layernorm",
)  # fmt: skip


def hybrid_in_fp8(kind: str, folder: Path) -> Path:
    """A random hybrid in blocks of FP8 as Qwen's own are published: exceptions name small modules of each layer."""
    sizes = OF_HYBRID if kind == "qwen3_5" else OF_HYBRID | OF_HYBRID_EXPERTS | {"mlp_only_layers": []}
    plain = make_checkpoint(kind, folder / "plain", seed=3, **sizes)
    names = [f"model.layers.{layer}.{each}" for layer in range(len(HYBRID_LAYERS)) for each in UNQUANTIZED]
    form = FP8, partial(fp8_blocks, block=HYBRID_BLOCK)
    exceptions = ["lm_head", "mtp.fc", *names]
    return quantize_folder(plain, folder / "stored", form, exceptions=exceptions, excepted=r"in_proj_(ba|a|b)\.")


V4_BLOCK = (16, 32)
# Sizes that kernels take packed in such blocks.
OF_V4: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "head_dim": 32,
    "q_lora_rank": 96,
    "o_lora_rank": 32,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "intermediate_size": 64,  # which transformers has for the same
    "n_routed_experts": 8,
}
# Experts in FP4; what else is in FP8, which is all but gates, embedding, head and what makes entries of groups.
V4_EXPERTS = r"\.experts\.\d+\.w[123]\.weight$"
V4_IN_FP8 = r"\.attn\.w(q_a|q_b|kv|o_a|o_b)\.weight$|\.indexer\.wq_b\.weight$|\.shared_experts\.w[123]\.weight$"


def deepseek_v4_as_published(folder: Path, *, seed: int = 3, expert_dtype: str = "fp4", **sizes: Any) -> Path:
    """A random DeepSeek V4 with names, dtypes and configuration of published folders, but for the size of blocks."""
    plain = make_checkpoint("deepseek_v4", folder / "plain", seed=seed, **{**OF_V4, **sizes})
    of_blocks = partial(fp8_of_powers, block=V4_BLOCK)
    of_experts: Quantize = fp4_of_powers if expert_dtype == "fp4" else of_blocks

    def form_of(name: str) -> Quantize | None:
        return of_experts if re.search(V4_EXPERTS, name) else of_blocks if re.search(V4_IN_FP8, name) else None

    config = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
        "weight_block_size": list(V4_BLOCK),
    }  # fmt: skip
    stored = quantize_each(plain, folder / "stored", config, form_of, seed)
    tensors = {_as_published(name): tensor for name, tensor in load_file(stored / "model.safetensors").items()}
    draft = {
        "mtp.0.attn.wq_a.weight": torch.zeros(16, 32).to(torch.float8_e4m3fn),
        "mtp.0.attn.wq_a.scale": _e8m0(np.zeros((1, 1))),
    }
    save_file({**tensors, **draft}, stored / "model.safetensors")
    text = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**text, "expert_dtype": expert_dtype}))
    return stored


def _as_published(name: str) -> str:
    """A name that transformers saves."""
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return name.replace(".attn.norm.", ".attn.kv_norm.")
