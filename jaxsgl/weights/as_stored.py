"""What a folder's tensors show of a model that its configuration leaves unsaid or says wrongly, as transformers has it.

Matrices that are not quantized: software that quantizes modules leaves a stack of experts, which is a parameter of its
own, as it is, and excepts it nowhere (llm-compressor); that for GPTQ and AWQ may leave out modules without a word. An
output head that is not the embedding, or that is quantized, though both are said to be tied. The dtype, which not all
configurations name (gpt-oss). Owns these three rules. Called where a configuration was read, before anything is made of
it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxsgl.models import ModelArch
from jaxsgl.models.arch_file import DTYPES
from jaxsgl.models.layer_spec import RECURRENT_NETS, LayerSpec, MoeMlp, RecurrentNet
from jaxsgl.models.matrix import part_name
from jaxsgl.weights import stored_matrix
from jaxsgl.weights.converted import is_converted, params_of, read_manifest
from jaxsgl.weights.experts import ShapeOf, recipe_of_experts
from jaxsgl.weights.gguf_tensors import has_tensors, open_tensors
from jaxsgl.weights.names import recipe_of
from jaxsgl.weights.recipe import Path as ParamPath
from jaxsgl.weights.recipe import Source
from jaxsgl.weights.stored_names import stored_name
from jaxsgl.weights.tensor_files import EMBEDDING, HEAD, ROWS, TensorFiles

EXPERTS = "experts"  # in `LayerSpec.matrices`

logger = logging.getLogger(__name__)


def as_stored(arch: ModelArch, folder: Path) -> ModelArch:
    """`arch` as the tensors of `folder` show it, if there are any. Raises `CheckpointError` for broken files."""
    if not is_converted(folder) and not has_tensors(folder):
        return arch
    return _with_own_head(_with_plain_matrices(_with_own_dtype(arch, folder), folder), folder)


def _with_own_dtype(arch: ModelArch, folder: Path) -> ModelArch:
    """`arch` with the dtype of the tensors, if its configuration names none."""
    if arch.names_dtype:
        return arch
    if is_converted(folder):
        found = read_manifest(folder)["params"].get("embedding", {}).get("dtype")
        return replace(arch, dtype=found) if found in DTYPES else arch
    tensors = open_tensors(folder)
    found = tensors.main_dtype() if isinstance(tensors, TensorFiles) else None
    return replace(arch, dtype=found or arch.dtype)


def _with_own_head(arch: ModelArch, folder: Path) -> ModelArch:
    """`arch` with a head of its own if `folder` holds one that differs from the embedding."""
    if not arch.tie_embeddings or arch.head != "vocabulary":
        return arch
    if is_converted(folder):
        return replace(arch, tie_embeddings=not params_of(folder)(("lm_head",)))
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


def _with_plain_matrices(arch: ModelArch, folder: Path) -> ModelArch:
    """`arch` with the layers' matrices excepted that `folder` holds unquantized."""
    fmt = arch.weight_format
    if fmt is None or fmt.storage is None or fmt.method == "gguf":
        return arch
    if is_converted(folder):
        # What is dequantized has no scale, quantized or not.
        has_param = params_of(folder)
        unknown = {"kv_b"} if fmt.of_experts(()) is not None else {"kv_b", EXPERTS}

        def has_no_scale(model: ModelArch, paths: Sequence[ParamPath], matrix: str) -> bool:
            scales = ((*path[:-1], part_name(str(path[-1]), "scale")) for path in paths)
            return matrix not in unknown and not any(map(has_param, scales))

        return _excepting(arch, has_no_scale)
    shape_of, scale = open_tensors(folder).shape, fmt.storage.scale

    def is_plain(model: ModelArch, paths: Sequence[ParamPath], matrix: str) -> bool:
        recipes = [recipe_of_experts(path, model, shape_of) or recipe_of(path, model) for path in paths]
        names = [source.name for recipe in recipes for source in recipe.sources]
        return all(_is_plain(name, scale, shape_of) for name in (names[:1] if matrix == EXPERTS else names))

    return _excepting(arch, is_plain)


def _is_plain(name: str, scale: str, shape_of: ShapeOf) -> bool:
    """Whether there is a tensor of that name, and none of its scales."""
    is_stack = not name.endswith("weight")
    scales = stored_matrix.names_in_stack(name, scale) if is_stack else (name.removesuffix("weight") + scale,)
    has_scale = any(shape_of(each) is not None for of in scales for each in (of, of + "_inv"))
    return shape_of(name) is not None and not has_scale


# Where the parameters are within a layer that have other names than `LayerSpec.matrices`; experts are told apart below.
_PATHS: dict[str, tuple[ParamPath, ...]] = {
    "gate_up": (("mlp", "gate_up"),),
    "down": (("mlp", "down"),),
    "shared": (("mlp", "shared", "gate_up"), ("mlp", "shared", "down")),
    "embedding_gate": (("embedding_gate", "gate"),),
    "embedding_out": (("embedding_gate", "out"),),
}


_PATHS_OF_STATES: dict[type[RecurrentNet], dict[str, tuple[ParamPath, ...]]] = {
    kind: {
        "state_inputs": ((kind.module, "qkvz" if kind.num_gates else "inputs"),),
        "state_output": ((kind.module, "output"),),
    }
    for kind in RECURRENT_NETS
}


def _excepting(arch: ModelArch, is_plain: Callable[[ModelArch, Sequence[ParamPath], str], bool]) -> ModelArch:
    def told(model: ModelArch, layer: int, spec: LayerSpec) -> LayerSpec:
        of_experts: ParamPath = ("mlp" if isinstance(spec.mlp, MoeMlp) else "experts", "gate_up")
        of_states = _PATHS_OF_STATES[type(spec.mixer)] if isinstance(spec.mixer, RecurrentNet) else {}
        has_shared = isinstance(spec.mlp, MoeMlp) and spec.mlp.shared_ffn_size > 0
        plain = set()
        for matrix in spec.matrices - spec.unquantized - (set() if has_shared else {"shared"}):
            paths = (of_experts,) if matrix == EXPERTS else of_states.get(matrix) or _PATHS.get(matrix)
            paths = paths or (("attention", matrix),)
            if is_plain(model, [("layers", layer, *path) for path in paths], matrix):
                plain.add(matrix)
        return replace(spec, unquantized=spec.unquantized | plain)

    after = arch.next_arch
    return replace(
        arch,
        layers=tuple(told(arch, layer, spec) for layer, spec in enumerate(arch.layers)),
        next_layer=None if after is None else told(after, 0, after.layers[0]),
    )
