"""Loads what flags name to draft with: an EAGLE-3 head, the model's own next layer, or a smaller model.

Called by `engine` at start. Another kind of weights is a row of `_LOADERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.drafting.draft import NO_DRAFTING, Drafting, scratch_pages
from jaxsgl.engine.drafting.draft_model import ModelDrafting, check_draft_model
from jaxsgl.engine.drafting.heads import HeadDrafting, check_head, check_pages
from jaxsgl.engine.layer_state import LayerState, LayerStates, layer_states
from jaxsgl.engine.start.sizing import choose_context_length, kept_heads
from jaxsgl.engine.weight_formats import as_kept
from jaxsgl.engine.weight_store import arch_of_folder, read_params
from jaxsgl.errors import ConfigError
from jaxsgl.models import ModelArch, Params, Precision, abstract_model, kv_cache_flag
from jaxsgl.models.heads import EagleArch, abstract_head, abstract_next_layer
from jaxsgl.weights import (
    is_converted,
    load_head,
    load_next_layer,
    random_next_layer,
    resolve_model_folder,
)
from jaxsgl.weights.sharding import model_on_devices


class _Target(NamedTuple):
    """The model to draft for, as it is served."""

    config: EngineConfig
    folder: Path
    arch: ModelArch
    precision: Precision
    states: LayerStates
    mesh: Mesh

    @property
    def num_drafts(self) -> int:
        """k."""
        return self.config.speculation.num_draft_tokens

    @property
    def draft_folder(self) -> Path:
        """The folder of the weights that draft."""
        return resolve_model_folder(str(self.config.draft_model))


def load_drafting(
    config: EngineConfig, folder: Path, target: ModelArch, precision: Precision, states: LayerStates, mesh: Mesh
) -> Drafting:
    """What drafts for `target` of `folder`, whose layers keep `states`; `NO_DRAFTING` if nothing does.

    Raises:
      ConfigError: it doesn't fit the model or other flags.
      CheckpointError: it can't be read.
    """
    load = _LOADERS.get(str(config.speculation.speculative_algorithm))
    return NO_DRAFTING if load is None else load(_Target(config, folder, target, precision, states, mesh))


def with_drafting(states: LayerStates, drafting: Drafting, num_rows: int) -> LayerStates:
    """What the model's layers keep, and then those of the drafter."""
    scratch = scratch_pages(num_rows, drafting.num_drafts, states.page_size)
    return replace(states, layers=(*states.layers, *drafting.layers(scratch)))


def _load_head(target: _Target) -> Drafting:
    precision, folder = target.precision, target.draft_folder
    arch = EagleArch.from_folder(folder, target.arch).on_devices(target.mesh.size)
    check_head(arch, target.arch, target.states, kv_cache_flag(precision.kv))
    params = load_head(folder, arch, precision.weights, target.mesh)
    return with_head(arch, params, precision, target.states, target.num_drafts)


def with_head(
    arch: EagleArch, params: Params, precision: Precision, states: LayerStates, num_drafts: int
) -> HeadDrafting:
    """Drafts with an EAGLE-3 head for a model whose layers keep `states`."""
    graphdef, _ = abstract_head(arch, precision.weights, precision.activations)
    return HeadDrafting(
        graphdef=graphdef,
        params=params,
        taps=arch.taps,
        num_drafts=num_drafts,
        options=(arch.layer.attention_options(0),),
        like=_attending(states),
        state_size=arch.layer.hidden_size,
        copies=states.kv_copies,
    )


def _load_next_layer(target: _Target) -> Drafting:
    config, folder, precision = target.config, target.folder, target.precision
    arch = target.arch.next_arch
    if arch is None or is_converted(folder):
        raise ConfigError(
            f"--speculative-algorithm NEXTN drafts with the checkpoint's layer after the last one, but {config.model} "
            f"({target.arch.name}) has none that is read here: give NGRAM, or EAGLE3 with a head"
        )
    check_pages(kv_cache_flag(precision.kv))
    if config.load_format == "dummy":
        params = random_next_layer(arch, precision.weights, target.mesh, config.made_up_seed)
    else:
        params = load_next_layer(folder, arch, precision.weights, target.mesh)
    return with_next_layer(arch, params, precision, target.states, target.num_drafts)


def with_next_layer(
    arch: ModelArch, params: Params, precision: Precision, states: LayerStates, num_drafts: int
) -> HeadDrafting:
    """Drafts with the layer of `arch`, the `next_arch` of a model whose layers keep `states`."""
    graphdef, _ = abstract_next_layer(arch, precision.weights, precision.activations)
    return HeadDrafting(
        graphdef=graphdef,
        params=params,
        num_drafts=num_drafts,
        options=(arch.attention_options(0),),
        like=_attending(states),
        state_size=arch.hidden_size,
        copies=states.kv_copies,
    )


def _attending(states: LayerStates) -> LayerState:
    """What the first layer keeps that attends; all that do keep the same."""
    return next(layer for layer in states.layers if layer.by_page)


def _load_model(target: _Target) -> Drafting:
    config, mesh, precision, states = target.config, target.mesh, target.precision, target.states
    context_length, platform = choose_context_length(config, target.arch), mesh.devices.flat[0].platform
    folder = target.draft_folder
    arch = arch_of_folder(config, folder)
    check_draft_model(arch, target.arch, context_length)
    arch = model_on_devices(arch.for_context(context_length), mesh.size, by_experts=False)
    if is_converted(folder):
        arch = replace(arch, may_pack=False)
    arch = as_kept(arch, precision.weights, platform, mesh.size)
    _, shapes = abstract_model(arch, precision.weights)
    drafting = with_model(arch, shapes, precision, states, target.num_drafts, platform)
    is_alike = drafting.kept[0] == states.layers[0] and arch.kv_copies == target.arch.kv_copies
    if config.host_kv.is_on and not is_alike:
        raise ConfigError(
            f"--host-kv-gib keeps pages of one form, but {arch.name} has other kv heads than {target.arch.name}: leave "
            "it out with this --speculative-draft-model-path"
        )
    return replace(drafting, params=read_params(config, folder, arch, precision.weights, mesh))


def with_model(
    arch: ModelArch, params: Params, precision: Precision, states: LayerStates, num_drafts: int, platform: str
) -> ModelDrafting:
    """Drafts with the model of `arch`, as it is kept on the platform, for one whose layers keep `states`."""
    of_platform = partial(kept_heads, platform, num_devices=states.num_devices, page_size=states.page_size)
    kept = layer_states(arch, states.page_size, precision.kv, states.num_devices, of_platform).layers
    graphdef, _ = abstract_model(arch, precision.weights, precision.activations)
    options = tuple(arch.attention_options(layer) for layer in range(arch.num_layers))
    return ModelDrafting(graphdef=graphdef, params=params, num_drafts=num_drafts, options=options, kept=kept)


_LOADERS: dict[str, Callable[[_Target], Drafting]] = {
    "EAGLE3": _load_head,
    "NEXTN": _load_next_layer,
    "STANDALONE": _load_model,
}
