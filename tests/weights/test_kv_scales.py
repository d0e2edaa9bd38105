"""Scales of a float8 KV cache are found under every name that checkpoints use, and checked."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from jaxsgl.errors import CheckpointError
from jaxsgl.models import arch_from_folder
from jaxsgl.weights import KvScales, load_kv_scales, load_params
from tests.checkpoints import make_checkpoint
from tests.models.test_arch import LLAMA
from tests.plain_model import mesh_of
from tests.weights.test_loading import rewrite

LAYER = "model.layers.{}.self_attn."


def load(folder: Path, scales: dict[str, Any]) -> KvScales:
    """Of a checkpoint of two layers and two kv heads that holds nothing else; names follow `LAYER` of layer 0."""
    (folder / "config.json").write_text(json.dumps({**LLAMA, "num_key_value_heads": 2}))
    tensors = {"model.norm.weight": torch.ones(1)}
    for name, scale in scales.items():
        full = name if "model." in name else LAYER.format(0) + name
        tensors[full] = scale if isinstance(scale, torch.Tensor) else torch.tensor(scale)
    save_file(tensors, folder / "model.safetensors")
    return load_kv_scales(folder, arch_from_folder(folder))


def told(scales: KvScales) -> list[float | None]:
    """The single numbers of K by layer, then of V."""
    return [None if scale is None else float(scale) for scale in (*scales.k, *scales.v)]


@pytest.mark.parametrize(
    ("of_k", "of_v"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_scales_of_k_and_v_are_found_by_name(of_k: str, of_v: str, tmp_path: Path) -> None:
    scales = load(tmp_path, {of_k: 0.5, of_v: torch.tensor([0.25], dtype=torch.bfloat16)})
    assert told(scales) == [0.5, None, 0.25, None]


@pytest.mark.parametrize("name", ["kv_scale", "attn.kv_scale", "k_scale", "v_scale"])
def test_one_scale_holds_for_k_and_v(name: str, tmp_path: Path) -> None:
    scales = load(tmp_path, {name: 0.5})
    assert scales.k[0] == scales.v[0] == 0.5


def test_scales_of_a_decoder_within_a_larger_model_are_found(tmp_path: Path) -> None:
    scales = load(tmp_path, {"language_model.model.layers.1.self_attn.k_proj.k_scale": 0.5})
    assert told(scales) == [None, 0.5, None, 0.5]


def test_scales_in_nemotron_hs_own_names_are_found(tmp_path: Path) -> None:
    """As ModelOpt writes them; the attention is the checkpoint's fourth layer."""
    folder = make_checkpoint("nemotron_h", tmp_path)
    of_k, of_v = (f"backbone.layers.3.mixer.{part}_proj.{part}_scale".replace(".", "__") for part in "kv")
    rewrite(folder, **{of_k: torch.tensor(0.5), of_v: torch.tensor(0.25)})
    arch = arch_from_folder(folder)
    load_params(folder, arch, jnp.dtype("float32"), mesh_of())
    assert told(load_kv_scales(folder, arch)) == [0.5, 0.25]


def test_a_scale_of_one_costs_nothing(tmp_path: Path) -> None:
    names: dict[str, Any] = {LAYER.format(layer) + part: 1.0 for layer in range(2) for part in ("k_scale", "v_scale")}
    assert load(tmp_path, names) == KvScales.of_one(2)


def test_scales_may_differ_by_kv_head(tmp_path: Path) -> None:
    scales = load(tmp_path, {"k_scale": torch.tensor([[0.5], [0.25]]), "v_scale": 2.0})
    np.testing.assert_array_equal(np.asarray(scales.k[0]), [0.5, 0.25])
    assert scales.v[0] == 2


def test_layers_without_scales_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scales = load(tmp_path, {"model.layers.1.self_attn.k_scale": 0.5, "model.layers.7.self_attn.k_scale": 0.5})
    assert told(scales) == [None, 0.5, None, 0.5]
    assert "has scales of the KV cache for 1 of 2 layers" in caplog.text


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (0.0, "k_scale holds 0.0; a scale of the KV cache must be a positive number"),
        (-1.0, "holds -1.0"),
        (float("nan"), "holds nan"),
        ([1.0, 2.0, 3.0], r"k_scale has shape \(3,\); .* one for each of the 2 kv heads"),
    ],
)
def test_scales_that_cannot_be_are_refused(scale: float | list[float], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path, {"k_scale": scale})


def test_scales_are_no_unknown_tensors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whether they are used or not: the weights load as without them, and nothing is said."""
    folder = make_checkpoint("qwen3", tmp_path)
    names = ("k_scale", "v_scale", "q_scale", "k_proj.output_scale", "q_proj.output_scale", "prob_output_scale")
    rewrite(folder, **{(LAYER.format(1) + name).replace(".", "__"): torch.tensor(0.5) for name in names})
    with caplog.at_level(logging.WARNING):
        load_params(folder, arch_from_folder(folder), jnp.dtype("float32"), mesh_of())
    assert not caplog.text
