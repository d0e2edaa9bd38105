"""An EAGLE-3 head for the bundled model: its shape, its training forward pass, and the folder that it is stored in.

A head drafts tokens from what its model computed (EAGLE-3, arXiv 2503.01840). For token i + 1 it reads the embedding of
token i and three residual streams of the model at token i - 1, the newest that there are; for token i + 2 its own
output takes their place, and so on. It is stored in SpecForge's format. As in serving, the first token of a text, which
has no streams before it, is a key and a value of zeros. Never knows corpora or serving, and shares no code with the
engine. Called by `make/head.py`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.flax import save

from tiny import model
from tiny.model import HEAD_SIZE, HEADS, HIDDEN, KV_HEADS, MLP, VOCABULARY, Array, Params, norm, rotate

TAPS = (1, 2, 3)  # layers whose outputs the head reads
GROUP = HEADS // KV_HEADS
MASKED = -1e9


def config() -> dict[str, object]:
    """The head's config.json."""
    kept = (
        "head_dim", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads",
        "num_key_value_heads", "rms_norm_eps", "rope_theta", "torch_dtype", "vocab_size",
    )  # fmt: skip
    of_model = model.config()
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{key: of_model[key] for key in kept},
        "tie_word_embeddings": False,
        "draft_vocab_size": VOCABULARY,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS), "use_aux_hidden_state": True},
    }


def init_params(seed: int, target: Params) -> Params:
    """Random weights, but for the output head and its norm, which begin as the model's."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> jax.Array:
        return jnp.asarray(rng.normal(0, 1 / math.sqrt(columns), (rows, columns)), jnp.float32)

    def ones() -> jax.Array:
        return jnp.ones(HIDDEN, jnp.float32)

    return {
        "fc.weight": matrix(HIDDEN, len(TAPS) * HIDDEN),
        "midlayer.input_layernorm.weight": ones(),
        "midlayer.hidden_norm.weight": ones(),
        "midlayer.self_attn.q_proj.weight": matrix(HEADS * HEAD_SIZE, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_SIZE, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_SIZE, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_SIZE),
        "midlayer.post_attention_layernorm.weight": ones(),
        "midlayer.mlp.gate_proj.weight": matrix(MLP, HIDDEN),
        "midlayer.mlp.up_proj.weight": matrix(MLP, HIDDEN),
        "midlayer.mlp.down_proj.weight": matrix(HIDDEN, MLP),
        "norm.weight": jnp.array(target["model.norm.weight"]),
        "lm_head.weight": jnp.array(target["model.embed_tokens.weight"]),
    }


def taps(streams: list[jax.Array]) -> jax.Array:
    """`[B, T, 3 D]` what the head reads of the model's streams."""
    return jnp.concatenate([streams[layer + 1] for layer in TAPS], axis=-1)


def unrolled(
    params: Params, embedding_VD: jax.Array, taps_BTE: jax.Array, ids_BT: Array, document_BT: Array, passes: int
) -> list[jax.Array]:
    """Logits `[B, T, V]` of each pass j: what the head says of token t + 1, j drafts after it last read streams.

    The drafts are taken to be right: pass j reads token t, and the output of pass j - 1 at token t - 1. Its queries see
    the keys of streams up to token t - j, then one of each later pass. Rows of the first j tokens of a document mean
    nothing.
    """
    length = ids_BT.shape[1]
    is_first = (_before(jnp.asarray(document_BT)) != document_BT).at[:, 0].set(True)
    place = np.arange(length)
    same = document_BT[:, :, None] == document_BT[:, None, :]
    embedded = embedding_VD[ids_BT]
    hidden = _before(taps_BTE @ params["fc.weight"].T)
    keys, values, results = [], [], []
    for j in range(passes):
        both = jnp.concatenate(
            [norm(embedded, _of(params, "input_layernorm")), norm(hidden, _of(params, "hidden_norm"))], axis=-1
        )
        q, k, v = (_heads(both, _of(params, f"self_attn.{name}_proj")) for name in "qkv")
        kept = jnp.where(is_first, 0.0, 1.0)[:, :, None, None]
        keys.append(rotate(k) * kept)
        values.append(v * kept)
        q = rotate(q).reshape(*ids_BT.shape, KV_HEADS, GROUP, HEAD_SIZE) / math.sqrt(HEAD_SIZE)
        scores = [jnp.einsum("btkgd,bskd->bkgts", q, keys[0])]
        scores[0] += jnp.where((place[None, :] <= place[:, None] - j) & same, 0.0, MASKED)[:, None, None]
        own = [(_back(keys[m], j - m), _back(values[m], j - m)) for m in range(1, j + 1)]
        scores += [jnp.einsum("btkgd,btkd->bkgt", q, key)[..., None] for key, _ in own]
        shares = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
        out = jnp.einsum("bkgts,bskd->btkgd", shares[..., :length], values[0])
        for m, (_, value) in enumerate(own):
            out += jnp.einsum("bkgt,btkd->btkgd", shares[..., length + m], value)
        x = hidden + out.reshape(*ids_BT.shape, -1) @ _of(params, "self_attn.o_proj").T
        y = norm(x, _of(params, "post_attention_layernorm"))
        y = jax.nn.silu(y @ _of(params, "mlp.gate_proj").T) * (y @ _of(params, "mlp.up_proj").T)
        x = x + y @ _of(params, "mlp.down_proj").T
        results.append(norm(x, params["norm.weight"]) @ params["lm_head.weight"].T)
        hidden = _before(x)
    return results


def _of(params: Params, name: str) -> jax.Array:
    return params[f"midlayer.{name}.weight"]


def _heads(x: jax.Array, weight: jax.Array) -> jax.Array:
    return (x @ weight.T).reshape(*x.shape[:2], -1, HEAD_SIZE)


def _before(x_BT: jax.Array) -> jax.Array:
    """What stands one place earlier, at each place of the second axis."""
    return _back(x_BT, 1)


def _back(x_BT: jax.Array, places: int) -> jax.Array:
    return jnp.roll(x_BT, places, axis=1)


def places(document_BT: np.ndarray) -> np.ndarray:
    """`[B, T]` how many tokens of its document stand before each token."""
    length = document_BT.shape[1]
    starts = np.ones(document_BT.shape, bool)
    starts[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    return np.arange(length) - np.maximum.accumulate(np.where(starts, np.arange(length), 0), axis=1)


def save_folder(folder: Path, params: Params) -> None:
    """Writes the head, its weights rounded to bfloat16; readers see each file whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.astype(jnp.bfloat16) for name, value in params.items()}
    files = {
        "config.json": (json.dumps(config(), indent=2) + "\n").encode(),
        "model.safetensors": save(weights, metadata={"format": "pt"}),
    }
    for name, content in files.items():
        part = folder / f"{name}.part"
        part.write_bytes(content)
        part.replace(folder / name)
