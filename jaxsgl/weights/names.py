"""Maps Hugging Face tensor names to our parameters, as data: which tensors make a parameter, and how they are fused.

A checkpoint stores projections as `[out, in]`; ours are `[..., in]`. The fusing functions run inside a jitted program
on the target devices. Knows no files; `loading.py` reads this table.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxsgl.models import ModelArch
from jaxsgl.models.rope import split_half_order

Path = tuple[Hashable, ...]  # of a parameter within the model, as ("layers", 3, "mlp", "down")
Fuse = Callable[[ModelArch, tuple[jax.Array, ...]], jax.Array]


@dataclass(frozen=True)
class Source:
    """One tensor of a checkpoint.

    Attributes:
      name: the tensor's name; `{}` stands for the layer's index.
      axes: the tensor's shape, as names of `sizes`.
    """

    name: str
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Recipe:
    """How a parameter is made: `fuse(arch, tensors of the sources)`."""

    sources: tuple[Source, ...]
    fuse: Fuse


def sizes(arch: ModelArch) -> dict[str, int]:
    """Length of every axis named by a `Source`."""
    return {
        "V": arch.vocab_size,
        "D": arch.hidden_size,
        "F": arch.ffn_size,
        "H": arch.head_dim,
        "NH": arch.num_heads * arch.head_dim,
        "KH": arch.num_kv_heads * arch.head_dim,
    }


def _as_is(arch: ModelArch, tensors: tuple[jax.Array, ...]) -> jax.Array:
    return tensors[0]


def _norm(arch: ModelArch, tensors: tuple[jax.Array, ...]) -> jax.Array:
    """A norm's scales, with the model's offset."""
    return tensors[0] if arch.norm_offset == 0 else tensors[0].astype(jnp.float32) + arch.norm_offset


def _head_norm(arch: ModelArch, tensors: tuple[jax.Array, ...]) -> jax.Array:
    """The scales `[H]` of a norm of queries or keys, in the order of their dimensions."""
    return _turned(arch, _norm(arch, tensors), axis=0)


def _all_heads_norm(arch: ModelArch, tensors: tuple[jax.Array, ...]) -> jax.Array:
    """The scales of a norm over all heads of queries `[N * H]` or keys `[K * H]`, to `[K, heads per kv head, H]`."""
    return _turned(arch, _norm(arch, tensors).reshape(arch.num_kv_heads, -1, arch.head_dim), axis=2)


def _fuse_heads(arch: ModelArch, tensors: tuple[jax.Array, ...]) -> jax.Array:
    """Fuses q `[N * H]`, k and v `[K * H]` to `[K, G + 2, H]`; a trailing axis D stays."""
    rest = tensors[0].shape[1:]
    q, k, v = (tensor.reshape(arch.num_kv_heads, -1, arch.head_dim, *rest) for tensor in tensors)
    return jnp.concatenate([_turned(arch, q, axis=2), _turned(arch, k, axis=2), v], axis=1)


def _turned(arch: ModelArch, x: jax.Array, axis: int) -> jax.Array:
    """The dimensions of heads, from the checkpoint's order to that of `rope_tables`; all ropes of a model share one."""
    order = split_half_order(arch.ropes[0], arch.head_dim) if arch.ropes else None
    return x if order is None else jnp.take(x, np.array(order), axis=axis)


def _fuse_gate_up(arch: ModelArch, tensors: tuple[jax.Array, ...]) -> jax.Array:
    """Stacks gate and up `[F, D]` to `[2, F, D]`; biases `[F]` to `[2, F]`."""
    return jnp.stack(tensors)


_ATTENTION = "model.layers.{}.self_attn."
_MLP = "model.layers.{}.mlp."

OF_MODEL: dict[Path, Recipe] = {
    ("embedding",): Recipe((Source("model.embed_tokens.weight", ("V", "D")),), _as_is),
    ("final_norm",): Recipe((Source("model.norm.weight", ("D",)),), _norm),
    ("lm_head",): Recipe((Source("lm_head.weight", ("V", "D")),), _as_is),
}

# A row per layer, in one array.
OF_ALL_LAYERS: dict[Path, Recipe] = {
    ("vectors", "attention_norm"): Recipe((Source("model.layers.{}.input_layernorm.weight", ("D",)),), _norm),
    ("vectors", "mlp_norm"): Recipe((Source("model.layers.{}.post_attention_layernorm.weight", ("D",)),), _norm),
    ("vectors", "q_norm"): Recipe((Source(_ATTENTION + "q_norm.weight", ("H",)),), _head_norm),
    ("vectors", "k_norm"): Recipe((Source(_ATTENTION + "k_norm.weight", ("H",)),), _head_norm),
    ("vectors", "qkv_bias"): Recipe(
        (
            Source(_ATTENTION + "q_proj.bias", ("NH",)),
            Source(_ATTENTION + "k_proj.bias", ("KH",)),
            Source(_ATTENTION + "v_proj.bias", ("KH",)),
        ),
        _fuse_heads,
    ),
}

