"""Which tensors make our parameters, as data: what is usual, and what each architecture has otherwise.

A file for each kind. Never knows files, whose names for the same tensors are in `stored_names.py`, and not how tensors
fill a parameter (`pieces.py`). Experts are in `experts.py`, towers in `tower_names.py`, tensors that make no parameter
in `tensor_files.py`. Read by `names.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxsgl.weights.families.gemma import GEMMA
from jaxsgl.weights.families.latents import LATENTS
from jaxsgl.weights.families.layer_norms import LAYER_NORMS
from jaxsgl.weights.families.llama_like import LLAMA_LIKE
from jaxsgl.weights.families.recurrent import RECURRENT
from jaxsgl.weights.recipe import Path, Recipe

# Recipes that differ from the usual ones, or are missing there, by architecture.
OF_FAMILY: dict[str, Mapping[Path, Recipe]] = {**LLAMA_LIKE, **GEMMA, **LAYER_NORMS, **LATENTS, **RECURRENT}
