"""`as_kept`: in which format a platform's devices keep the weights of a model: as published, packed, or widened.

CPUs and GPUs pack what they have kernels for; the kernel of TPUs takes numbers as they are. Of GPUs that share experts
of a few bits, each gets whole groups of inputs: experts are as much wider as that takes, by units of zeros, which
change no result. Owns these decisions, and says which experts are widened. Called where a model is opened, tested,
drafts, or is loaded again.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxsgl.errors import ConfigError
from jaxsgl.models import ModelArch
from jaxsgl.models.layer_spec import MoeMlp
from jaxsgl.models.matrix import group_of_part
from jaxsgl.models.moe import expert_shapes
from jaxsgl.models.quantization import AT_LOAD, FLOAT8, WeightFormat
from pallas_kernels import fragments, packed
from pallas_kernels.native import library as native_library
from pallas_kernels.native.product import TWO_WORDS
from pallas_kernels.scaled import ScaledMatrix, refuse_rounding

# As much of an expert's width may be added: with half of it more, 8 bits a weight are 12, and experts' products of
# prompts take half as long again.
MOST_PADDING = 1 / 2

logger = logging.getLogger(__name__)


def as_kept(
    arch: ModelArch,
    dtype: jnp.dtype,
    platform: str,
    num_devices: int,
    *,
    weight_only: bool = False,
    rounds_rows: bool = False,
) -> ModelArch:
    """The model with its weights in the format in which so many devices of the platform keep them.

    Others are in `dtype`. Several CPUs pack int8 alone.

    With `weight_only` no product with integers on a CPU rounds the activations to 8 bits, nor does it in float32, whose
    products are to be exact. Where a GPU's products with experts round rows to float8 (`rounds_rows`), experts in
    groups of FP8 stay so.

    Raises `ConfigError` for experts that are to be quantized at load where no kernel multiplies them.
    """
    if platform == "cpu":
        kept = _on_cpus(arch, dtype, num_devices, weight_only)
    elif platform == "gpu":
        kept = _on_gpus(arch, dtype, num_devices, rounds_rows)
    else:
        kept = _on_tpus(arch, dtype, num_devices)
    of_weights, of_experts = (
        fmt and replace(fmt, sharers=num_devices) for fmt in (kept.weight_format, kept.expert_format)
    )
    return replace(kept, weight_format=of_weights, expert_format=of_experts)


def _on_cpus(arch: ModelArch, dtype: jnp.dtype, num_devices: int, weight_only: bool) -> ModelArch:
    formats = [fmt for fmt in (arch.weight_format, arch.expert_format) if fmt is not None]
    has_integers = any(fmt.has_integers for fmt in formats)
    parts = [native_library.INTEGERS] if has_integers else []
    if arch.mixture is not None or any(fmt.packing_on_cpu in (packed.FLOAT8, packed.MXFP4) for fmt in formats):
        parts.append(native_library.GROUPED)
    packs = native_library.load(*parts) is None and arch.may_pack  # compiles parts together
    in_bytes = has_integers and not weight_only and native_library.multiplies_bytes()
    row_bits = TWO_WORDS if dtype == jnp.float32 else 8 if in_bytes else 16

    def on_cpu(fmt: WeightFormat | None) -> WeightFormat | None:
        return None if fmt is None else fmt.on_cpu(dtype.name, row_bits=row_bits, packs=packs, parts=num_devices)

    return replace(arch, weight_format=on_cpu(arch.weight_format), expert_format=on_cpu(arch.expert_format))


def _on_gpus(arch: ModelArch, dtype: jnp.dtype, num_devices: int, rounds_rows: bool) -> ModelArch:
    def on_gpu(fmt: WeightFormat | None, widths: ModelArch) -> WeightFormat | None:
        if fmt is None:
            return None
        keeps = rounds_rows and _may_round(widths, fmt, num_devices)
        kept = fmt.on_gpu(dtype.name, parts=num_devices, packs=arch.may_pack)
        return replace(kept, groups_of_experts=keeps)

    def kept(widths: ModelArch) -> ModelArch:
        of_weights, of_experts = (on_gpu(fmt, widths) for fmt in (arch.weight_format, arch.expert_format))
        return replace(widths, weight_format=of_weights, expert_format=of_experts)

    as_published, *others = map(kept, _widths(arch, num_devices))
    why = functools.partial(_why_widened, num_devices=num_devices, rounds_rows=rounds_rows)
    found = next((each for each in (as_published, *others) if not why(each)), as_published)
    if reason := why(found):
        way_out = "" if num_devices == 1 or arch.by_experts else "; with --ep each device has whole experts"
        _log_once(f"the experts of {arch.name} are widened to 16 bits: {reason}{way_out}")
    return found


def _on_tpus(arch: ModelArch, dtype: jnp.dtype, num_devices: int) -> ModelArch:
    fmt = _format_of_experts(arch)
    refused = "" if arch.mixture is None or fmt is None else _why_no_tpu(arch, fmt, dtype, num_devices)
    if refused and fmt is not None:
        way_out = "" if num_devices == 1 or arch.by_experts else "; with --ep each device has whole experts"
        if fmt.method == AT_LOAD:
            way_out = way_out or "; leave --quantization out"
            raise ConfigError(f"the experts of {arch.name} can't be quantized on TPUs: {refused}{way_out}")
        if not fmt.reorders:
            _log_once(f"the experts of {arch.name} are widened to 16 bits: {refused}{way_out}")

    def on_tpu(fmt: WeightFormat | None) -> WeightFormat | None:
        # A converted folder has numbers with one scale an output, and no others.
        if fmt is None:
            return None
        kept = fmt.on_tpu(dtype.name) if arch.may_pack else fmt
        return replace(kept, on_experts=not refused, scaled_experts=arch.may_pack)

    return replace(arch, weight_format=on_tpu(arch.weight_format), expert_format=on_tpu(arch.expert_format))


def _why_no_tpu(arch: ModelArch, fmt: WeightFormat, dtype: jnp.dtype, num_devices: int) -> str:
    """Why TPUs have no kernel for the experts in this format; "" if they have."""
    from pallas_kernels.tpu.products import refuse_scaled_product  # no other platform needs it

    mixture = arch.mixture
    assert mixture is not None
    parts = 1 if arch.by_experts else num_devices
    width = mixture.width(arch.hidden_size)
    groups = fmt.group_of(width), group_of_part(fmt.group_of(mixture.num_units), mixture.num_units, parts)
    packing = fmt.on_tpu(dtype.name).packing
    for shape, group in zip(expert_shapes(arch, mixture, num_devices), groups, strict=True):
        rows: Any = jax.ShapeDtypeStruct((1, shape[1]), dtype)
        refused = refuse_scaled_product(rows, _described("int4" if packing else fmt.numbers, (1, *shape), group))
        if refused or (packing and (refused := packed.refuse(packing, shape, fmt.group_of(shape[1])))):
            return f"a device has {shape} of one: {refused}"
    return ""


def _widths(arch: ModelArch, num_devices: int) -> Iterator[ModelArch]:
    """The model, and the model with experts of which each device has whole groups, if it must and can be wider."""
    yield arch
    mixture, fmt = arch.mixture, _format_of_experts(arch)
    if mixture is None or fmt is None or arch.by_experts or num_devices == 1 or not arch.may_pack:
        return
    step = math.lcm(fragments.INPUTS, fmt.group or 1) * num_devices
    padding = -mixture.ffn_size % step
    if 0 < padding <= MOST_PADDING * mixture.ffn_size:
        yield arch.with_padded_experts(padding)


def _format_of_experts(arch: ModelArch) -> WeightFormat | None:
    """None if no layer's experts are quantized, as those of a checkpoint that excepts them."""
    mixtures = (layer for layer in arch.layers if layer.experts is not None or isinstance(layer.mlp, MoeMlp))
    are_plain = all("experts" in layer.unquantized for layer in mixtures)
    return arch.expert_format or (None if are_plain else arch.weight_format)


