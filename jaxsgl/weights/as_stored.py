"""What a folder's tensors show of a model that its configuration leaves unsaid or says wrongly, as transformers has it.

Experts that are not quantized: software that quantizes modules leaves a stack of experts, which is a parameter of its
own, as it is, and excepts it nowhere (llm-compressor). An output head that is not the embedding, or that is quantized,
though both are said to be tied. Owns these two rules. Called where a configuration was read, before anything is made
of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxsgl.models import ModelArch
from jaxsgl.models.layer_spec import LayerSpec, MoeMlp
from jaxsgl.models.matrix import part_name
from jaxsgl.weights import stored_matrix
from jaxsgl.weights.converted import has_param, is_converted
from jaxsgl.weights.experts import recipe_of_experts
from jaxsgl.weights.gguf_tensors import has_tensors, open_tensors
from jaxsgl.weights.names import Path as ParamPath
from jaxsgl.weights.names import Source, stored_name
from jaxsgl.weights.tensor_files import TensorFiles

EXPERTS = "experts"  # in `LayerSpec.matrices`
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS = 4096  # compared at a time

logger = logging.getLogger(__name__)


def as_stored(arch: ModelArch, folder: Path) -> ModelArch:
    """`arch` as the tensors of `folder` show it, if there are any. Raises `CheckpointError` for broken files."""
    if not is_converted(folder) and not has_tensors(folder):
        return arch
    return _with_own_head(_with_plain_experts(arch, folder), folder)


def _with_own_head(arch: ModelArch, folder: Path) -> ModelArch:
    """`arch` with a head of its own if `folder` holds one that differs from the embedding."""
    if not arch.tie_embeddings or arch.head != "vocabulary":
        return arch
    if is_converted(folder):
        return replace(arch, tie_embeddings=not has_param(folder, ("lm_head",)))
    tensors = open_tensors(folder)
    if not isinstance(tensors, TensorFiles):
        return arch
    embedding, head = (Source(stored_name(name, arch), None) for name in (EMBEDDING, HEAD))
    for storage in filter(None, (fmt.storage for fmt in arch.stored_formats)):
        parts = (head.name.removesuffix("weight") + part for part in stored_matrix.tensor_names(storage, False))
        if all(tensors.shape(part) is not None for part in parts):
            return replace(arch, tie_embeddings=False)
    if {tensors.shape(source.name) for source in (embedding, head)} != {(arch.vocab_size, arch.hidden_size)}:
        return arch
    one, other = (tensors.tensor(source, arch) for source in (embedding, head))
    if all(np.array_equal(one[i : i + ROWS], other[i : i + ROWS]) for i in range(0, len(one), ROWS)):
        return arch
    logger.warning(
        "%s ties the output head to the embedding (tie_word_embeddings), but %s differs from %s: it is not tied, as in "
        "transformers", folder / "config.json", head.name, embedding.name,
    )  # fmt: skip
    return replace(arch, tie_embeddings=False)


def _with_plain_experts(arch: ModelArch, folder: Path) -> ModelArch:
    """`arch` with the experts excepted that `folder` holds unquantized."""
    fmt = arch.weight_format
    if fmt is None or fmt.storage is None or arch.mixture is None or fmt.method == "gguf":
        return arch
    if is_converted(folder):
        if fmt.of_experts(()) is None:  # they were dequantized, if they were quantized
            return arch
        return _excepting(arch, lambda _, path: not has_param(folder, (*path[:-1], part_name(str(path[-1]), "scale"))))
    shape_of, scale = open_tensors(folder).shape, fmt.storage.scale

    def is_plain(model: ModelArch, path: ParamPath) -> bool:
        recipe = recipe_of_experts(path, model, shape_of)
        assert recipe is not None
        name = recipe.sources[0].name
        is_stack = not name.endswith("weight")
        scales = stored_matrix.names_in_stack(name, scale) if is_stack else (name.removesuffix("weight") + scale,)
        has_scale = any(shape_of(each) is not None for of in scales for each in (of, of + "_inv"))
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
        next_layer=None if after is None else told(after, 0, after.layers[0]),
    )
