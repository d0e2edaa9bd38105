"""Formats of quantized weights, and what a checkpoint says about quantization: of its weights, and for which KV cache.

Reads the words of compressed-tensors (llm-compressor), ModelOpt and Quark, in config.json or ModelOpt's
hf_quant_config.json. Knows no tensors: `weights/kv_scales.py` reads the scales of the cache, `weights/quantized.py`
makes numbers and scales of weights. Called by `arch_file`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxsgl.errors import CheckpointError, ConfigError
from pallas_kernels import packed

FP8_E4M3 = "fp8_e4m3"
FLOAT8 = "float8_e4m3fn"
FLOAT4 = "float4_e2m1fn"
MXFP4_PAIRS = ("packed_mxfp4", "int8_mxfp4")  # kinds of `Storage` of MXFP4 in single matrices
_PACKINGS = {"int4": packed.INT4, FLOAT8: packed.FLOAT8, FLOAT4: packed.MXFP4}  # of numbers, on one CPU
# Producers whose folders may leave the weights as they are and quantize the KV cache alone.
_MAY_KEEP_WEIGHTS = ("compressed-tensors", "modelopt", "quark")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Storage:
    """How a checkpoint stores a quantized matrix `[out, in]`.

    Attributes:
      kind: "plain" numbers in `weight`; integers in words of 32 bits: "awq", "gptq", "packed" (compressed-tensors); or
        two floats of 4 bits (e2m1) in a byte, with a scale of all scales: "fp4" (ModelOpt), "packed_fp4"
        (compressed-tensors); or with powers of two as scales: "mxfp4" (stacks of experts), "packed_mxfp4"
        (compressed-tensors), "int8_mxfp4" (DeepSeek V4, whose bytes are `weight`).
      bits: of a number.
      scale: the name of the tensor of scales, instead of `weight`.
      block_rows: how many outputs share a scale.
      has_zeros: integers have an offset for each scale. Without, the middle of their range stands for 0.
      zeros_one_less: the stored offsets are too small by 1.
    """

    kind: str
    bits: int = 8
    scale: str = "weight_scale"
    block_rows: int = 1
    has_zeros: bool = False
    zeros_one_less: bool = False


@dataclass(frozen=True)
class WeightFormat:
    """How the matrices of a model are kept (`models/matrix.py`).

    Attributes:
      method: where the numbers come from: `AT_LOAD`, or the checkpoint's `quant_method`.
      numbers: dtype of the numbers: int8, int4, float8_e4m3fn, float4_e2m1fn; bfloat16 for float8 on a CPU.
      group: how many inputs of an output share a scale; None: all.
      has_zeros: numbers have an offset for each scale.
      reorders: columns stand in another order than inputs.
      vocabulary: whether the embedding and the output head are quantized, too, in 8 bits at least.
      on_experts: whether experts are kept so, too, if the format is one that their kernels multiply.
      groups_of_experts: whether that is so of float8 in groups, which a GPU's kernel multiplies with rounded rows.
      scaled_experts: whether it is so of all numbers, groups and zero points, as a TPU's kernel takes them.
      packing: how kernels take the numbers, in as many bits as are published (`pallas_kernels.packed`), where they take
        a matrix's sizes; "": as `numbers` says.
      widened_to: the dtype that packed floats become in products.
      row_bits: of the integers that a CPU's products with integers round activations to.
      parts: how many devices may have a part of a packed matrix.
      sharers: how many devices may share a matrix's inputs, experts' too.
      storage: of the checkpoint's tensors; None: they are not quantized.
    """

    method: str
    numbers: str
    group: int | None = None
    has_zeros: bool = False
    reorders: bool = False
    vocabulary: bool = False
    on_experts: bool = True
    groups_of_experts: bool = False
    scaled_experts: bool = False
    packing: str = ""
    widened_to: str = "bfloat16"
    row_bits: int = 16
    parts: int = 1
    sharers: int = 1
    storage: Storage | None = None

    def gives_whole_groups(self, num_inputs: int) -> bool:
        """Whether each of the devices that share so many inputs has groups of its own, with scales side by side."""
        of_all = self.sharers * self.group_of(num_inputs)
        return self.sharers > 1 and self.packing not in packed.SIDES and num_inputs % of_all == 0

    def group_of(self, num_inputs: int) -> int:
        """How many of `num_inputs` share a scale."""
        return num_inputs if self.group is None else self.group

    def block_outputs(self, run: int, reordered: bool) -> int:
        """How many outputs share their scales, of runs that begin at multiples of their length in a checkpoint.

        Where the outputs of a run are `reordered`, blocks must hold whole runs; else none share.
        """
        shared = 1 if self.storage is None else math.gcd(self.storage.block_rows, run)
        return 1 if reordered and shared != run else shared

    @property
    def has_integers(self) -> bool:
        """Whether the numbers are integers."""
        return self.numbers in ("int8", "int4")

    @property
    def is_in_groups(self) -> bool:
        """Whether sums can't be scaled after the product: scales of groups, or zero points."""
        return self.group is not None or self.has_zeros

    @property
    def of_vocabulary(self) -> WeightFormat | None:
        """The format of the embedding and the output head; None: they are not quantized."""
        if not self.vocabulary:
            return None
        if self.numbers != "int4":
            return self
        whole = replace(self, numbers="int8", group=None)
        return whole._of_bytes(whole.row_bits if self.packing else 16)

    def of_experts(self, shapes: Iterable[tuple[int, int]]) -> WeightFormat | None:
        """The format of experts' matrices of which a device has these shapes, or None: they are dequantized.

        Their kernels multiply numbers, to whose sums the scale of an output is applied, what is packed, on some devices
        float8 in groups, and on some numbers in any groups.
        """
        whole = replace(self, parts=1)
        is_simple = (self.group is None or self.groups_of_experts) and not self.has_zeros and self.numbers != "int4"
        is_packed = bool(self.packing) and all(whole._refusal(shape) is None for shape in shapes)
        is_taken = is_simple or is_packed or (self.scaled_experts and not self.packing)
        return whole if self.on_experts and not self.reorders and is_taken else None

    def of_shape(self, shape: tuple[int, ...], dtype: str) -> WeightFormat:
        """That of a matrix `[..., out, in]` among others in `dtype`: not packed if kernels don't take its sizes.

        Nor is float8 with one scale an output, which bfloat16's kernel multiplies: widening float8 in blocks inside the
        product was measured to take 1.5 times as long as bfloat16 (docs/quantization.md).
        """
        is_left_wide = self.packing == packed.FLOAT8 and self.group is None
        if not self.packing or (self._refusal(shape) is None and not is_left_wide):
            return self
        if self.packing in packed.ON_ACCELERATORS:
            return self.without_packing
        return self.without_packing.on_cpu(dtype, row_bits=self.row_bits)

    def _refusal(self, shape: tuple[int, ...]) -> str | None:
        return packed.refuse(self.packing, shape, self.group_of(shape[-1]), self.parts)

    @property
    def without_packing(self) -> WeightFormat:
        """The same format, whose numbers are not packed."""
        return replace(self, packing="")

    def on_gpu(self, dtype: str, *, parts: int, packs: bool = True) -> WeightFormat:
        """The format in which so many GPUs keep such weights beside others in `dtype`: 4 bits as registers have them.

        What is multiplied in float32 is not packed. Without `packs`, only matrices of integers are, and no experts.
        """
        packing = packed.FRAGMENTS if self.numbers == "int4" else packed.MXFP4_FRAGMENTS if self._is_mxfp4 else ""
        if not packing or dtype == "float32" or (self._is_mxfp4 and not packs):
            return self
        return replace(self, packing=packing, widened_to=dtype, parts=parts, on_experts=self.on_experts and packs)

    def on_tpu(self, dtype: str) -> WeightFormat:
        """The format in which TPUs keep such weights beside others in `dtype`: MXFP4 in 4 bits, the rest as it is."""
        return replace(self, packing=packed.MXFP4_CODES, widened_to=dtype) if self._is_mxfp4 else self

    @property
    def _is_mxfp4(self) -> bool:
        return self.storage is not None and self.storage.kind in ("mxfp4", *MXFP4_PAIRS)

    @property
    def packing_on_cpu(self) -> str:
        """How C++ may take such numbers; "": as they are."""
        is_mxfp4 = self.storage is not None and self.storage.kind in MXFP4_PAIRS
        return packed.MXFP4 if is_mxfp4 else _PACKINGS.get(self.numbers, "")

    def on_cpu(self, dtype: str, *, row_bits: int = 16, packs: bool = False, parts: int = 1) -> WeightFormat:
        """The format in which so many CPUs keep such weights beside others in `dtype`, without loss.

        Their kernels multiply int8 without offsets, which 4 bits less their offset fit, and floats of 4 bits doubled,
        and bfloat16, which has all numbers of float8; or where they pack (`packs`), what is packed. Only int8 is packed
        in several parts, and for rows of 8 bits alone.
        """
        packing = self.packing_on_cpu if packs and parts == 1 else ""
        if packing == packed.INT4:
            return replace(self, packing=packing, row_bits=row_bits)
        if packing:
            numbers = FLOAT4 if packing == packed.MXFP4 else self.numbers
            return replace(self, numbers=numbers, packing=packing, widened_to=dtype, row_bits=row_bits)
        if self.numbers in ("int8", "int4", FLOAT4):
            has_zeros = self.has_zeros and self.numbers != "int4"
            whole = replace(self, numbers="int8", has_zeros=has_zeros, row_bits=row_bits, parts=parts)
            return whole._of_bytes(row_bits if packs else max(row_bits, 16))
        if self.numbers == FLOAT8 and dtype == "bfloat16":
            return replace(self, numbers="bfloat16")
        return self

    def _of_bytes(self, row_bits: int) -> WeightFormat:
        """The format with numbers of a byte, which are packed to meet rows of 8 bits."""
        return replace(self, packing=packed.INT8 if row_bits == 8 else "", row_bits=row_bits)


