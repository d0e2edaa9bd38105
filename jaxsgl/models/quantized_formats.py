"""The format that `quantization_config` of a config.json describes, in the words of each software.

Reads those of FP8 releases, compressed-tensors, ModelOpt, AWQ and GPTQ; refuses every other format by its name, and
options that would change results. Never knows which matrices have the format (`quantized_checkpoints.py` does), nor
tensors (`weights/stored_matrix.py` reads them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxsgl.errors import CheckpointError
from jaxsgl.models.quantization import Storage, WeightFormat, modelopt_part
from pallas_kernels.packed import MXFP4_GROUP

SUPPORTED = (
    "fp8 (e4m3, in blocks or per tensor), compressed-tensors (float8, int8, int4, nvfp4, mxfp4), modelopt (FP8, "
    "NVFP4), awq, gptq and auto-round (2, 3, 4 and 8 bits), mxfp4 (experts)"
)
EXPERTS_IN_MXFP4 = WeightFormat(
    "mxfp4", "float4_e2m1fn", group=MXFP4_GROUP, storage=Storage("mxfp4", 4, scale="_scales")
)
EXPERT_DTYPE = "expert_dtype"  # a key of FP8 releases, next to `quantization_config` or in it
_EXPERTS_IN_FP4 = WeightFormat(
    "fp8", "int8", group=MXFP4_GROUP, storage=Storage("int8_mxfp4", 4, scale="weight_scale_inv")
)
MODELOPT = "modelopt"  # what its methods begin with, and what a configuration without a method is
FP4_GROUP = 16  # inputs that share a scale in NVFP4
# Floats of 4 bits in compressed-tensors: how they are stored, and in groups of how many.
FP4_FORMATS = {"nvfp4-pack-quantized": ("packed_fp4", FP4_GROUP), "mxfp4-pack-quantized": ("packed_mxfp4", MXFP4_GROUP)}
FP8_IN_BLOCKS = ("FP8_PB_WO", "FP8_BLOCK_SCALES")
FP8_ALGOS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", *FP8_IN_BLOCKS)
FP8_BLOCK = 128
# How AutoRound packs: as the software for GPTQ, for AWQ, or for GPTQ but with zero points that are not less one.
AS_GPTQ = ("auto_round:auto_gptq", "auto_round:gptq", "auto_gptq")
AS_AWQ = ("auto_round:auto_awq", "auto_round:awq", "auto_awq")
AUTO_ROUND = "auto_round"
GPTQ_FORMS = ("gptq", "gptq_v2")  # of the first one, zero points are stored less one


def read_format(path: Path, config: Mapping[str, Any], within: str = "") -> WeightFormat:
    """The format that `quantization_config` of the file `path` describes, where it describes one.

    Errors name the part `within` it that `config` is read for.

    Raises `CheckpointError` for a format that is not supported, by its name.
    """
    method = config.get("quant_method", MODELOPT)
    readers = {
        "fp8": _fp8,
        "compressed-tensors": _compressed_tensors,
        **dict.fromkeys((MODELOPT, f"{MODELOPT}_fp4", f"{MODELOPT}_fp8", f"{MODELOPT}_mixed"), _modelopt),
        "awq": _awq,
        "gptq": _gptq,
        "auto-round": _auto_round,
        "gguf": _gguf,
    }
    if method not in readers:
        raise CheckpointError(f"{path}: weights quantized by {method} are not supported; supported are {SUPPORTED}")
    reader = _Reader(path, config, within)
    return readers[method](reader)


def read_expert_format(path: Path, config: Mapping[str, Any]) -> WeightFormat | None:
    """The format of experts where it is another one than that of `read_format`: FP4 in FP8 releases (DeepSeek V4).

    Raises `CheckpointError` for another `EXPERT_DTYPE`.
    """
    if config.get("quant_method") != "fp8":
        return None
    told = _Reader(path, config).one_of(EXPERT_DTYPE, "fp8", "fp4", default="fp8")
    return _EXPERTS_IN_FP4 if told == "fp4" else None


def has_quantized_experts(config: Mapping[str, Any]) -> bool:
    """Whether experts are quantized, and nothing else is: MXFP4."""
    return config.get("quant_method") == "mxfp4"


class _Reader:
    """Values of a configuration, with errors that name file, key and value."""

    def __init__(self, path: Path, values: Mapping[str, Any], within: str = "") -> None:
        self.path = path
        self.values = values
        self._within = within
        self._where = f"{path}: quantization_config: {within}{': ' if within else ''}"

    def with_values(self, values: Mapping[str, Any]) -> _Reader:
        """The same with these values in place of its own."""
        return _Reader(self.path, {**self.values, **values}, self._within)

    def one_of(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """The value, which must be one of `allowed`; `default` where it is missing or null."""
        value = self.values.get(key)
        value = default if value is None else value
        if value not in allowed:
            told = ", ".join(map(str, allowed))
            raise CheckpointError(f"{self._where}{key} is {value}; supported are {told}")
        return value

    def group(self, key: str = "group_size") -> int | None:
        """Inputs that share a scale; None for -1, all of them."""
        value = self.values.get(key, -1)
        if value in (None, -1):
            return None
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self._where}{key} is {value}, but must be -1, or 1 and more")
        return value


def _fp8(config: _Reader) -> WeightFormat:
    """FP8 releases: DeepSeek's and Qwen's blocks with `weight_scale_inv`, or one `weight_scale` for a tensor."""
    config.one_of("fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    if config.values.get("weight_block_size") is None:
        return WeightFormat("fp8", "float8_e4m3fn", storage=Storage("plain", scale="weight_scale"))
    rows, columns = _block(config, "weight_block_size")
    storage = Storage("plain", scale="weight_scale_inv", block_rows=rows)
    return WeightFormat("fp8", "float8_e4m3fn", group=columns, storage=storage)


def _gguf(config: _Reader) -> WeightFormat:
    """Of a folder that `weights/gguf_folder.py` made: blocks of 32 inputs with a scale, read as numbers and scales."""
    numbers = {"Q8_0": "int8", "Q4_0": "int4"}
    kind = config.one_of("format", *numbers)
    return WeightFormat("gguf", numbers[kind], group=32, storage=Storage("plain", scale="weight_scale"))


def _compressed_tensors(config: _Reader) -> WeightFormat:
    groups = [group for group in (config.values.get("config_groups") or {}).values() if (group or {}).get("weights")]
    if len({str(group["weights"]) for group in groups}) != 1:
        raise CheckpointError(
            f"{config.path}: quantization_config has {len(groups)} formats of weights, but 1 is supported"
        )
    _refuse_what_weights_lack(config)
    formats = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", *FP4_FORMATS)
    form = config.one_of("format", *formats)
    weights = _Reader(config.path, groups[0]["weights"])
    kind, bits = weights.one_of("type", "float", "int", default="int"), weights.one_of("num_bits", 8, 4, default=8)
    strategy = weights.one_of("strategy", "tensor", "channel", "group", "block", "tensor_group", default="tensor")
    has_zeros = not weights.one_of("symmetric", True, False, default=True)
    actorder = weights.one_of("actorder", None, False, "weight", "static", "group", "dynamic")
    group = weights.group() if strategy == "group" else None
    if form in FP4_FORMATS:
        stored_as, size = FP4_FORMATS[form]
        for key, value in (("type", "float"), ("num_bits", 4), ("group_size", size)):
            weights.one_of(key, value)
        return WeightFormat("compressed-tensors", "int8", group=size, storage=Storage(stored_as, 4))
    if kind == "float":
        if bits != 8 or has_zeros:
            raise CheckpointError(
                f"{config.path}: weights of {bits} bits of type float are not supported as {form}: give "
                f"{' or '.join(FP4_FORMATS)}"
            )
        rows, columns = _block(weights, "block_structure") if strategy == "block" else (1, group)
        storage = Storage("plain", scale="weight_scale", block_rows=rows)
        return WeightFormat("compressed-tensors", "float8_e4m3fn", group=columns, storage=storage)
    packed = form == "pack-quantized"
    if strategy == "block" or (bits == 4 and not packed):
        raise CheckpointError(f"{config.path}: int{bits} weights by {strategy} as {form} are not supported")
    storage = Storage("packed" if packed else "plain", bits, scale="weight_scale", has_zeros=has_zeros)
    return WeightFormat(
        "compressed-tensors", f"int{bits}", group=group, has_zeros=has_zeros,
        reorders=packed and actorder in ("group", "dynamic"), storage=storage,
    )  # fmt: skip


def _refuse_what_weights_lack(config: _Reader) -> None:
    """Raises `CheckpointError` for sparse weights, and for rotations that aren't folded into the weights."""
    sparse = (config.values.get("sparsity_config") or {}).get("format") or "dense"
    if sparse != "dense":
        raise CheckpointError(f"{config.path}: quantization_config: sparsity_config is {sparse}; supported is dense")
    schemes = ((config.values.get("transform_config") or {}).get("config_groups") or {}).values()
    places = [str(each.get("location")) for scheme in schemes for each in scheme.get("apply") or ()]
    online = [place for place in places if not place.startswith("weight_")]
    if online:
        raise CheckpointError(
            f"{config.path}: quantization_config: transform_config rotates at {online[0]}, but activations are not "
            "rotated here: supported are rotations of weights"
        )


