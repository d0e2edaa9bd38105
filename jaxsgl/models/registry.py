"""The model families that the one dense decoder serves, as data. `arch.py` reads it; it imports nothing.

A new family of dense decoders is a new entry here (and, when its tensors are named otherwise, in `weights/names.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """What the name of an architecture implies beyond its config.json.

    Attributes:
      qk_norm: RMSNorm over the head size of every q and k, before rope.
      qkv_bias: whether q, k and v have biases; None: config.json says it in `attention_bias`.
      attention_out_bias: the same for the output projection.
      mlp_bias: the same for the MLP, in `mlp_bias`.
      default_head_dim: H where config.json has no `head_dim`; None: D / N.
    """

    qk_norm: bool = False
    qkv_bias: bool | None = None
    attention_out_bias: bool | None = None
    mlp_bias: bool | None = None
    default_head_dim: int | None = None


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(qkv_bias=True, attention_out_bias=False, mlp_bias=False),
    "Qwen3ForCausalLM": Family(qk_norm=True, mlp_bias=False, default_head_dim=128),
}