AT_LOAD = "load"  # quantized while a checkpoint of other numbers is loaded
GROUP_AT_LOAD = 64  # inputs of int4 that share a scale
# What --quantization makes of weights. A vocabulary's rows bear int8 well, and float8's rounding less so.
FORMATS_AT_LOAD = {
    "int8": WeightFormat(AT_LOAD, "int8", vocabulary=True),
    "int4": WeightFormat(AT_LOAD, "int4", group=GROUP_AT_LOAD, vocabulary=True),
    "fp8": WeightFormat(AT_LOAD, FLOAT8),
}


def weight_format(flag: str | None, stored: WeightFormat | None) -> WeightFormat | None:
    """The format of the weights by `--quantization` and the checkpoint; None: they are not quantized.

    Raises `ConfigError` if the checkpoint is quantized in another way than the flag says.
    """
    if stored is None:
        if flag not in (None, *FORMATS_AT_LOAD):
            raise ConfigError(
                f"--quantization is {flag}, but the checkpoint's weights are not quantized: leave the flag out, or "
                f"quantize them at load with {' or '.join(FORMATS_AT_LOAD)}"
            )
        return None if flag is None else FORMATS_AT_LOAD[flag]
    if flag not in (None, stored.method):
        raise ConfigError(
            f"--quantization is {flag}, but the checkpoint's weights are quantized already, by {stored.method}: leave "
            "the flag out"
        )
    return stored


