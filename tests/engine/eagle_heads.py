"""Random EAGLE-3 heads in both formats, and what they draft by NumPy, from all tokens at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

SIZE, HEADS, KV_HEADS, HEAD_DIM, FFN = 32, 4, 2, 16, 48  # those of the model in conftest.py
THETA, EPS = 10000.0, 1e-5
Weights = dict[str, np.ndarray]

LAYER: dict[str, Any] = {
    "hidden_size": SIZE, "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM, "intermediate_size": FFN, "vocab_size": 101, "max_position_embeddings": 64,
    "rms_norm_eps": EPS, "rope_theta": THETA, "hidden_act": "silu",
}  # fmt: skip


def random_head(seed: int, draft_vocab_size: int) -> Weights:
    """By SpecForge's names; `d2t` where the head drafts a part of the vocabulary."""
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

    heads, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    weights = {
        "fc.weight": matrix(SIZE, 3 * SIZE),
        "midlayer.self_attn.q_proj.weight": matrix(heads, 2 * SIZE),
        "midlayer.self_attn.k_proj.weight": matrix(kv, 2 * SIZE),
        "midlayer.self_attn.v_proj.weight": matrix(kv, 2 * SIZE),
        "midlayer.self_attn.o_proj.weight": matrix(SIZE, heads),
        "midlayer.mlp.gate_proj.weight": matrix(FFN, SIZE),
        "midlayer.mlp.up_proj.weight": matrix(FFN, SIZE),
        "midlayer.mlp.down_proj.weight": matrix(SIZE, FFN),
        "lm_head.weight": matrix(draft_vocab_size, SIZE),
    }
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        weights[f"{name}.weight"] = rng.uniform(0.5, 1.5, SIZE).astype(np.float32)
    if draft_vocab_size < LAYER["vocab_size"]:
        ids = np.sort(rng.permutation(LAYER["vocab_size"])[:draft_vocab_size])
        weights["d2t"] = ids - np.arange(draft_vocab_size)
        weights["t2d"] = np.isin(np.arange(LAYER["vocab_size"]), ids)
    return weights


def write_specforge(folder: Path, weights: Weights, **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = LAYER | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(weights["lm_head.weight"])}
    (folder / "config.json").write_text(json.dumps(config | more))
    save_file(weights, folder / "model.safetensors")
    return folder


def write_speculators(folder: Path, weights: Weights, taps: Sequence[int], **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(weights["lm_head.weight"]),
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "transformer_layer_config": LAYER,
        "speculators_config": {"algorithm": "eagle3"},
    }
    (folder / "config.json").write_text(json.dumps(config | more))
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in weights.items()}
    renamed["embed_tokens.weight"] = np.zeros((LAYER["vocab_size"], SIZE), np.float32)
    save_file(renamed, folder / "model.safetensors")
    return folder


class PlainHead:
    """Drafts after a text, without pages, chunks or steps.

    Args:
      weights: by SpecForge's names.
      embedding: `[V, D]` of the model.
      streams: `[T, 3 D]` that the head reads of the model, of tokens.
    """

    def __init__(
        self,
        weights: Weights,
        embedding: np.ndarray,
        streams: Callable[[Sequence[int]], np.ndarray],
        residual_after_norm: bool = False,
    ) -> None:
        self._weights, self._embedding, self._streams = weights, embedding, streams
        self._residual_after_norm = residual_after_norm

    def shifted(self) -> PlainHead:
        """One that reads the streams of the token before the one before."""
        head = PlainHead(self._weights, self._embedding, lambda ids: np.roll(self._streams(ids), 1, axis=0))
        head._residual_after_norm = self._residual_after_norm
        return head

    def drafts(self, ids: Sequence[int], count: int) -> list[int]:
        """The greedy chain after `ids`, of which the model has not computed the last one."""
        states = self._streams(ids[:-1]) @ self._weights["fc.weight"].T
        kept = [(np.zeros((KV_HEADS, HEAD_DIM)), np.zeros((KV_HEADS, HEAD_DIM)))]
        for place in range(1, len(ids) - 1):
            _, key, value = self._qkv(states[place - 1], ids[place], place)
            kept.append((key, value))
        hidden, token, found = states[-1], ids[-1], list[int]()
        for place in range(len(ids) - 1, len(ids) - 1 + count):
            query, key, value = self._qkv(hidden, token, place)
            kept.append((key, value))
            hidden = self._layer(hidden, self._attended(query, kept))
            best = int(np.argmax(self._norm(hidden, "norm") @ self._weights["lm_head.weight"].T))
            token = best + int(self._weights["d2t"][best]) if "d2t" in self._weights else best
            found.append(token)
        return found

    def _qkv(self, hidden: np.ndarray, token: int, place: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        both = [self._norm(self._embedding[token], "midlayer.input_layernorm")]
        both.append(self._norm(hidden, "midlayer.hidden_norm"))
        q, k, v = (
            (self._weights[f"midlayer.self_attn.{name}_proj.weight"] @ np.concatenate(both)).reshape(-1, HEAD_DIM)
            for name in "qkv"
        )
        angles = place * THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        return _turned(q, angles), _turned(k, angles), v

    def _attended(self, query: np.ndarray, kept: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        out = []
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = np.array([query[head] @ key[kv_head] for key, _ in kept]) / HEAD_DIM**0.5
            shares = np.exp(scores - scores.max())
            out.append(
                sum(share * value[kv_head] for share, (_, value) in zip(shares / shares.sum(), kept, strict=True))
            )
        return np.concatenate(out)

    def _layer(self, hidden: np.ndarray, attended: np.ndarray) -> np.ndarray:
        x = self._norm(hidden, "midlayer.hidden_norm") if self._residual_after_norm else hidden
        x = x + self._weights["midlayer.self_attn.o_proj.weight"] @ attended
        y = self._norm(x, "midlayer.post_attention_layernorm")
        gate, up = (self._weights[f"midlayer.mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
        return x + self._weights["midlayer.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x) + EPS) * self._weights[f"{name}.weight"]


def _turned(heads: np.ndarray, angles: np.ndarray) -> np.ndarray:
    first, second = np.split(heads, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
