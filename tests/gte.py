"""GTE 1.5 in the form of its own folders: random tensors by the names there, and what they make of ids, in torch.

Written from the model's published description: BERT with a rope instead of learned positions, gates in its MLPs, and
three fused matrices; a norm after each sum. Its rope is stretched by "ntk": base and frequencies are divided alike.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional

CONFIG: dict[str, Any] = {
    "model_type": "new", "hidden_act": "gelu", "vocab_size": 200, "hidden_size": 64, "intermediate_size": 112,
    "num_hidden_layers": 3, "num_attention_heads": 4, "layer_norm_eps": 1e-12, "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False, "logn_attention_scale": False, "max_position_embeddings": 128, "pack_qkv": True,
    "pad_token_id": 0, "position_embedding_type": "rope", "rope_scaling": {"factor": 2.0, "type": "ntk"},
    "rope_theta": 500000, "torch_dtype": "float32", "type_vocab_size": 0, "unpad_inputs": False,
    "use_memory_efficient_attention": False, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.1,
}  # fmt: skip
Tensors = dict[str, torch.Tensor]


def saved_gte(folder: Path, num_types: int, num_labels: int = 0) -> Tensors:
    """A random model, saved in `folder`; with `num_labels` it has a classification head."""
    torch.manual_seed(0)
    d, f = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes = {"embeddings.word_embeddings": (CONFIG["vocab_size"], d), "embeddings.LayerNorm": (d,)}
    if num_types:
        shapes["embeddings.token_type_embeddings"] = (num_types, d)
    for layer in range(CONFIG["num_hidden_layers"]):
        parts = {
            "attention.qkv_proj": (3 * d, d), "attention.o_proj": (d, d), "attn_ln": (d,), "mlp_ln": (d,),
            "mlp.up_gate_proj": (2 * f, d), "mlp.down_proj": (d, f),
        }  # fmt: skip
        shapes |= {f"encoder.layer.{layer}.{part}": shape for part, shape in parts.items()}
    start = "new." if num_labels else ""
    if num_labels:
        shapes |= {"pooler.dense": (d, d), "classifier": (num_labels, d)}
    tensors: Tensors = {}
    for name, shape in shapes.items():
        whole = name if name == "classifier" else start + name
        is_norm = len(shape) == 1
        spread = 0.2 if is_norm else shape[-1] ** -0.5
        tensors[f"{whole}.weight"] = float(is_norm) + spread * torch.randn(shape)
        if not name.endswith(("embeddings", "up_gate_proj")):
            tensors[f"{whole}.bias"] = 0.2 * torch.randn(shape[0])
    save_file(tensors, folder / "model.safetensors")
    labels = {"id2label": {str(label): str(label) for label in range(num_labels)}} if num_labels else {}
    name = "NewForSequenceClassification" if num_labels else "NewModel"
    config = CONFIG | {"architectures": [name], "type_vocab_size": num_types} | labels
    (folder / "config.json").write_text(json.dumps(config))
    return {name.removeprefix("new."): tensor for name, tensor in tensors.items()}


def states_of(ids: list[int], tensors: Tensors) -> torch.Tensor:
    """The final states `[T, D]` of `ids`."""
    d, heads = CONFIG["hidden_size"], CONFIG["num_attention_heads"]
    h, factor = d // heads, CONFIG["rope_scaling"]["factor"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        return functional.layer_norm(x, (d,), scale, bias, CONFIG["layer_norm_eps"])

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    frequencies = (factor * CONFIG["rope_theta"]) ** -(torch.arange(0, h, 2) / h) / factor ** (2 / h)
    angles = torch.outer(torch.arange(len(ids)), frequencies).repeat(1, 2)

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()

    x = tensors["embeddings.word_embeddings.weight"][ids]
    if "embeddings.token_type_embeddings.weight" in tensors:
        x = x + tensors["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "embeddings.LayerNorm")
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"encoder.layer.{layer}."
        q, k, v = (
            part.reshape(len(ids), heads, h).swapaxes(0, 1)
            for part in linear(x, name + "attention.qkv_proj").chunk(3, dim=-1)
        )
        weights = (turned(q) @ turned(k).swapaxes(1, 2) / h**0.5).softmax(-1)
        mixed = (weights @ v).swapaxes(0, 1).reshape(len(ids), d)
        x = norm(x + linear(mixed, name + "attention.o_proj"), name + "attn_ln")
        up, gate = linear(x, name + "mlp.up_gate_proj").chunk(2, dim=-1)
        x = norm(x + linear(functional.gelu(gate) * up, name + "mlp.down_proj"), name + "mlp_ln")
    return x


def class_logits(ids: list[int], tensors: Tensors) -> torch.Tensor:
    """The logits `[C]` of the classes."""
    first = states_of(ids, tensors)[0]
    pooled = torch.tanh(functional.linear(first, tensors["pooler.dense.weight"], tensors["pooler.dense.bias"]))
    return functional.linear(pooled, tensors["classifier.weight"], tensors["classifier.bias"])