def weights_are_quantized(config: Mapping[str, Any]) -> bool:
    """Whether `quantization_config` describes weights in another format than config.json's dtype."""
    if config.get("quant_method", "modelopt") not in _MAY_KEEP_WEIGHTS or modelopt_part(config).get("quant_algo"):
        return True
    return any(part.get(word) for part in _parts(config) for word in ("weights", "weight"))


def kv_cache_dtype(config: Mapping[str, Any]) -> str | None:
    """`FP8_E4M3` if the checkpoint was calibrated for a KV cache of it, with static scales; None: as the weights.

    A KV cache of any other format is left unquantized, with a warning: such a checkpoint is right without it, too.
    """
    scheme = config.get("kv_cache_scheme")
    algo = modelopt_part(config).get("kv_cache_quant_algo")
    outputs = [part.get("output_tensors") or {} for part in _kv_parts(config)]
    if not (scheme or algo or outputs):
        return None
    is_float8 = [algo == "FP8"] if algo else []
    if scheme:
        is_float8.append(_is_float8(scheme))
    is_float8 += [output.get("dtype") == FP8_E4M3 and not output.get("is_dynamic") for output in outputs]
    if all(is_float8):
        return FP8_E4M3
    logger.warning(
        "the checkpoint asks for a KV cache of %s; supported is %s with static scales, so it is kept in the format of "
        "the weights",
        scheme or algo or outputs, FP8_E4M3,
    )  # fmt: skip
    return None


def _is_float8(scheme: Any) -> bool:
    """Whether `kv_cache_scheme` is `FP8_E4M3` with static scales: told as an object, or as a word in FP8 releases."""
    if not isinstance(scheme, Mapping):
        return str(scheme).lower() in ("static", "fp8")
    return (scheme.get("num_bits"), scheme.get("type")) == (8, "float") and not scheme.get("dynamic")


def check_groups(path: Path, config: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` if descriptions of groups of layers, in the file `path`, are no objects by name."""
    for key in ("config_groups", "layer_quant_config", "layer_type_quant_config", "kv_cache_quant_config"):
        told = config.get(key) or {}
        if not isinstance(told, Mapping) or not all(isinstance(each or {}, Mapping) for each in told.values()):
            raise CheckpointError(
                f"{path}: quantization_config: {key} is {str(told)[:60]}, but must be an object of objects"
            )


def modelopt_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """ModelOpt's words, which hf_quant_config.json has one level further down."""
    inner = config.get("quantization")
    return inner if isinstance(inner, dict) else config


def _parts(config: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """The descriptions of groups of layers: compressed-tensors' and ModelOpt's groups, Quark's patterns."""
    yield config.get("global_quant_config") or {}
    for name in ("config_groups", "layer_quant_config", "layer_type_quant_config"):
        yield from (part for part in (config.get(name) or {}).values() if isinstance(part, dict))


def _kv_parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Quark's descriptions of the layers whose outputs are kept, named by the patterns of `kv_cache_group`."""
    patterns = (config.get("export") or {}).get("kv_cache_group") or ()
    layers = {**(config.get("layer_quant_config") or {}), **(config.get("kv_cache_quant_config") or {})}
    return [layers.get(pattern) or {} for pattern in patterns]