def _block(weights: _Reader, key: str) -> tuple[int, int]:
    """Outputs and inputs that share a scale; older folders write "128x128"."""
    told = weights.values.get(key)
    sides = told.split("x") if isinstance(told, str) else told
    if not isinstance(sides, list) or len(sides) != 2 or not all(str(side).isdecimal() for side in sides):
        raise CheckpointError(
            f"{weights.path}: quantization_config: {key} is {told}, but must be two numbers, as [128, 128]"
        )
    return int(sides[0]), int(sides[1])


def _modelopt(config: _Reader) -> WeightFormat:
    """FP8 with a scale for a tensor, output or block, or NVFP4: 4 bits in groups, whose scales of float8 have a scale.

    Their values are whole numbers after doubling, and are kept as int8.
    """
    inner = _Reader(config.path, modelopt_part(config.values))
    algo = inner.one_of("quant_algo", *FP8_ALGOS, "NVFP4", "W4A16_NVFP4")
    if algo in FP8_ALGOS:
        block = inner.group() or FP8_BLOCK if algo in FP8_IN_BLOCKS else None
        storage = Storage("plain", scale="weight_scale", block_rows=block or 1)
        return WeightFormat("modelopt", "float8_e4m3fn", group=block, storage=storage)
    group = inner.one_of("group_size", FP4_GROUP, default=FP4_GROUP)
    return WeightFormat("modelopt", "int8", group=group, storage=Storage("fp4", 4))


