"""The decoders of transformers in NumPy and float64: the judge when two float32 results differ.

Uses neither BLAS nor threads, and none of the code that it judges: it reads the checkpoint's files itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file


def exact_logits(folder: Path, token_ids: list[int]) -> np.ndarray:
    """Logits `[T, V]` of one sequence."""
    config = json.loads((folder / "config.json").read_text())
    model = _Model(config, {name: array.astype(np.float64) for name, array in load_file(_only_file(folder)).items()})
    return model.logits(token_ids)


def _only_file(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


class _Model:
    def __init__(self, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        self._config, self._tensors = config, tensors
        self._head_dim = config["head_dim"]

    def logits(self, token_ids: list[int]) -> np.ndarray:
        x = self._tensors["model.embed_tokens.weight"][token_ids]
        for i in range(self._config["num_hidden_layers"]):
            name = f"model.layers.{i}"
            x = x + self._attention(f"{name}.self_attn", self._norm(f"{name}.input_layernorm", x))
            x = x + self._mlp(f"{name}.mlp", self._norm(f"{name}.post_attention_layernorm", x))
        head = "model.embed_tokens.weight" if self._config["tie_word_embeddings"] else "lm_head.weight"
        return np.einsum("td,vd->tv", self._norm("model.norm", x), self._tensors[head])

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        mean_square = np.square(x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + self._config["rms_norm_eps"]) * self._tensors[f"{name}.weight"]

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return np.einsum("ti,oi->to", x, self._tensors[f"{name}.weight"]) + self._tensors.get(f"{name}.bias", 0.0)

    def _mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        gate = self._linear(f"{name}.gate_proj", x)
        return self._linear(f"{name}.down_proj", gate / (1 + np.exp(-gate)) * self._linear(f"{name}.up_proj", x))

    def _attention(self, name: str, x: np.ndarray) -> np.ndarray:
        num_tokens = len(x)
        q, k, v = (
            self._linear(f"{name}.{part}_proj", x).reshape(num_tokens, -1, self._head_dim).swapaxes(0, 1)
            for part in "qkv"
        )
        if f"{name}.q_norm.weight" in self._tensors:
            q, k = self._norm(f"{name}.q_norm", q), self._norm(f"{name}.k_norm", k)
        group = len(q) // len(k)
        q, k, v = self._rotate(q), self._rotate(k).repeat(group, axis=0), v.repeat(group, axis=0)
        scores = np.einsum("nth,nsh->nts", q, k) / np.sqrt(self._head_dim)
        scores[:, ~np.tri(num_tokens, dtype=bool)] = -np.inf
        sinks = self._tensors.get(f"{name}.sinks", np.full(len(q), -np.inf))[:, None, None]
        top = np.maximum(scores.max(axis=-1, keepdims=True), sinks)
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True) + np.exp(sinks - top)
        out = np.einsum("nts,nsh->tnh", weights / total, v)
        return self._linear(f"{name}.o_proj", out.reshape(num_tokens, -1))

    def _rotate(self, x: np.ndarray) -> np.ndarray:
        """Turns each pair of numbers `[N, T, H]` that lie half a head apart by the token's position."""
        angles = np.arange(x.shape[1])[:, None] * self._frequencies()
        first, second = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _frequencies(self) -> np.ndarray:
        rope = self._config["rope_parameters"]
        plain = rope["rope_theta"] ** -(np.arange(0, self._head_dim, 2) / self._head_dim)
        if rope["rope_type"] == "default":
            return plain
        slow = plain / rope["factor"]
        if rope["rope_type"] == "linear":
            return slow
        assert rope["rope_type"] == "llama3"
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * plain / (2 * np.pi)  # within the context of the training
        share = np.clip((turns - low) / (high - low), 0, 1)
        return (1 - share) * slow + share * plain
