"""The shape of a model: the numbers that differ between checkpoints, read from a Hugging Face folder's JSON files.

`ModelArch` holds everything that models, weights and the engine need to know about a model; no other file reads
config.json. It is read as plain JSON, so that no framework is imported and no code of the folder runs.

What differs between model families is data: a new family of dense decoders is a new entry of `FAMILIES` (and, if its
tensors have other names, one in `weights/names.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxsgl.errors import CheckpointError
from jaxsgl.models import quantization
from jaxsgl.models.quantization import WeightFormat
from jaxsgl.models.rope import RopeParams

DTYPES = ("float32", "bfloat16", "float16")
MODELOPT_FILE = "hf_quant_config.json"
ROPE_KINDS = {"default": "none", "linear": "linear", "llama3": "llama3"}  # config.json's word -> ours


@dataclass(frozen=True)
class Family:
    """What the name of an architecture implies beyond its config.json.

    Attributes:
      qk_norm: whether every q and k is normalized (RMSNorm over the head size) before rope.
      qkv_bias: whether q, k and v have biases; None: as `attention_bias` of config.json says.
      attention_out_bias: the same for the output projection.
      mlp_bias: whether the MLP has biases; None: as `mlp_bias` of config.json says.
      default_head_dim: H if config.json has no `head_dim`; None: D / N.
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


@dataclass(frozen=True)
class ModelArch:
    """The shape of a dense decoder.

    Attributes:
      name: architecture as config.json calls it, a key of `FAMILIES`.
      vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, ffn_size: V, D, layers, N, K, H, F.
      rms_norm_eps: added to the mean square in every RMSNorm.
      tie_embeddings: the embedding is also the output head.
      attention_bias: q, k and v have biases.  attention_out_bias, mlp_bias: so have the output projection, the MLP.
      qk_norm: q and k are normalized per head.
      rope: rotary position embedding.
      max_context: the most tokens of one sequence that the model was made for.
      dtype: name of the checkpoint's dtype.
      eos_token_ids: ids that end a generation; may be empty.
      kv_cache_dtype: "fp8_e4m3" if the checkpoint was calibrated for a KV cache of it; None: as the weights.
      weight_format: how matrices are quantized; None: not at all.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    rms_norm_eps: float
    tie_embeddings: bool
    attention_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeParams
    max_context: int
    dtype: str
    eos_token_ids: tuple[int, ...]
    kv_cache_dtype: str | None = None
    weight_format: WeightFormat | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> ModelArch:
        """Reads the folder's JSON files. Raises `CheckpointError` for a model that can't be served."""
        if not folder.is_dir():
            raise CheckpointError(f"no model folder at {folder}")
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} is not a model folder: it has no config.json")
        config = _Config(folder / "config.json")
        generation_path = folder / "generation_config.json"
        generation = _Config(generation_path) if generation_path.is_file() else None
        arch = _read_arch(config, generation)
        return replace(arch, kv_cache_dtype=_read_quantization(config, folder / MODELOPT_FILE))


class _Config:
    """The values of a JSON file, with errors that name the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} can't be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} holds a JSON {type(values).__name__}, but must hold an object")
        self.values: dict[str, Any] = values

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default` where it is missing or null."""
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer; an error where it is missing without a default."""
        value = self.get(key, default)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self.path}: {key} is {value}, but must be an integer of 1 and more")
        return value


def _read_arch(config: _Config, generation: _Config | None) -> ModelArch:
    name = (config.get("architectures") or [None])[0]
    if name not in FAMILIES:
        raise CheckpointError(
            f"{config.path}: architecture {name} is not supported; supported are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    _refuse_unsupported(config)
    hidden_size, num_heads = config.count("hidden_size"), config.count("num_attention_heads")
    num_kv_heads = config.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(f"{config.path}: {num_heads} heads can't share {num_kv_heads} kv heads evenly")
    max_context = config.count("max_position_embeddings")

    def bias(of_family: bool | None, key: str) -> bool:
        return bool(config.get(key, False)) if of_family is None else of_family

    return ModelArch(
        name=name,
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        num_layers=config.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.count("head_dim", family.default_head_dim or hidden_size // num_heads),
        ffn_size=config.count("intermediate_size"),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bias(family.qkv_bias, "attention_bias"),
        attention_out_bias=bias(family.attention_out_bias, "attention_bias"),
        mlp_bias=bias(family.mlp_bias, "mlp_bias"),
        qk_norm=family.qk_norm,
        rope=_read_rope(config, max_context),
        max_context=max_context,
        dtype=_read_dtype(config),
        eos_token_ids=_read_eos(config, generation),
    )


def _refuse_unsupported(config: _Config) -> None:
    """Raises `CheckpointError` for settings that change the result and that the dense decoder doesn't implement."""
    if config.get("use_sliding_window", False):
        raise CheckpointError(f"{config.path}: use_sliding_window is true, but only full attention is supported")
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{config.path}: hidden_act is {config.get('hidden_act')}, but only silu is supported")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"{config.path}: partial_rotary_factor must be 1.0, rope turns whole heads only")


def _read_quantization(config: _Config, modelopt_path: Path) -> str | None:
    """The KV cache that the checkpoint was calibrated for. Raises `CheckpointError` if its weights are quantized."""
    sources = [(config.path, config.get("quantization_config"))]
    if modelopt_path.is_file():
        sources.append((modelopt_path, _Config(modelopt_path).values))
    told = [(path, values) for path, values in sources if values]
    for path, values in told:
        if not isinstance(values, dict) or quantization.weights_are_quantized(values):
            raise CheckpointError(f"{path}: the checkpoint is quantized; only {', '.join(DTYPES)} are supported")
    return next(filter(None, (quantization.kv_cache_dtype(values) for _, values in told)), None)


def _read_rope(config: _Config, max_context: int) -> RopeParams:
    """Reads `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of older folders."""
    scaling: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or config.get("rope_theta", 10000.0)
    word = scaling.get("rope_type") or scaling.get("type") or "default"
    if word not in ROPE_KINDS:
        raise CheckpointError(
            f"{config.path}: rope type {word} is not supported; supported are {', '.join(ROPE_KINDS)}"
        )
    kind = ROPE_KINDS[word]
    if kind == "none":
        return RopeParams(theta=float(theta))
    try:
        if kind == "linear":
            return RopeParams(theta=float(theta), kind="linear", factor=float(scaling["factor"]))
        return RopeParams(
            theta=float(theta),
            kind="llama3",
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_context=int(scaling.get("original_max_position_embeddings") or max_context),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{config.path}: rope type {word}: a factor is missing or no number: {error!r}"
        ) from error


def _read_dtype(config: _Config) -> str:
    name: str = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise CheckpointError(f"{config.path}: dtype {name} is not supported; supported are {', '.join(DTYPES)}")
    return name


def _read_eos(config: _Config, generation: _Config | None) -> tuple[int, ...]:
    """The ids of generation_config.json (a number or a list), else those of config.json, else none."""
    ids = generation.get("eos_token_id") if generation else None
    if ids is None:
        ids = config.get("eos_token_id", [])
    return (ids,) if isinstance(ids, int) else tuple(ids)
