"""The time of a step on the device: a formula with a few coefficients per kind of step.

    seconds = launch + max(weights, token x T) + max(kv_token x KV, pair x pairs)

T: tokens, padding included. KV: tokens whose keys and values are read. pairs: (token, token that it attends to). The
products and the attention of a layer run one after the other, and each is bound by memory or by compute. Sequences that
decode in an extend step add the time to read their KV, which is assumed not to overlap with anything. Coefficients come
from data sheets (`data_sheet_costs`) or from measured steps (`fit.py`). Knows no requests and no clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from jaxsgl.models import DenseMlp, LayerSpec, ModelArch, RopeParams, arch_from_folder

BYTES_PER_VALUE = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients of one kind of step, in seconds: two per step, then per padded token, per KV token and per pair."""

    launch_s: float
    weights_s: float
    token_s: float
    kv_token_s: float
    pair_s: float

    def seconds(self, tokens: int, kv_tokens: int, pairs: float, num_steps: int = 1) -> float:
        """Seconds of a step of `tokens` tokens, padding included, that reads `kv_tokens` and computes `pairs` scores.

        For several steps in one launch, KV tokens and pairs are those of all steps.
        """
        products = num_steps * max(self.weights_s, self.token_s * tokens)
        return self.launch_s + products + max(self.kv_token_s * kv_tokens, self.pair_s * pairs)


Costs: TypeAlias = Mapping[str, StepCost]  # by kind: "decode", and "extend" for all other steps


@dataclass(frozen=True)
class Hardware:
    """A device: figures of its data sheet, and the shares of them that steps are assumed to reach.

    Attributes:
      flops_per_s: of dense bfloat16 products.
      bytes_per_s, memory_bytes: bandwidth and size of device memory.
      products_share: share of the FLOP/s in matrix products; attention_share: in the attention of an extend.
      memory_share: share of the bandwidth.
      launch_s: seconds that every step costs, whatever it computes.
    """

    flops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    products_share: float = 0.6
    attention_share: float = 0.4
    memory_share: float = 0.8
    launch_s: float = 200e-6


HARDWARE = {"h200": Hardware(flops_per_s=989e12, bytes_per_s=4.8e12, memory_bytes=141e9)}


def _qwen3(hidden_size: int, num_layers: int, num_heads: int, ffn_size: int, tied: bool) -> ModelArch:
    return ModelArch(
        name="Qwen3ForCausalLM",
        vocab_size=151_936,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        layers=(LayerSpec(DenseMlp(ffn_size)),) * num_layers,
        ropes=(RopeParams(theta=1e6),),
        rms_norm_eps=1e-6,
        tie_embeddings=tied,
        attention_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        qk_norm="head",
        max_context=40_960,
        dtype="bfloat16",
        eos_token_ids=(151_645,),
    )


MODELS = {"qwen3-8b": _qwen3(4096, 36, 32, 12_288, False), "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, True)}


def arch_of(model: str) -> ModelArch:
    """The shape with this name in `MODELS`, or of a folder with a config.json. Raises `CheckpointError`."""
    return MODELS[model] if model in MODELS else arch_from_folder(Path(model))


def num_params(arch: ModelArch) -> tuple[int, int]:
    """Numbers of parameters in all layers, and in the embedding (once)."""
    heads = 2 * arch.num_heads + 2 * arch.num_kv_heads  # q and out, k and v
    layer = arch.hidden_size * (heads * arch.head_dim + 3 * arch.ffn_size)
    return arch.num_layers * layer, arch.vocab_size * arch.hidden_size


def weight_bytes(arch: ModelArch) -> int:
    """Bytes of all parameters in bfloat16, without biases and norms."""
    layers, embedding = num_params(arch)
    return BYTES_PER_VALUE * (layers + (1 if arch.tie_embeddings else 2) * embedding)


def data_sheet_costs(hardware: Hardware, arch: ModelArch) -> dict[str, StepCost]:
    """Costs that are assumed, not measured:

    bytes and FLOPs of the shape over the shares of the data sheet's figures.
    """
    layers, head = num_params(arch)
    products, bandwidth = hardware.flops_per_s * hardware.products_share, hardware.bytes_per_s * hardware.memory_share
    weights_s = BYTES_PER_VALUE * (layers + head) / bandwidth
    kv_token_s = BYTES_PER_VALUE * 2 * arch.num_layers * arch.num_kv_heads * arch.head_dim / bandwidth
    flops_per_pair = 4 * arch.num_layers * arch.num_heads * arch.head_dim
    pair_s = flops_per_pair / (hardware.flops_per_s * hardware.attention_share)
    decode = StepCost(hardware.launch_s, weights_s, 2 * (layers + head) / products, kv_token_s, 0.0)
    extend = StepCost(hardware.launch_s, weights_s, 2 * layers / products, kv_token_s, pair_s)  # few logits
    return {"decode": decode, "extend": extend}


def equal_pairs(tokens: int, seqs: int, kv_tokens: int) -> float:
    """Pairs for `tokens` new tokens in `seqs` sequences with `kv_tokens` tokens in all, if all sequences are equal."""
    new, length = tokens / seqs, kv_tokens / seqs
    return seqs * new * (length - (new - 1) / 2)


def read_steps(path: Path) -> list[dict[str, float | str]]:
    """Reads measured steps, one JSON object per line: kind, tokens, seqs, kv_tokens, seconds, and pairs if known."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
