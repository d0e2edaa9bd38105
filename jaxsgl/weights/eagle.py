"""Loads an EAGLE-3 head: the tensors of its folder, by the names of SpecForge or speculators, as sharded parameters.

A head is small: it is put together on the host. The model's embedding serves it too, so that one in the files is left
unread, unless the head is of another size. Called by the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.sharding import Mesh

from jaxsgl.errors import CheckpointError
from jaxsgl.models import Params
from jaxsgl.models.heads import EagleArch, abstract_head
from jaxsgl.weights.pieces import fuse_heads
from jaxsgl.weights.recipe import Source
from jaxsgl.weights.sharding import param_sharding
from jaxsgl.weights.tensor_files import TensorFiles

_UNREAD = ("t2d", "model.embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight")


def load_head(folder: Path, arch: EagleArch, dtype: jnp.dtype, mesh: Mesh) -> Params:
    """The parameters of the head in `folder`; a tree like `abstract_head`'s.

    Raises `CheckpointError` for tensors that are missing, of another shape than config.json says, or unknown.
    """
    reader = _Reader(folder, arch)
    tensors = reader.tensors()
    _, abstract = abstract_head(arch, dtype, dtype)
    params = []
    for path, param in nnx.to_flat_state(abstract):
        numbers = tensors.pop(".".join(map(str, path)))
        assert numbers.shape == param.shape, f"{path} is {numbers.shape}, but must be {param.shape}"
        params.append((path, param.replace(jax.device_put(numbers.astype(param.dtype), param_sharding(param, mesh)))))
    assert not tensors, f"no parameters for {list(tensors)}"
    return nnx.from_flat_state(params)


class _Reader:
    """Reads tensors of a head's files, and notes which."""

    def __init__(self, folder: Path, arch: EagleArch) -> None:
        self._folder, self._arch = folder, arch
        self._files = TensorFiles(folder)
        self._prefix = "model." if "model.embed_tokens.weight" in self._files.names() else ""  # TensorFiles adds it
        self._read: set[str] = set()

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """By the path of each parameter."""
        arch, layer, prefix = self._arch, self._arch.layer, self._arch.prefix
        d, f, h = layer.hidden_size, layer.ffn_size, layer.head_dim
        heads, kv_heads = layer.num_heads * h, layer.stored_kv_heads * h
        shapes = {"q": (heads, 2 * d), "k": (kv_heads, 2 * d), "v": (kv_heads, 2 * d)}
        q, k, v = (self._tensor(f"{prefix}self_attn.{name}_proj.weight", shape) for name, shape in shapes.items())
        qkv = np.empty((layer.num_kv_heads, layer.num_heads // layer.num_kv_heads + 2, h, 2 * d), q.dtype)
        for place, numbers in fuse_heads(layer, (q, k, v)):
            qkv[place] = numbers[tuple(slice(None) for _ in numbers.shape)]
        gate, up = (self._tensor(f"{prefix}mlp.{name}_proj.weight", (f, d)) for name in ("gate", "up"))
        found = {
            "fc": self._tensor("fc.weight", (d, 3 * arch.target_size)),
            "qkv": qkv,
            "o": self._tensor(f"{prefix}self_attn.o_proj.weight", (d, heads)),
            "mlp.gate_up": np.stack([gate, up]),
            "mlp.down": self._tensor(f"{prefix}mlp.down_proj.weight", (d, f)),
            "embedding_norm": self._tensor(f"{prefix}input_layernorm.weight", (d,)),
            "hidden_norm": self._tensor(f"{prefix}hidden_norm.weight", (d,)),
            "mlp_norm": self._tensor(f"{prefix}post_attention_layernorm.weight", (d,)),
            "final_norm": self._tensor("norm.weight", (d,)),
            "lm_head": self._tensor("lm_head.weight", (arch.draft_vocab_size, d)),
            "target_ids": self._target_ids(),
        }
        if arch.has_embedding:
            found["embedding"] = self._tensor("embed_tokens.weight", (layer.vocab_size, d))
            if not found["embedding"].any():
                raise CheckpointError(
                    f"{self._folder}: embed_tokens.weight is zeros, but a head of {d} numbers can't take the model's, "
                    f"which has {arch.target_size}"
                )
        unknown = sorted(name for name in self._files.names() if name not in self._read and not self._is_harmless(name))
        if unknown:
            raise CheckpointError(f"{self._folder}: tensors that are not part of a head: {', '.join(unknown[:3])}")
        return found

    def _tensor(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        stored = self._stored(name)
        found = self._files.shape(stored)
        if found is None:
            raise CheckpointError(f"{self._folder}: tensor {name} is missing, but an EAGLE-3 head needs it")
        if found != shape:
            raise CheckpointError(f"{self._folder}: tensor {name} has shape {found}, but config.json asks for {shape}")
        self._read.add(stored)
        return self._files.tensor(Source(stored, None), self._arch.layer)

    def _target_ids(self) -> npt.NDArray[np.int64]:
        """The model's id of each token that the head drafts: d2t says how far it is from the head's own."""
        size, vocab_size = self._arch.draft_vocab_size, self._arch.layer.vocab_size
        ids = np.arange(size)
        if self._files.shape(self._stored("d2t")) is not None:
            ids = ids + self._tensor("d2t", (size,)).astype(np.int64)
        elif size != vocab_size:
            raise CheckpointError(
                f"{self._folder}: tensor d2t is missing, but the head drafts {size} tokens of {vocab_size}"
            )
        if size > vocab_size or ids.min() < 0 or ids.max() >= vocab_size:
            raise CheckpointError(f"{self._folder}: d2t names tokens beyond the vocabulary of {vocab_size}")
        return ids

    def _stored(self, name: str) -> str:
        return name if name.startswith("lm_head.") else self._prefix + name

    def _is_harmless(self, name: str) -> bool:
        own = name.removeprefix(self._prefix) if self._prefix else name
        return own in _UNREAD or name in _UNREAD or own.endswith("rotary_emb.inv_freq")
