"""The bundled model as large as one likes: it answers as before, and a step costs what its size costs.

Matrices get rows and columns of zeros, and layers come that add nothing. The hidden size is four times as large, so
that the mean of squares is a quarter and the scales of norms, halved, make up for it exactly. Knows no engine.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from bench.models import tensor_shapes
from bench.output import write_json
from jaxsgl.config.engine import BUNDLED_MODEL

WIDER = 4
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")


def write_inflated(folder: Path, layers: int, ffn: int) -> Path:
    """Writes the bundled model with so many layers, and `ffn` columns in each of their MLPs; returns `folder`."""
    source = Path(BUNDLED_MODEL)
    config = json.loads((source / "config.json").read_text())
    assert layers >= config["num_hidden_layers"] and ffn >= config["intermediate_size"]
    larger = {name: WIDER * config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")}
    larger |= {"num_hidden_layers": layers, "intermediate_size": ffn}
    tensors = load_file(source / "model.safetensors")
    pattern = {name.replace("model.layers.0.", ""): of_0 for name, of_0 in tensors.items() if ".layers.0." in name}
    for layer in range(config["num_hidden_layers"], layers):
        rng = np.random.default_rng(layer)
        for name, like in pattern.items():
            adds_nothing = name in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            values = np.zeros(like.shape) if adds_nothing else rng.standard_normal(like.shape) / 16
            tensors[f"model.layers.{layer}.{name}"] = values.astype(like.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, folder)
    write_json(folder / "config.json", config | larger)
    shapes = tensor_shapes(config | larger)
    padded = {name: _padded(name, values, shapes[name]) for name, values in tensors.items()}
    save_file(padded, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _padded(name: str, values: npt.NDArray[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """A tensor with zeros where the larger model has more."""
    if any(name.endswith(norm) for norm in NORMS):
        values = (values.astype(np.float32) / WIDER**0.5).astype(values.dtype)
    out = np.zeros(shape, values.dtype)
    out[tuple(slice(size) for size in values.shape)] = values
    return out