def _awq(config: _Reader) -> WeightFormat:
    bits = config.one_of("bits" if "bits" in config.values else "w_bit", 4)
    config.one_of("version", "gemm", "GEMM", default="gemm")
    group = config.group("group_size" if "group_size" in config.values else "q_group_size")
    return WeightFormat(
        "awq", "int4", group=group, has_zeros=True, storage=Storage("awq", bits, "scales", has_zeros=True)
    )


def _auto_round(config: _Reader) -> WeightFormat:
    """AutoRound packs as GPTQ's or AWQ's software does, but for zero points of its own form.

    Folders of old versions name a `backend`, which may be the packing.
    """
    config.one_of("data_type", "int", default="int")
    key = "packing_format" if config.values.get("packing_format") or not config.values.get("backend") else "backend"
    packing = config.one_of(key, *AS_GPTQ, *AS_AWQ, AUTO_ROUND, default=AS_GPTQ[0])
    form = "gptq_v2" if packing == AUTO_ROUND else "gptq"
    values = {"version": "gemm", "desc_act": False, "checkpoint_format": form, "format": form}
    return replace((_awq if packing in AS_AWQ else _gptq)(config.with_values(values)), method="auto-round")


def _gptq(config: _Reader) -> WeightFormat:
    """Numbers of 2 and 3 bits are kept in 4."""
    bits = config.one_of("bits", 2, 3, 4, 8)
    form = config.one_of("format", *GPTQ_FORMS, default=GPTQ_FORMS[0])
    of_files = config.one_of("checkpoint_format", *GPTQ_FORMS, default=form)
    if config.values.get("format") and of_files != form:
        raise CheckpointError(
            f"{config.path}: quantization_config: format is {form} and checkpoint_format is {of_files}, which store "
            "zero points otherwise: leave the one that is right"
        )
    has_zeros = not config.one_of("sym", True, False, default=True)
    group = config.group()
    storage = Storage("gptq", bits, "scales", has_zeros=has_zeros, zeros_one_less=of_files == GPTQ_FORMS[0])
    reorders = group is not None and bool(config.values.get("desc_act"))
    numbers = "int8" if bits == 8 else "int4"
    return WeightFormat("gptq", numbers, group=group, has_zeros=has_zeros, reorders=reorders, storage=storage)
