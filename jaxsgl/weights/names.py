"""Maps Hugging Face tensor names to our parameters: finds the recipe of each, by the tables of `families`.

Knows what of an architecture decides between recipes, and no names. The loader reads it through `quantized.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from jaxsgl.models import ModelArch
from jaxsgl.models.layer_spec import GroupedAttention
from jaxsgl.weights import pieces
from jaxsgl.weights.families import OF_FAMILY
from jaxsgl.weights.families.latents import of_groups
from jaxsgl.weights.families.usual import (
    GATED_NUMBERS,
    NARROW_VALUES,
    OF_ALL_LAYERS,
    OF_LAYER,
    OF_MODEL,
    OF_NEXT_LAYER,
    READS_KEYS,
    VALUES_ARE_KEYS,
)
from jaxsgl.weights.recipe import Path, Recipe, Source
from jaxsgl.weights.stored_names import stored_name


def recipe_of(path: Path, arch: ModelArch) -> Recipe:
    """The recipe of the parameter at `path`, with the layers' indices filled in."""
    own = {**OF_FAMILY.get(arch.name, {}), **(OF_NEXT_LAYER if arch.stage.is_next else {})}

    def named(sources: tuple[Source, ...], layer: int | None = None) -> tuple[Source, ...]:
        place = arch.stage.layers_before + (layer or 0)
        return tuple(
            replace(each, name=stored_name(each.name.format(place), arch), layer=layer)
            for source in sources
            for each in _of_each(source, arch)
        )

    if path[0] == "vectors":
        recipe = own.get(path) or OF_ALL_LAYERS[path]
        layers = tuple(_layers_of(str(path[1]), arch))
        rows = [named(recipe.sources, layer) for layer in layers]
        of_layer = recipe.pieces
        if path[1] in ("q_norm", "k_norm") and len(arch.all_heads) > 1:
            of_layer = partial(pieces.padded, of_layer, max(heads.size for heads in arch.all_heads))
        return Recipe(tuple(itertools.chain(*rows)), partial(pieces.stack_layers, of_layer, layers))
    if path[0] != "layers":
        recipe = own.get(path) or OF_MODEL[path]
        return Recipe(named(recipe.sources), recipe.pieces, recipe.computed)
    assert isinstance(path[1], int)
    spec = arch.layers[path[1]]
    own |= NARROW_VALUES if arch.value_dim is not None else {}
    own = {**GATED_NUMBERS, **own} if arch.output_gate == "number" else own
    if spec.keys_from is not None or spec.values_are_keys:
        own |= VALUES_ARE_KEYS if spec.values_are_keys else READS_KEYS
    if isinstance(spec.mixer, GroupedAttention) and spec.mixer.groups is not None and spec.mixer.groups.index is None:
        own |= of_groups(has_index=False)
    recipe = own.get(path[2:]) or OF_LAYER[path[2:]]
    if not arch.gated and path[2] == "mlp" and str(path[3]).startswith("gate_up") and len(recipe.sources) > 1:
        recipe = replace(recipe, sources=recipe.sources[1:])  # up alone
    return Recipe(named(recipe.sources, path[1]), recipe.pieces, recipe.computed)


def _of_each(source: Source, arch: ModelArch) -> tuple[Source, ...]:
    """The source, or one of each query head, kv head or further stream where its name has a place for that."""
    if "*" not in source.name:
        return (source,)
    number = arch.num_heads if ".q_" in source.name else arch.stored_kv_heads
    if arch.num_streams > 1:
        number = arch.num_streams - 1
    return tuple(replace(source, name=source.name.replace("*", str(each))) for each in range(number))


def path_in_model(path: Path, arch: ModelArch) -> Path:
    """The path of a parameter of a pipeline stage in the whole model."""
    before = arch.stage.layers_before
    return (path[0], before + path[1], *path[2:]) if path[0] == "layers" and isinstance(path[1], int) else path


def with_heads_at(path: Path, arch: ModelArch) -> ModelArch:
    """The model as if all layers had the kv heads of that which the parameter at `path` belongs to."""
    if path[0] != "layers" or not isinstance(path[1], int):
        return arch
    return arch.with_heads_of(arch.layers[path[1]])


def _layers_of(vectors: str, arch: ModelArch) -> Iterable[int]:
    """The layers that have rows in these vectors: all, or those of one kind."""
    if vectors == "q_norm":
        return arch.attention_layers + arch.reading_layers
    if vectors in ("k_norm", "qkv_bias", "gate_bias"):
        return arch.attention_layers
    if vectors.removesuffix("_bias") in arch.normed:
        return arch.normed[vectors.removesuffix("_bias")]
    return arch.recurrent_layers if vectors.startswith(("delta_", "mamba_", "conv_")) else range(arch.num_layers)
