"""Loads what flags name to draft with: an EAGLE-3 head. Called by `engine` at start."""

from __future__ import annotations

from dataclasses import replace

from jax.sharding import Mesh

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.draft import Drafting, scratch_pages
from jaxsgl.engine.eagle import EagleDrafting, check_head
from jaxsgl.engine.layer_state import LayerStates
from jaxsgl.models import ModelArch, Precision, kv_cache_flag
from jaxsgl.models.eagle import EagleArch, abstract_head
from jaxsgl.weights import load_head, resolve_model_folder


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
    folder = resolve_model_folder(config.draft_model)
    arch = EagleArch.from_folder(folder, target).on_devices(mesh.size)
    check_head(arch, target, states, kv_cache_flag(precision.kv))
    graphdef, _ = abstract_head(arch, precision.weights, precision.activations)
    params = load_head(folder, arch, precision.weights, mesh)
    num_drafts = config.speculation.num_draft_tokens
    return EagleDrafting(graphdef, params, arch, states.layers[0], num_drafts, mesh.size)


def with_drafting(states: LayerStates, drafting: Drafting | None, num_rows: int) -> LayerStates:
    """What the model's layers keep, and then those of the drafter."""
    if drafting is None:
        return states
    scratch = scratch_pages(num_rows, drafting.num_drafts, states.page_size)
    return replace(states, layers=(*states.layers, *drafting.layers(scratch)))
