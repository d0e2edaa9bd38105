"""The weights that training of the bundled model starts from: random, with copying heads put in.

Copying from context needs two layers: a head in one looks at the token before, and a head in the next finds the place
where the current token stood before and copies the token after it (an "induction head"; Olsson et al. 2022). Gradient
descent alone would need more tokens to find that than this whole training has, so the first two layers start with such
heads. All weights are trained afterwards.

The residual stream has four parts at first: the token, a constant, the token before, and the token before that one.
Owns only these numbers. Called by `make/model.py`.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from tiny.model import HEAD_SIZE, HEADS, HIDDEN, KV_HEADS, LAYERS, MLP, ROPE_THETA, VOCABULARY, Params

TOKEN = slice(0, 128)
CONSTANT = 128
BEFORE = slice(129, 169)  # 40 dimensions for the token before
BEFORE_THAT = slice(169, 192)  # 23 for the one before that
TOKEN_NORM = 0.83
SHARPNESS = 1.6  # scale of the norms of queries and keys in the layers with such heads
COPY_STRENGTH = 2.5  # strength of a copied token against the current one
# Energy per rotary pair, fastest pair first, in the heads that look 1 or 2 tokens back.
PAIR_ENERGY = np.array([2.0, 2.0, 1.5, 1.0, 0.7, 0.5])
HALF = HEAD_SIZE // 2
SLOW_PAIRS = np.arange(13, HALF)  # these turn by less than one radian in about 100 tokens, so they carry content
SLOW = np.concatenate([SLOW_PAIRS, SLOW_PAIRS + HALF])


def _orthonormal(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """A matrix [rows, columns] with orthonormal rows."""
    return np.linalg.qr(rng.normal(size=(columns, rows)))[0].T


def _head(index: int) -> slice:
    return slice(index * HEAD_SIZE, (index + 1) * HEAD_SIZE)


def _look_back(distance: int) -> np.ndarray:
    """A query [H] that, against the key `_look_back(0)`, peaks `distance` tokens back."""
    pairs = np.arange(len(PAIR_ENERGY))
    angles = -distance * ROPE_THETA ** (-pairs / HALF)
    query = np.zeros(HEAD_SIZE)
    query[pairs] = np.sqrt(PAIR_ENERGY) * np.cos(angles)
    query[pairs + HALF] = np.sqrt(PAIR_ENERGY) * np.sin(angles)
    return query


def init_params(seed: int) -> Params:
    """Float32 weights under their Hugging Face names. Matrices are [out, in]; all other sublayers add nothing."""
    rng = np.random.default_rng(seed)
    params: dict[str, np.ndarray] = {}
    embedding = np.zeros((VOCABULARY, HIDDEN))
    embedding[:, TOKEN] = rng.normal(0.0, TOKEN_NORM / np.sqrt(128), (VOCABULARY, 128))
    embedding[:, CONSTANT] = 0.3
    params["model.embed_tokens.weight"] = embedding
    for layer in range(LAYERS):
        attention = {
            "q_proj": rng.normal(0.0, HIDDEN**-0.5, (HEADS * HEAD_SIZE, HIDDEN)),
            "k_proj": rng.normal(0.0, HIDDEN**-0.5, (KV_HEADS * HEAD_SIZE, HIDDEN)),
            "v_proj": rng.normal(0.0, HIDDEN**-0.5, (KV_HEADS * HEAD_SIZE, HIDDEN)),
            "o_proj": np.zeros((HIDDEN, HEADS * HEAD_SIZE)),
            "q_norm": np.full(HEAD_SIZE, SHARPNESS if layer < 2 else 1.0),
            "k_norm": np.full(HEAD_SIZE, SHARPNESS if layer < 2 else 1.0),
        }
        if layer == 0:
            shared = _orthonormal(rng, HEAD_SIZE, 128)
            _draw_look_back_heads(attention, shared)
        if layer == 1:
            _draw_copying_heads(attention, shared, rng)
        mlp = {
            "gate_proj": rng.normal(0.0, HIDDEN**-0.5, (MLP, HIDDEN)),
            "up_proj": rng.normal(0.0, HIDDEN**-0.5, (MLP, HIDDEN)),
            "down_proj": np.zeros((HIDDEN, MLP)),
        }
        prefix = f"model.layers.{layer}"
        params |= {f"{prefix}.self_attn.{name}.weight": value for name, value in attention.items()}
        params |= {f"{prefix}.mlp.{name}.weight": value for name, value in mlp.items()}
        params[f"{prefix}.input_layernorm.weight"] = np.ones(HIDDEN)
        params[f"{prefix}.post_attention_layernorm.weight"] = np.ones(HIDDEN)
    params["model.norm.weight"] = np.ones(HIDDEN)
    return {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}


def _draw_look_back_heads(attention: dict[str, np.ndarray], shared: np.ndarray) -> None:
    """Heads 0 and 1 write `shared @ token` of 1 and 2 tokens back to their parts of the stream."""
    attention["k_proj"][_head(0)] = 0.0
    attention["k_proj"][_head(0), CONSTANT] = 3 * _look_back(0)
    attention["v_proj"][_head(0)] = 0.0
    attention["v_proj"][_head(0), TOKEN] = shared / 4
    for head, part in ((0, BEFORE), (1, BEFORE_THAT)):
        attention["q_proj"][_head(head)] = 0.0
        attention["q_proj"][_head(head), CONSTANT] = 3 * _look_back(head + 1)
        width = part.stop - part.start
        rows = np.arange(width)
        # The norm before attention multiplies by about 16. This undoes it, so that the parts have equal size.
        attention["o_proj"][part.start + rows, head * HEAD_SIZE + rows] = 0.25


def _draw_copying_heads(attention: dict[str, np.ndarray], shared: np.ndarray, rng: np.random.Generator) -> None:
    """Heads 0 and 2 look for places whose two tokens before are the last two tokens, and copy from there."""
    width = BEFORE_THAT.stop - BEFORE_THAT.start
    near, far = SLOW[:25], SLOW[25:]
    basis = _orthonormal(rng, 128, 128)
    for kv_head in range(KV_HEADS):
        head = kv_head * HEADS // KV_HEADS
        query = np.zeros((HEAD_SIZE, HIDDEN))
        key = np.zeros((HEAD_SIZE, HIDDEN))
        mix = _orthonormal(rng, len(near), 40)
        query[near, TOKEN] = mix @ shared[:40]
        key[near, BEFORE] = mix
        mix = _orthonormal(rng, len(far), width)
        query[far, BEFORE.start : BEFORE.start + width] = mix
        key[far, BEFORE_THAT] = mix
        attention["q_proj"][_head(head)] = 3 * query
        attention["k_proj"][_head(kv_head)] = 3 * key
        half = basis[kv_head * HEAD_SIZE : (kv_head + 1) * HEAD_SIZE]
        attention["v_proj"][_head(kv_head)] = 0.0
        attention["v_proj"][_head(kv_head), TOKEN] = half / 4
        attention["o_proj"][TOKEN, _head(head)] = half.T * COPY_STRENGTH / 4