def _may_round(arch: ModelArch, fmt: WeightFormat, num_devices: int) -> bool:
    """Whether the weights of experts have sizes, on each device, for products of float8 in groups of inputs."""
    mixture = arch.mixture
    if mixture is None or fmt.group is None or not arch.may_pack:
        return False
    experts, parts = (num_devices, 1) if arch.by_experts else (1, num_devices)
    num_experts, ffn = mixture.num_experts // experts, mixture.num_units // parts
    group = group_of_part(fmt.group, mixture.num_units, parts)
    width = mixture.width(arch.hidden_size)
    shapes = (arch.unit_rows * ffn, width, fmt.group), (width, ffn, group)
    return all(_refuse_rounding(fmt.numbers, num_experts, *shape) is None for shape in shapes)


def _refuse_rounding(numbers: str, num_experts: int, outputs: int, inputs: int, group: int) -> str | None:
    return refuse_rounding(_described(numbers, (num_experts, outputs, inputs), group))


def _described(numbers: str, shape: tuple[int, ...], group: int) -> ScaledMatrix:
    """Descriptions in the place of arrays."""
    weights: Any = jax.ShapeDtypeStruct(shape, jnp.dtype(numbers))
    scale: Any = jax.ShapeDtypeStruct((*shape[:-1], -(-shape[-1] // group)), jnp.float32)
    return ScaledMatrix(weights, scale, None, group)


def _why_widened(arch: ModelArch, num_devices: int, rounds_rows: bool) -> str:
    """Why GPUs widen experts of 4 bits, or of FP8 in groups; "" if they don't, or widen them in any case."""
    mixture, fmt = arch.mixture, _format_of_experts(arch)
    if mixture is None or fmt is None or not fmt.on_experts or fmt.reorders:
        return ""
    shapes = expert_shapes(arch, mixture, num_devices)
    if fmt.of_experts(shapes) is not None:
        return ""
    if fmt.packing:
        refused = (packed.refuse(fmt.packing, shape, fmt.group_of(shape[1])) for shape in shapes)
        return f"a device has {shapes} of one: {', '.join(filter(None, refused))}"
    if fmt.numbers != FLOAT8 or not arch.may_pack:
        return ""
    if not rounds_rows:
        return "only products that round rows to float8 take them (GPUs since Ada, without --weight-only)"
    return f"a device has {shapes} of one, in groups of {fmt.group}; their kernel takes whole groups of 128 n"


@functools.cache
def _log_once(message: str) -> None:
    logger.warning("%s", message)
