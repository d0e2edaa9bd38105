"""Loads what flags name to draft with: an EAGLE-3 head, or a smaller model. Called by `engine` at start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from jax.sharding import Mesh

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.draft import Drafting, scratch_pages
from jaxsgl.engine.draft_model import ModelDrafting, check_draft_model
from jaxsgl.engine.eagle import EagleDrafting, check_head
from jaxsgl.engine.layer_state import LayerStates, layer_states
from jaxsgl.engine.sizing import choose_context_length, kept_heads
from jaxsgl.engine.weight_store import as_kept, read_params
from jaxsgl.errors import ConfigError
from jaxsgl.models import ModelArch, Precision, abstract_model, kv_cache_flag
from jaxsgl.models.eagle import EagleArch, abstract_head
from jaxsgl.weights import load_head, resolve_model_folder
from jaxsgl.weights.converted import is_converted
from jaxsgl.weights.sharding import model_on_devices


def load_drafting(
    config: EngineConfig, target: ModelArch, precision: Precision, states: LayerStates, mesh: Mesh
) -> Drafting | None:
    """What drafts for `target`, whose layers keep `states`; None if nothing does.

    Raises:
      ConfigError: it doesn't fit the model or other flags.
      CheckpointError: it can't be read.
    """
    if config.draft_model is None:
        return None
    load = _load_head if config.speculation.speculative_algorithm == "EAGLE3" else _load_model
    return load(config, resolve_model_folder(config.draft_model), target, precision, states, mesh)


def with_drafting(states: LayerStates, drafting: Drafting | None, num_rows: int) -> LayerStates:
    """What the model's layers keep, and then those of the drafter."""
    if drafting is None:
        return states
    scratch = scratch_pages(num_rows, drafting.num_drafts, states.page_size)
    return replace(states, layers=(*states.layers, *drafting.layers(scratch)))


def _load_head(
    config: EngineConfig, folder: Path, target: ModelArch, precision: Precision, states: LayerStates, mesh: Mesh
) -> Drafting:
    arch = EagleArch.from_folder(folder, target).on_devices(mesh.size)
    check_head(arch, target, states, kv_cache_flag(precision.kv))
    graphdef, _ = abstract_head(arch, precision.weights, precision.activations)
    params = load_head(folder, arch, precision.weights, mesh)
    return EagleDrafting(graphdef, params, arch, states.layers[0], config.speculation.num_draft_tokens)


def _load_model(
    config: EngineConfig, folder: Path, target: ModelArch, precision: Precision, states: LayerStates, mesh: Mesh
) -> Drafting:
    context_length, platform = choose_context_length(config, target), mesh.devices.flat[0].platform
    arch = ModelArch.from_folder(folder)
    check_draft_model(arch, target, context_length)
    arch = model_on_devices(arch.for_context(context_length), mesh.size, by_experts=False)
    if is_converted(folder):
        arch = replace(arch, may_pack=False)
    arch = as_kept(arch, precision.weights, platform, mesh.size)
    heads = kept_heads(platform, arch, mesh.size, states.page_size)
    kept = layer_states(arch, states.page_size, precision.kv, mesh.size, heads).layers
    is_alike = kept[0] == states.layers[0] and arch.kv_copies == target.kv_copies
    if config.host_kv.is_on and not is_alike:
        raise ConfigError(
            f"--host-kv-gib keeps pages of one form, but {arch.name} has other kv heads than {target.name}: leave it "
            "out with this --speculative-draft-model-path"
        )
    graphdef, _ = abstract_model(arch, precision.weights, precision.activations)
    params = read_params(config, folder, arch, precision.weights, mesh)
    return ModelDrafting(graphdef, params, arch, kept, config.speculation.num_draft_tokens)