OF_LAYER: dict[Path, Recipe] = {
    ("attention", "qkv"): Recipe(
        (
            Source(_ATTENTION + "q_proj.weight", ("NH", "D")),
            Source(_ATTENTION + "k_proj.weight", ("KH", "D")),
            Source(_ATTENTION + "v_proj.weight", ("KH", "D")),
        ),
        _fuse_heads,
    ),
    ("attention", "o"): Recipe((Source(_ATTENTION + "o_proj.weight", ("D", "NH")),), _as_is),
    ("attention", "o_bias"): Recipe((Source(_ATTENTION + "o_proj.bias", ("D",)),), _as_is),
    ("mlp", "gate_up"): Recipe(
        (Source(_MLP + "gate_proj.weight", ("F", "D")), Source(_MLP + "up_proj.weight", ("F", "D"))), _fuse_gate_up
    ),
    ("mlp", "gate_up_bias"): Recipe(
        (Source(_MLP + "gate_proj.bias", ("F",)), Source(_MLP + "up_proj.bias", ("F",))), _fuse_gate_up
    ),
    ("mlp", "down"): Recipe((Source(_MLP + "down_proj.weight", ("D", "F")),), _as_is),
    ("mlp", "down_bias"): Recipe((Source(_MLP + "down_proj.bias", ("D",)),), _as_is),
}


# Recipes that differ from those above, or are missing there, by architecture.
OF_FAMILY: dict[str, Mapping[Path, Recipe]] = {}

# What scales K, V or both of a layer's KV cache in float8, by the end of the tensor's name: compressed-tensors and its
# older form, ModelOpt, Quark. Scales of queries and probabilities belong to attention in float8, which ours is not.
KV_SCALES = {
    "k_scale": "k", "attn.k_scale": "k", "k_proj.k_scale": "k", "qkv_proj.k_scale": "k", "k_proj.output_scale": "k",
    "v_scale": "v", "attn.v_scale": "v", "v_proj.v_scale": "v", "qkv_proj.v_scale": "v", "v_proj.output_scale": "v",
    "kv_scale": "kv", "attn.kv_scale": "kv",
}  # fmt: skip
_UNUSED_SCALES = ("q_scale", "q_proj.q_scale", "q_proj.output_scale", "prob_scale", "prob_output_scale")
_OF_ATTENTION = re.compile(re.escape(_ATTENTION).replace(r"\{\}", r"(\d+)") + r"(.+)")


def kv_scale_of(name: str) -> tuple[int, str] | None:
    """The layer, and "k", "v" or "kv" for both, whose cache a tensor of that name scales; None for any other tensor."""
    match = _OF_ATTENTION.fullmatch(name)
    return None if match is None or match[2] not in KV_SCALES else (int(match[1]), KV_SCALES[match[2]])


def recipe_of(path: Path, arch: ModelArch) -> Recipe:
    """The recipe of the parameter at `path`, with the layers' indices filled in."""
    own = OF_FAMILY.get(arch.name, {})
    if path[0] == "vectors":
        recipe = own.get(path) or OF_ALL_LAYERS[path]
        rows = [_of_layer(recipe.sources, layer) for layer in range(arch.num_layers)]
        return Recipe(tuple(itertools.chain(*rows)), partial(_stack_layers, recipe.fuse))
    if path[0] != "layers":
        return own.get(path) or OF_MODEL[path]
    recipe = own.get(path[2:]) or OF_LAYER[path[2:]]
    return Recipe(_of_layer(recipe.sources, path[1]), recipe.fuse)


def _of_layer(sources: tuple[Source, ...], layer: Hashable) -> tuple[Source, ...]:
    return tuple(Source(source.name.format(layer), source.axes) for source in sources)


def _stack_layers(fuse: Fuse, arch: ModelArch, tensors: tuple[jax.Array, ...]) -> jax.Array:
    """Row l is what `fuse` makes of the tensors of layer l; all layers have equally many."""
    per_layer = len(tensors) // arch.num_layers
    return jnp.stack([fuse(arch, tensors[first : first + per_layer]) for first in range(0, len(tensors), per_layer)])


def is_harmless(name: str, arch: ModelArch) -> bool:
    """Whether a tensor may be left unread: rope's constants, a tied head's copy, what predicts further tokens, scales.

    The scales of the KV cache are read by themselves (`kv_scales.py`), if it is float8.
    """
    of_attention = _OF_ATTENTION.fullmatch(name)
    if of_attention is not None and (of_attention[2] in KV_SCALES or of_attention[2].endswith(_UNUSED_SCALES)):
        return True
    if name.startswith("mtp.") or name.endswith("rotary_emb.inv_freq"):
        return True
    return arch.tie_embeddings and name == "lm_head.weight"
