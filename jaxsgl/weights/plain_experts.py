"""Which layers' experts a quantized checkpoint holds unquantized, though its configuration doesn't say so.

Software that quantizes modules leaves a stack of experts, which is a parameter of its own, as it is, and excepts it
nowhere (llm-compressor). So the names of the stored tensors decide. Reads no tensors. Called where a folder's
configuration was read, before anything is made of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from jaxsgl.models import ModelArch
from jaxsgl.models.layer_spec import LayerSpec, MoeMlp
from jaxsgl.weights.converted import has_scales, is_converted
from jaxsgl.weights.experts import recipe_of_experts
from jaxsgl.weights.gguf_tensors import open_tensors
from jaxsgl.weights.names import Path as ParamPath

EXPERTS = "experts"  # in `LayerSpec.matrices`


def with_plain_experts(arch: ModelArch, folder: Path) -> ModelArch:
    """`arch`, with the experts excepted that `folder` holds unquantized. Raises `CheckpointError` for broken files."""
    fmt = arch.weight_format
    if fmt is None or fmt.storage is None or arch.mixture is None or fmt.method == "gguf":
        return arch
    if is_converted(folder):
        return _excepting(arch, lambda _, path: not has_scales(folder, path))
    shape_of, scale = open_tensors(folder).shape, fmt.storage.scale

    def is_plain(model: ModelArch, path: ParamPath) -> bool:
        recipe = recipe_of_experts(path, model, shape_of)
        assert recipe is not None
        name = recipe.sources[0].name
        stem, is_stack = name.removesuffix("weight"), not name.endswith("weight")
        scales = stem + (scale.removeprefix("weight") if is_stack else scale)
        has_scale = any(shape_of(each) is not None for each in (scales, scales + "_inv"))
        return shape_of(name) is not None and not has_scale

    return _excepting(arch, is_plain)


def _excepting(arch: ModelArch, is_plain: Callable[[ModelArch, ParamPath], bool]) -> ModelArch:
    def told(model: ModelArch, layer: int, spec: LayerSpec) -> LayerSpec:
        path: ParamPath = ("layers", layer, "mlp" if isinstance(spec.mlp, MoeMlp) else "experts", "gate_up")
        is_quantized = EXPERTS in spec.matrices - spec.unquantized
        has_mixture = isinstance(spec.mlp, MoeMlp) or spec.experts is not None
        if not (is_quantized and has_mixture and is_plain(model, path)):
            return spec
        return replace(spec, unquantized=spec.unquantized | {EXPERTS})

    after = arch.next_arch
    return replace(
        arch,
        layers=tuple(told(arch, layer, spec) for layer, spec in enumerate(arch.layers)),
        next_layer=after and told(after, 0, after.layers[0]),
    )
