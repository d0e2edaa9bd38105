"""The bundled model's shape, its training forward pass, its tokenizer, and the folder it is stored in.

Owns the checkpoint in Hugging Face's layout. Never knows corpora, optimizers or serving: this forward pass is dense and
batched for training. It shares no code with the engine's paged one, so that the two check each other. Called by
`make/model.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.flax import load_file, save
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tiny.documents import END_OF_TEXT, SPECIAL_TOKENS, TURN_END

Array: TypeAlias = jax.Array | np.ndarray
Params = dict[str, jax.Array]

VOCABULARY = 1024
HIDDEN = 192
LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD_SIZE = 64
MLP = 512
CONTEXT = 2048
ROPE_THETA = 100_000.0
EPSILON = 1e-6
QUERY_BLOCK = 128

# Splits as Qwen does: words with the mark or space before them, single digits, marks, line ends, runs of spaces.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def config() -> dict[str, object]:
    """The checkpoint's config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": VOCABULARY - len(SPECIAL_TOKENS) + SPECIAL_TOKENS.index(TURN_END),
        "pad_token_id": VOCABULARY - len(SPECIAL_TOKENS) + SPECIAL_TOKENS.index(END_OF_TEXT),
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": MLP,
        "max_position_embeddings": CONTEXT,
        "max_window_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": EPSILON,
        "rope_scaling": None,
        "rope_theta": ROPE_THETA,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCABULARY,
    }


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """RMSNorm."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPSILON) * weight


def rotate(x_BTHd: jax.Array) -> jax.Array:
    """Rotary embedding at positions 0..T-1. Only differences of positions count, so packed documents share them."""
    half = HEAD_SIZE // 2
    frequencies = ROPE_THETA ** (-np.arange(half) / half)
    angles = np.arange(x_BTHd.shape[1])[:, None] * frequencies
    cos, sin = (jnp.asarray(f(angles), jnp.float32)[:, None, :] for f in (np.cos, np.sin))
    first, second = x_BTHd[..., :half], x_BTHd[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attend(q_BTKGH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, bias_B11TT: jax.Array) -> jax.Array:
    """Causal attention [B, T, K, G, H] in blocks of queries, so that keys after a block cost nothing."""
    outputs = []
    for start in range(0, q_BTKGH.shape[1], QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, q_BTKGH.shape[1])
        scores = jnp.einsum("btkgd,bskd->bkgts", q_BTKGH[:, start:end], k_BTKH[:, :end])
        shares = jax.nn.softmax(scores + bias_B11TT[..., start:end, :end], axis=-1)
        outputs.append(jnp.einsum("bkgts,bskd->btkgd", shares, v_BTKH[:, :end]))
    return jnp.concatenate(outputs, axis=1)


def forward(params: Params, ids_BT: Array, document_BT: Array) -> jax.Array:
    """Logits [B, T, V], float32. A token sees the earlier tokens of its row with the same document number."""
    return logits(params, streams(params, ids_BT, document_BT)[-1])


def logits(params: Params, x_BTD: jax.Array) -> jax.Array:
    """Logits [B, T, V] of what the last layer yields."""
    return norm(x_BTD, params["model.norm.weight"]) @ params["model.embed_tokens.weight"].T


def streams(params: Params, ids_BT: Array, document_BT: Array) -> list[jax.Array]:
    """The residual stream [B, T, D] before each layer and after the last one; see `forward`."""
    batch, length = ids_BT.shape
    mask = jnp.tril(jnp.ones((length, length), bool)) & (document_BT[:, :, None] == document_BT[:, None, :])
    bias_B11TT = jnp.where(mask, 0.0, -1e9)[:, None, None]
    found = [params["model.embed_tokens.weight"][ids_BT]]
    for layer in range(LAYERS):
        x = found[-1]

        def weight(name: str, layer: int = layer) -> jax.Array:
            return params[f"model.layers.{layer}.{name}.weight"]

        def heads(y: jax.Array, name: str) -> jax.Array:
            return (y @ weight(f"self_attn.{name}_proj").T).reshape(batch, length, -1, HEAD_SIZE)

        y = norm(x, weight("input_layernorm"))
        q = rotate(norm(heads(y, "q"), weight("self_attn.q_norm")))
        k = rotate(norm(heads(y, "k"), weight("self_attn.k_norm")))
        q = q.reshape(batch, length, KV_HEADS, HEADS // KV_HEADS, HEAD_SIZE) / math.sqrt(HEAD_SIZE)
        y = _attend(q, k, heads(y, "v"), bias_B11TT).reshape(batch, length, -1)
        x = x + y @ weight("self_attn.o_proj").T
        y = norm(x, weight("post_attention_layernorm"))
        y = jax.nn.silu(y @ weight("mlp.gate_proj").T) * (y @ weight("mlp.up_proj").T)
        found.append(x + y @ weight("mlp.down_proj").T)
    return found


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE over `texts`: 256 bytes, merges, and the special tokens last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    assert tokenizer.get_vocab_size() == VOCABULARY, tokenizer.get_vocab_size()
    return tokenizer


def save_folder(folder: Path, params: Params, tokenizer: Tokenizer) -> None:
    """Writes the checkpoint; readers see each file whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    model_config = config()
    eos_ids = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    assert eos_ids == [model_config["eos_token_id"], model_config["pad_token_id"]]
    tokenizer_config = {
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": CONTEXT,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    generation_config = {"do_sample": False, "eos_token_id": eos_ids, "pad_token_id": eos_ids[1]}
    texts = {
        "config.json": json.dumps(model_config, indent=2) + "\n",
        "generation_config.json": json.dumps(generation_config, indent=2) + "\n",
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2) + "\n",
        "tokenizer.json": tokenizer.to_str(pretty=False) + "\n",
        "chat_template.jinja": _CHAT_TEMPLATE,
    }
    weights = {name: value.astype(jnp.bfloat16) for name, value in params.items()}
    files: dict[str, bytes] = {name: text.encode() for name, text in texts.items()}
    files["model.safetensors"] = save(weights, metadata={"format": "pt"})
    for name, content in files.items():
        part = folder / f"{name}.part"
        part.write_bytes(content)
        part.replace(folder / name)


def load_folder(folder: Path) -> tuple[Params, Tokenizer]:
    """The stored (rounded) weights as float32, and the tokenizer."""
    weights = load_file(folder / "model.safetensors")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return {name: value.astype(jnp.float32) for name, value in weights.items()}, tokenizer
