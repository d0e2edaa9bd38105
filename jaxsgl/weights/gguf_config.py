"""Makes the values of a config.json of a GGUF file's metadata: llama.cpp's words for a model's sizes and constants.

Owns which of llama.cpp's architectures are served, as data, and what a key means. A key that is not understood is
refused by its name, as in any config.json. Never reads files, as `gguf_file.py` does. Called by `gguf_folder.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxsgl.errors import CheckpointError
from jaxsgl.models import families as models
from jaxsgl.weights.gguf_file import GgufTensor


@dataclass(frozen=True)
class GgufFamily:
    """What the name of one of llama.cpp's architectures implies.

    Attributes:
      architecture: the name in config.json.
      of_experts: that of a file with experts; None: there are none.
      in_pairs: rows of q and k lie so that neighbouring ones turn together, unlike the checkpoint's.
      rotary_share: the rope's dimensions may be a part of a head's.
      keys: llama.cpp's keys, with those of config.json that have the same value.
      values: further keys of config.json, which llama.cpp knows by the architecture.
      further: computes more of them.
    """

    architecture: str
    of_experts: str | None = None
    in_pairs: bool = False
    rotary_share: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    further: Callable[[_Metadata], dict[str, Any]] = lambda said: {}


class _Metadata:
    """The keys that begin with the architecture's name; remembers which were asked for."""

    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor], where: str) -> None:
        self._where = where
        self.name = str(metadata["general.architecture"])
        self.tensors = tensors
        prefix = f"{self.name}."
        self._values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        self._asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """A value; of a list of one for each layer, that of all of them.

        Files have numbers in float32. The shortest decimal of one is what it was made of.
        """
        self._asked.add(key)
        value = self._values.get(key, default)
        if isinstance(value, float):
            return float(str(np.float32(value)))
        if isinstance(value, list) and value:
            if any(each != value[0] for each in value):
                raise self._differs(key)
            return value[0]
        return value

    def number(self, key: str) -> Any:
        """A value that must be there."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self._where}: {self.name}.{key} is {value}, but must be a number")
        return value

    def layer_types(self) -> dict[str, Any]:
        """Which layers have windows, where the file says so and not llama.cpp's code: a list, or every how many not."""
        self._asked.add(_PATTERN)
        told, count = self._values.get(_PATTERN), self.number("block_count")
        if not told:
            return {}
        slides = told if isinstance(told, list) else [(layer + 1) % told != 0 for layer in range(count)]
        return {"layer_types": ["sliding_attention" if each else "full_attention" for each in slides]}

    def kv_heads(self) -> list[int]:
        """Of each layer; 0 of those that don't attend. All others have the same number."""
        self._asked.add(_KV_HEADS)
        told, count = self._values.get(_KV_HEADS, self.number(_HEADS)), int(self.number("block_count"))
        heads = told if isinstance(told, list) else [told] * count
        if len(set(heads) - {0}) > 1:
            raise self._differs(_KV_HEADS)
        if len(heads) != count or not any(heads):
            raise self.refuse(_KV_HEADS)
        return heads

    def head_dim(self) -> int:
        return int(self.get("attention.key_length", self.number("embedding_length") // self.number(_HEADS)))

    def _differs(self, key: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: {self.name}.{key} differs by layer, which is not supported")

    def refuse(self, key: str) -> CheckpointError:
        """The error of a value that is not supported."""
        return CheckpointError(f"{self._where}: {self.name}.{key} is {self._values.get(key)}, which is not supported")

    def refuse_unread(self) -> None:
        """Raises `CheckpointError` for a key that may change results and that was not asked for."""
        for key, value in self._values.items():
            is_so_anyhow = value in (None, False, 0, "", []) or value == _SO_ANYHOW.get(key)
            if key not in self._asked and key not in _HARMLESS and not is_so_anyhow:
                raise CheckpointError(
                    f"{self._where}: {self.name}.{key} is {str(value)[:60]}, which may change results, and is not "
                    "supported: serve the checkpoint in safetensors that the file was made of"
                )


IN_GROUPS = frozenset({"Q8_0", "Q4_0"})  # formats of 32 whole numbers that share a scale
_HEADS = "attention.head_count"
_KV_HEADS = "attention.head_count_kv"
_NORM_EPS = "attention.layer_norm_rms_epsilon"
_NEVER_QUANTIZED = ("ffn_gate_inp", "shortconv.conv.")  # with more than one axis: routers and convolutions
_PATTERN = "attention.sliding_window_pattern"
_POOLING = "pooling_type"
_POOLINGS = {1: "mean", 3: "lasttoken"}  # llama.cpp's numbers, with sentence-transformers' names
_NORMALIZES = "norm_topk_prob"
# Read elsewhere, or of no effect on what a decoder computes.
_HARMLESS = frozenset({"vocab_size", "rope.scaling.finetuned", "tensor_data_layout", _POOLING})
# Values that say what is so without them: weights of experts of a softmax, normalized and not scaled, of one group.
_SO_ANYHOW: dict[str, Any] = {
    "expert_weights_norm": True, "expert_weights_scale": 1.0, "expert_gating_func": 1, "expert_group_count": 1,
    "expert_group_used_count": 1,
}  # fmt: skip
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_GEMMA = {"attention.sliding_window": "sliding_window", "final_logit_softcapping": "final_logit_softcapping"}
_NO_WINDOW = {"use_sliding_window": False}


def _mixtral(said: _Metadata) -> dict[str, Any]:
    count = said.get("expert_count", 0)
    if not count:
        return {}
    return {
        "num_local_experts": count,
        "num_experts_per_tok": said.number("expert_used_count"),
        "sliding_window": None,
    }


def _experts_ffn(said: _Metadata) -> dict[str, Any]:
    return {"moe_intermediate_size": said.number("expert_feed_forward_length")}


def _shared_ffn(said: _Metadata) -> dict[str, Any]:
    return {
        **_experts_ffn(said),
        "shared_expert_intermediate_size": said.number("expert_shared_feed_forward_length"),
    }


def _gemma_scale(layers_of_27b: int) -> Callable[[_Metadata], dict[str, Any]]:
    """Queries of the model of 27B are scaled by D / N; all others by H. llama.cpp tells it by its layers."""

    def scalar(said: _Metadata) -> dict[str, Any]:
        is_27b = said.number("block_count") == layers_of_27b
        size = said.number("embedding_length") // said.number(_HEADS) if is_27b else said.head_dim()
        return {"query_pre_attn_scalar": size, **said.layer_types()}

    return scalar


def _gemma3(said: _Metadata) -> dict[str, Any]:
    return {**_gemma_scale(62)(said), "rope_local_base_freq": said.get("rope.freq_base_swa", 10_000.0)}


def _phi3(said: _Metadata) -> dict[str, Any]:
    told = said.get("rope.scaling.original_context_length")
    return {
        "sliding_window": said.get("attention.sliding_window") or None,
        "original_max_position_embeddings": told or said.number("context_length"),
    }


def _exaone4(said: _Metadata) -> dict[str, Any]:
    return {"sliding_window": said.get("attention.sliding_window") or None, **said.layer_types()}


def _lfm2(said: _Metadata) -> dict[str, Any]:
    return {
        "layer_types": ["full_attention" if heads else "conv" for heads in said.kv_heads()],
        "conv_L_cache": said.number("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily("LlamaForCausalLM", "MixtralForCausalLM", in_pairs=True, further=_mixtral),
    "qwen2": GgufFamily("Qwen2ForCausalLM", values=_NO_WINDOW),
    "qwen2moe": GgufFamily(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeForCausalLM",
        keys=_EXPERTS,
        values={**_NO_WINDOW, _NORMALIZES: False},
        further=_shared_ffn,
    ),
    "qwen3": GgufFamily("Qwen3ForCausalLM", values=_NO_WINDOW),
    "qwen3moe": GgufFamily(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeForCausalLM",
        keys=_EXPERTS,
        values={**_NO_WINDOW, _NORMALIZES: True},
        further=_experts_ffn,
    ),
    "gemma": GgufFamily("GemmaForCausalLM"),
    "gemma2": GgufFamily(
        "Gemma2ForCausalLM",
        keys={**_GEMMA, "attn_logit_softcapping": "attn_logit_softcapping"},
        further=_gemma_scale(46),
    ),
    "gemma3": GgufFamily("Gemma3ForCausalLM", keys=_GEMMA, further=_gemma3),
    "phi3": GgufFamily("Phi3ForCausalLM", rotary_share=True, further=_phi3),
    "olmo2": GgufFamily("Olmo2ForCausalLM"),
    "olmoe": GgufFamily("OlmoeForCausalLM", "OlmoeForCausalLM", keys=_EXPERTS, values={_NORMALIZES: False}),
    "granite": GgufFamily(
        "GraniteForCausalLM",
        in_pairs=True,
        keys={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", in_pairs=True, values=_NO_WINDOW),
    "seed_oss": GgufFamily("SeedOssForCausalLM"),
    "exaone4": GgufFamily("Exaone4ForCausalLM", further=_exaone4),
    "lfm2": GgufFamily("Lfm2ForCausalLM", further=_lfm2),
    "glm4": GgufFamily("Glm4ForCausalLM", rotary_share=True),
}

_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    _HEADS: "num_attention_heads",
}


def family_of(metadata: Mapping[str, Any], where: str) -> GgufFamily:
    """The family of a file's architecture. Raises `CheckpointError`, which names those that are served."""
    name = metadata.get("general.architecture")
    if name not in FAMILIES:
        raise CheckpointError(
            f"{where} holds a model of architecture {name}, which is not served from GGUF; served are "
            f"{', '.join(FAMILIES)}. If the checkpoint in safetensors is of a family in docs/models.md, serve that"
        )
    return FAMILIES[name]


def config_of(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, GgufTensor],
    factors: Callable[[str], list[float]],
    where: str,
) -> dict[str, Any]:
    """The values of config.json.

    Args:
      metadata, tensors: of the file.
      factors: the numbers of a tensor.
      where: the file's name, for errors.

    Raises:
      CheckpointError: the architecture or one of its keys is not supported.
    """
    family = family_of(metadata, where)
    said = _Metadata(metadata, tensors, where)
    head_dim, has_experts = said.head_dim(), "blk.0.ffn_gate_exps.weight" in tensors
    for key, value in _must_be(said, head_dim).items():
        if said.get(key, value) != value:
            raise said.refuse(key)
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{where}: tensor token_embd.weight is missing: is it a part of a model?")
    architecture = family.of_experts if has_experts and family.of_experts else family.architecture
    config = {
        **{ours: said.number(theirs) for theirs, ours in _KEYS.items()},
        **{ours: said.get(theirs) for theirs, ours in family.keys.items()},
        **family.values,
        **_normalizes(said, family),
        **family.further(said),
        **_rope(said, family, head_dim, factors),
        "architectures": [architecture],
        models.FAMILIES[architecture].norm_eps_key: said.number(_NORM_EPS),
        "num_key_value_heads": max(said.kv_heads()),
        "head_dim": head_dim,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": _dtype(tensors["token_embd.weight"].kind),
    }
    said.refuse_unread()
    return {**config, **_biases(architecture, tensors), **_quantization(tensors)}


def _must_be(said: _Metadata, head_dim: int) -> dict[str, Any]:
    """Keys that may have one value alone, if they are there."""
    sizes = {"attention.value_length": head_dim, "embedding_length_out": said.number("embedding_length")}
    return {**sizes, "attention.causal": True}


def _normalizes(said: _Metadata, family: GgufFamily) -> dict[str, bool]:
    """Whether weights of experts are normalized where it depends: as the file says, else as llama.cpp knows."""
    if _NORMALIZES not in family.values:
        return {}
    return {_NORMALIZES: bool(said.get("expert_weights_norm", family.values[_NORMALIZES]))}


def pooling_of(metadata: Mapping[str, Any], where: str) -> str | None:
    """How a model that was made for embeddings pools, by sentence-transformers' name; None: it was not.

    Raises `CheckpointError` for pooling that a causal decoder can't do.
    """
    key = f"{metadata['general.architecture']}.{_POOLING}"
    kind = metadata.get(key) or 0
    if kind and kind not in _POOLINGS:
        told = ", ".join(f"{number} ({name})" for number, name in _POOLINGS.items())
        raise CheckpointError(f"{where}: {key} is {kind}; supported are {told}")
    return _POOLINGS.get(kind)


def _quantization(tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """How matrices stay quantized: as they are stored, if all have the same one of these formats."""
    of_layers = (
        (name, tensor) for name, tensor in tensors.items() if name.startswith("blk.") and len(tensor.shape) > 1
    )
    kinds = {tensor.kind for name, tensor in of_layers if not any(each in name for each in _NEVER_QUANTIZED)}
    if len(kinds) == 1 and kinds <= IN_GROUPS:
        return {"quantization_config": {"quant_method": "gguf", "format": kinds.pop()}}
    return {}


def _biases(architecture: str, tensors: Mapping[str, GgufTensor]) -> dict[str, bool]:
    """Where config.json says whether there are biases, which here their tensors do."""
    family = models.FAMILIES[architecture]
    told = (
        (family.qkv_bias, family.qkv_bias_key, "attn_q"),
        (family.attention_out_bias, family.attention_out_bias_key, "attn_output"),
        (family.mlp_bias, family.mlp_bias_key, "ffn_down"),
    )
    return {key: f"blk.0.{name}.bias" in tensors for of_family, key, name in told if of_family is None}


def _dtype(kind: str) -> str:
    """The dtype of a model whose embedding is stored so; that of quantized ones was mostly bfloat16."""
    return {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")


def _rope(said: _Metadata, family: GgufFamily, head_dim: int, factors: Callable[[str], list[float]]) -> dict[str, Any]:
    """llama.cpp has tensors of factors, one for each pair, where config.json has a formula or lists."""
    turned = said.get("rope.dimension_count", head_dim)
    if turned != head_dim and not family.rotary_share:
        raise said.refuse("rope.dimension_count")
    found: dict[str, Any] = {"rope_theta": said.get("rope.freq_base", 10_000.0)}
    if family.rotary_share:
        found["partial_rotary_factor"] = turned / head_dim
    original = said.get("rope.scaling.original_context_length", said.number("context_length"))
    kind = said.get("rope.scaling.type", "linear")
    factor, amplitude = said.get("rope.scaling.factor") or 1.0, said.get("rope.scaling.attn_factor", 1.0)
    names = ("rope_factors_short.weight", "rope_factors_long.weight")
    if "rope_freqs.weight" in said.tensors:
        names = ("rope_freqs.weight", "rope_freqs.weight")
    has_factors = names[0] in said.tensors
    if kind not in ("none", "linear", "longrope", "yarn") or (has_factors and kind == "yarn"):
        raise said.refuse("rope.scaling.type")
    if has_factors:
        stretch = 1.0 if kind == "none" else factor  # of all pairs alike, beside each one's own
        short, long = ([stretch * each for each in factors(name)] for name in names)
        section = {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": amplitude}
        found["rope_scaling"] = {**section, "original_max_position_embeddings": original}
    elif kind == "linear" and factor != 1.0:
        found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        section = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        found["rope_scaling"] = section | ({} if amplitude == 1.0 else {"attn_factor": amplitude})
    return found
