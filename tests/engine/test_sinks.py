"""Attention sinks of a checkpoint reach every layer's attention, in extends, chunks and decodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxsgl.models.families import FAMILIES
from tests.checkpoints import make_checkpoint
from tests.engine.conftest import ConfigMaker
from tests.engine.driving import Driver, greedy_engine
from tests.exact_model import exact_logits
from tests.plain_model import checkpoint_logits


@pytest.fixture
def with_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of a family that has sinks, below and above its scores."""
    monkeypatch.setitem(FAMILIES, "Qwen2ForCausalLM", replace(FAMILIES["Qwen2ForCausalLM"], sinks="all"))
    folder = make_checkpoint("qwen2", tmp_path, max_position_embeddings=64)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    for layer in range(2):
        sinks = 3 * np.random.default_rng(layer).normal(size=4)
        tensors[f"model.layers.{layer}.self_attn.sinks"] = sinks.astype(np.float32)
    save_file(tensors, path)
    return folder


def test_sinks_of_each_layer_count_in_extends_chunks_and_decodes(with_sinks: Path, tiny_config: ConfigMaker) -> None:
    prompts = {0: list(range(3, 30)), 1: [7], 2: [9, 8, 7, 6, 5, 4, 3]}
    exact = exact_logits(with_sinks, prompts[0])
    assert np.abs(checkpoint_logits(with_sinks, prompts[0]) - exact).max() < 1e-4
    with greedy_engine(tiny_config(model=str(with_sinks), load_format="auto")) as engine:
        tokens = Driver(engine).generate(prompts, 5, chunk=5)
    for row, prompt in prompts.items():
        chosen = exact_logits(with_sinks, [*prompt, *tokens[row]]).argmax(axis=-1)
        assert tokens[row] == chosen[len(prompt) - 1 : -1].tolist()
