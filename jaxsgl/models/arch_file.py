"""Reads the shape of a model from the JSON files of a Hugging Face folder; no other file asks config.json for it.

They are read as plain JSON, so that no framework is imported and no code of the folder runs. `families` says what an
architecture's name implies, `layer_config` reads the layers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec.structs import replace as replace_struct

from jaxsgl.errors import CheckpointError
from jaxsgl.models import quantization
from jaxsgl.models.arch import WITHOUT_GATES, Activation, Head, ModelArch
from jaxsgl.models.config_file import ConfigFile
from jaxsgl.models.encoder import Encoder, read_second_after
from jaxsgl.models.end_tokens import read_end_tokens, token_of_tokenizer
from jaxsgl.models.families import BY_DECODER, BY_TOWER, FAMILIES, TOLD_NAMES
from jaxsgl.models.families.encoders import ENCODERS
from jaxsgl.models.family import Family, OutputGate, Parallel
from jaxsgl.models.grouped_config import read_connections
from jaxsgl.models.layer_config import read_latent, read_latent_amplitude, read_layers
from jaxsgl.models.layer_spec import KvHeads, Latent
from jaxsgl.models.pooling import read_labels, read_pooling
from jaxsgl.models.quantized_checkpoints import Quantized, described, read_quantized
from jaxsgl.models.quantized_formats import EXPERTS_IN_MXFP4, has_quantized_experts
from jaxsgl.models.towers.arch import TowerArch
from jaxsgl.models.towers.hearing import read_hearing
from jaxsgl.models.towers.vision import read_vision
from jaxsgl.models.unserved import why_unserved
from jaxsgl.requests.outputs import PoolingKind

DTYPES = ("float32", "bfloat16", "float16")
UNTOLD_DTYPE = "bfloat16"  # of models since about 2023, where neither config.json nor tensors tell it

_OTHER_HEADS: dict[str, Head] = {"ForSequenceClassification": "labels", "Model": "none"}  # transformers' classes
# transformers' classes of an encoder; heads that predict masked tokens or next sentences are left out.
_ENCODER_HEADS: dict[str, Head] = {
    "ForSequenceClassification": "labels", "ForMaskedLM": "none", "ForPreTraining": "none", "Model": "none"
}  # fmt: skip
# config.json's words -> ours, of MLPs with gates and of those without
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
OF_ENCODERS: dict[str, Activation] = {**ACTIVATIONS, "gelu": "gelu_erf"}


def arch_from_folder(folder: Path) -> ModelArch:
    """Reads the folder's JSON files. Raises `CheckpointError` for a model that can't be served."""
    if not folder.is_dir():
        raise CheckpointError(f"no model folder at {folder}")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is not a model folder: it has no config.json{_what_it_has(folder)}")
    config = ConfigFile(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = ConfigFile(generation_path) if generation_path.is_file() else None
    quantizations = described(folder, config)
    arch = _read_arch(config, generation)
    arch = _with_end_of_tokenizer(arch, folder)
    arch = _with_types(arch, folder)
    arch = _with_pooling(arch, folder, config)
    arch = _with_quantization(arch, quantizations)
    config.refuse_unread(arch.name, FAMILIES[arch.name].ignored)
    return arch.for_context(arch.max_context)


def arch_from_values(path: Path, values: Mapping[str, Any]) -> ModelArch:
    """Reads the values of a config.json at `path`, of a decoder without quantized weights.

    Raises `CheckpointError` for one that can't be served.
    """
    config = ConfigFile(path, values)
    arch = _read_arch(config, None)
    config.refuse_unread(arch.name, FAMILIES[arch.name].ignored)
    return arch.for_context(arch.max_context)


def _what_it_has(folder: Path) -> str:
    """Says what a folder without a configuration holds instead, if that is known."""
    names = [path.name for path in folder.iterdir()]
    if "adapter_config.json" in names:
        return ", but an adapter: serve its base model, and give the adapter as --lora-paths NAME=FOLDER"
    return "; name a checkpoint's folder, as Hugging Face's save_pretrained writes it, or a GGUF file"


def _read_arch(whole: ConfigFile, generation: ConfigFile | None) -> ModelArch:
    name, head = _read_name(whole)
    family = FAMILIES[name]
    config = _decoder_of(whole, name, family)
    hidden_size, num_heads = config.count("hidden_size"), config.count("num_attention_heads")
    latent = read_latent(config, family) if family.latent else None
    if latent is not None:
        num_kv_heads, head_dim = 1, latent.entry_size
    else:
        num_kv_heads = _read_kv_heads(config, family, num_heads)
        head_dim = config.count("head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(f"{config.path}: {num_heads} heads can't share {num_kv_heads} kv heads evenly")
    layers = read_layers(config, family, KvHeads(num_kv_heads, head_dim), latent)
    is_root = family.root_norm_key is not None and config.get(family.root_norm_key) is not None
    rms_norm_eps = config.number((is_root and family.root_norm_key) or family.norm_eps_key, 1e-6)

    def bias(of_family: bool | None, key: str) -> bool:
        return bool(config.get(key, False)) if of_family is None else of_family

    embedding_scale, residual_scale, logits_divisor = _read_factors(config, family, len(layers.specs))
    if family.scales_logits and (scale := config.number("logit_scale", 1.0)) != 1.0:
        logits_divisor = 1.0 / scale
    dtype = _read_dtype(whole, config)
    encoder = _read_encoder(config, family)
    scales_embedding = family.scales_embedding and _holds(config, family.scales_embedding_key)
    return ModelArch(
        name=name,
        vocab_size=config.count("vocab_size"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=layers.specs,
        ropes=layers.ropes,
        rms_norm_eps=rms_norm_eps,
        tie_embeddings=_read_tied(whole, config, family),
        attention_bias=bias(family.qkv_bias, family.qkv_bias_key),
        attention_out_bias=bias(family.attention_out_bias, family.attention_out_bias_key),
        mlp_bias=bias(family.mlp_bias, family.mlp_bias_key),
        down_bias=family.down_bias,
        qk_norm=family.qk_norm if _holds(config, family.qk_norm_key) else None,
        rotates_first=family.rotates_first,
        qkv_limit=config.number("clip_qkv") if family.limits_qkv and config.get("clip_qkv") is not None else None,
        normalizes_values=family.normalizes_values,
        layer_factors=family.layer_factors,
        layer_vocab_size=config.get("vocab_size_per_layer_input", 0) if layers.specs[0].embedding_size else 0,
        num_streams=config.count("altup_num_inputs") if family.several_streams else 1,
        laurel_rank=config.count("laurel_rank") if family.several_streams else 0,
        max_context=layers.max_context,
        dtype=dtype or UNTOLD_DTYPE,
        names_dtype=dtype is not None,
        eos_token_ids=read_end_tokens(generation, whole, config),
        norms=family.norms if _holds(config, family.norms_key) else "pre",
        centred=family.centred and not is_root,
        norm_bias=family.norm_bias,
        parallel=_read_parallel(config, family),
        norm_offset=family.norm_offset,
        activation=_read_activation(config, family),
        embedding_scale=math.sqrt(hidden_size) if scales_embedding else embedding_scale,
        rounds_embedding_scale=family.rounds_embedding_scale,
        attention_scale=_read_attention_scale(config, family, latent, head_dim),
        attention_out_factor=_read_attention_factor(config, family),
        unit_factors=_read_unit_factors(config, family),
        residual_scale=residual_scale,
        logits_divisor=logits_divisor,
        normalizes_embedding=family.normalizes_embedding,
        head_bias=family.head_bias and _holds(config, family.head_bias_key),
        num_positions=_read_num_positions(config, family),
        rows_before_positions=family.rows_before_positions or 0,
        attention_cap=_read_cap(config, family.caps, "attn_logit_softcapping"),
        logits_cap=_read_cap(config, family.caps or family.caps_logits, "final_logit_softcapping"),
        value_dim=_read_value_dim(config, family, head_dim),
        gate_function=family.gate_function,
        output_gate=_read_output_gate(config, family),
        head="none" if encoder is not None and head == "vocabulary" else head,
        tower=_read_tower(whole, family, hidden_size, rms_norm_eps, centred=family.centred and not is_root),
        next_layer=layers.next_spec,
        encoder=encoder,
        connections=read_connections(config) if family.grouped_tokens else None,
    )


def _read_num_positions(config: ConfigFile, family: Family) -> int:
    """Rows of the table of learned positions; 0 without such a table."""
    before = family.rows_before_positions
    if before is None:
        return 0
    counts_all = family.encoder is not None and family.encoder.counts_rows_before
    return config.count("max_position_embeddings") + (0 if counts_all else before)


def _read_encoder(config: ConfigFile, family: Family) -> Encoder | None:
    if family.encoder is None or not _holds(config, family.encoder.key):
        return None
    has_types = family.encoder.has_types and config.get("type_vocab_size") != 0
    num_types = config.count("type_vocab_size") if has_types else 0
    own = family.encoder
    return Encoder(own.restarts, num_types, classifier=own.classifier, has_biases=own.has_biases)


def _read_tower(
    whole: ConfigFile, family: Family, hidden_size: int, rms_norm_eps: float, *, centred: bool
) -> TowerArch | None:
    if family.hearing is not None:
        return read_hearing(whole, family.hearing, hidden_size)
    tower = None if family.vision is None else read_vision(whole, family.vision, hidden_size, rms_norm_eps)
    return None if tower is None else replace(tower, merger=replace(tower.merger, centred=centred))


def _read_name(whole: ConfigFile) -> tuple[str, Head]:
    """The name in `FAMILIES` of the model that config.json describes, and what reads its final hidden states.

    Raises `CheckpointError` for a family that isn't served.
    """
    told = _read_architecture(whole)
    name, head = _family_of(told)
    for section, families in (("vision_config", BY_TOWER), ("text_config", BY_DECODER)):
        if name in families:
            name = _by_part(whole, name, section, families[name])
    if name not in FAMILIES:
        raise CheckpointError(f"{whole.path}: {why_unserved(told, whole.values, TOLD_NAMES)}")
    return name, head


def _read_architecture(whole: ConfigFile) -> str | None:
    """The architecture that config.json names first, or None if it names none. Raises `CheckpointError`."""
    told = whole.get("architectures") or []
    if not isinstance(told, list) or not all(isinstance(each, str) for each in told):
        raise CheckpointError(f'{whole.path}: architectures is {told!r}, but must be a list, as ["LlamaForCausalLM"]')
    return told[0] if told else None


def _decoder_of(whole: ConfigFile, name: str, family: Family) -> ConfigFile:
    """What describes the decoder, the file or an object in it, with the family's words and defaults.

    Raises `CheckpointError` for a form of the family that isn't built.
    """
    config = _section_of(whole, name, family)
    config.defaults, config.keys = family.defaults, family.keys
    _refuse_unbuilt(config, family)
    return config


def _section_of(whole: ConfigFile, name: str, family: Family) -> ConfigFile:
    if family.section is None:
        return whole
    config = whole.section(family.section)
    if config is None and not family.may_be_flat:
        raise CheckpointError(f"{whole.path}: {name} needs an object {family.section}")
    if config is not None and family.may_be_flat:
        whole.skip(*config.values)
    return config or whole


def _refuse_unbuilt(config: ConfigFile, family: Family) -> None:
    """Raises `CheckpointError` for a form of the family that isn't built."""
    for key, required in family.required.items():
        value = config.of_all_layers(key)
        expected = config.of_all_layers(required, required) if isinstance(required, str) else required
        if value is not None and value != expected:
            raise CheckpointError(
                f"{config.path}: {key} is {json.dumps(value)}, but of this family only models are served where it is "
                f"{json.dumps(expected)}"
            )


def _by_part(whole: ConfigFile, name: str, section: str, families: Mapping[str, str]) -> str:
    """The name in `FAMILIES` of a larger model, by the `model_type` of its tower or decoder, or the first of them.

    Raises `CheckpointError`.
    """
    part = whole.get(section)
    found = (part.get("model_type") if isinstance(part, dict) else None) or next(iter(families))
    if found not in families:
        what = "towers" if section == "vision_config" else "decoders"
        raise CheckpointError(
            f"{whole.path}: {section}.model_type is {found}, but {what} of {name} that are served are "
            f"{', '.join(families)}"
        )
    return families[found]


def _holds(config: ConfigFile, key: str | None) -> bool:
    """Whether config.json says that something of the family holds, which it does where there is no key for that."""
    return key is None or bool(config.get(key, False))


def _read_kv_heads(config: ConfigFile, family: Family, num_heads: int) -> int:
    if _holds(config, family.grouped_key):
        return config.count("num_key_value_heads", num_heads)
    config.skip(config.told_as("num_key_value_heads"))
    return 1


def _read_parallel(config: ConfigFile, family: Family) -> Parallel | None:
    if not _holds(config, family.parallel_key):
        return None
    if family.parallel_norms_key is None:
        return family.parallel
    is_grouped = _holds(config, family.grouped_key)
    return "own norm" if config.count(family.parallel_norms_key, 2 if is_grouped else 1) == 2 else "shared norm"


# Names in published folders that aren't transformers' own; and one there that doesn't end as others do.
_SPELLED = {
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "GPT2ForCausalLM": "GPT2LMHeadModel",
    "KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
}


def _family_of(architecture: str | None) -> tuple[str, Head]:
    """The name in `FAMILIES` of an architecture, which may be the decoder with another head or none, and its head."""
    for suffix, head in _ENCODER_HEADS.items():
        encoder = str(architecture).removesuffix(suffix) + "Model"
        if encoder in ENCODERS and str(architecture).endswith(suffix):
            return encoder, head
    for suffix, head in _OTHER_HEADS.items():
        if architecture is not None and architecture not in FAMILIES and architecture.endswith(suffix):
            stem = architecture.removesuffix(suffix)
            # Where the whole model sees images, too, the decoder's class is called so: Gemma3TextModel.
            name = stem.removesuffix("Text") + "ForCausalLM"
            return _SPELLED.get(name, name), head
    return _SPELLED.get(str(architecture), str(architecture)), "vocabulary"


def _read_tied(whole: ConfigFile, config: ConfigFile, family: Family) -> bool:
    """Whether the embedding is the output head. Of a larger model the whole file's word counts, as in transformers."""
    key = next((key for key in family.tied_keys if whole.get(key) is not None), family.tied_keys[-1])
    of_section = config.get(key, False)
    told = bool(whole.get(key, family.ties_whole or of_section))
    return told or (family.ties_either and bool(of_section))


def _read_activation(config: ConfigFile, family: Family) -> Activation:
    word = config.get(family.activation_key, family.defaults.get(family.activation_key, "silu"))
    word = family.activations.get(word, word)
    with_gates = ACTIVATIONS if family.encoder is None else OF_ENCODERS
    supported = with_gates if family.gated else WITHOUT_GATES
    if word not in supported:
        raise CheckpointError(
            f"{config.path}: {family.activation_key} is {word}, but supported are {', '.join(supported)}"
        )
    return supported[word]


def _read_factors(config: ConfigFile, family: Family, num_layers: int) -> tuple[float | None, ...]:
    """What embeddings and updates are multiplied by, and what logits are divided by; None: it is 1."""
    told: tuple[float, ...] = (1.0, 1.0, 1.0)
    if family.multipliers == "each":
        told = tuple(
            config.number(key, 1.0) for key in ("embedding_multiplier", "residual_multiplier", "logits_scaling")
        )
    elif family.multipliers == "by part":
        told = config.number("embedding_multiplier", 1.0), 1.0, 1.0 / config.number("lm_head_multiplier", 1.0)
    elif family.multipliers == "by size":
        root, width = math.sqrt(num_layers), float(config.count("hidden_size"))
        told = (
            config.number("scale_emb", 1.0),
            config.number("scale_depth", root) / root,
            width / config.number("dim_model_base", width),
        )
    return tuple(None if factor == 1.0 else factor for factor in told)


def _read_attention_factor(config: ConfigFile, family: Family) -> float | None:
    """The factor on what attention makes, that on what it reads, or on values, included."""
    if family.scales_values:
        factor = config.number("attention_value_scale", 1.0)
    elif family.multipliers == "by part":
        factor = config.number("attention_in_multiplier", 1.0) * config.number("attention_out_multiplier", 1.0)
    else:
        return None
    return None if factor == 1 else factor


_GATES: dict[str, OutputGate] = {"per-head": "head", "per-element": "number"}


def _read_output_gate(config: ConfigFile, family: Family) -> OutputGate | None:
    """That of the family, or the one that config.json names, if there is any."""
    told = True if family.output_gate_key is None else config.get(family.output_gate_key, False)
    if not isinstance(told, str):
        return family.output_gate if told else None
    if told not in _GATES:
        raise CheckpointError(f"{config.path}: {family.output_gate_key} is {told}, but known are {', '.join(_GATES)}")
    return _GATES[told]


def _read_value_dim(config: ConfigFile, family: Family, head_dim: int) -> int | None:
    if not family.narrow_values:
        return None
    value_dim = config.count("v_head_dim", head_dim)
    if value_dim > head_dim:
        raise CheckpointError(
            f"{config.path}: v_head_dim is {value_dim}, but values may not have more numbers than keys, {head_dim}"
        )
    return None if value_dim == head_dim else value_dim


def _read_unit_factors(config: ConfigFile, family: Family) -> tuple[float, float] | None:
    """The factors on gates, and on what MLPs make: that of ups does the same."""
    told = config.get("mlp_multipliers") if family.multipliers == "by part" else None
    if told is None or list(told) == [1.0, 1.0]:
        return None
    gate, down = told
    return float(gate), float(down)


def _read_attention_scale(config: ConfigFile, family: Family, latent: Latent | None, head_dim: int) -> float | None:
    if latent is not None:
        of_queries = 1.0
        if family.scales_latents:
            of_queries = (config.count("hidden_size") / config.count("q_lora_rank")) ** 0.5
        return (latent.unrotated + latent.rotated) ** -0.5 * read_latent_amplitude(config) ** 2 * of_queries
    if family.multipliers == "by part":
        factor = config.number("key_multiplier", 1.0) * config.number("attention_in_multiplier", 1.0) ** 2
        return None if factor == 1 else head_dim**-0.5 * factor
    if family.multipliers == "each" and config.get("attention_multiplier") is not None:
        return config.number("attention_multiplier")
    return config.number("query_pre_attn_scalar") ** -0.5 if family.caps else family.attention_scale


def _read_cap(config: ConfigFile, has_caps: bool, key: str) -> float | None:
    return config.number(key) if has_caps and config.get(key) is not None else None


def _with_end_of_tokenizer(arch: ModelArch, folder: Path) -> ModelArch:
    """`arch`, whose generations end with the tokenizer's own end token, too."""
    end = token_of_tokenizer("eos_token", folder, arch.vocab_size)
    if end is None or end in arch.eos_token_ids:
        return arch
    return replace(arch, eos_token_ids=(*arch.eos_token_ids, end))


def _with_types(arch: ModelArch, folder: Path) -> ModelArch:
    """`arch`, whose tokens are of the second type after the tokenizer's token between two texts, if it has two.

    A model without a classification head is asked for one text, which may have that token in it, as SPECTER's do.
    """
    if arch.encoder is None or arch.encoder.num_types < 2 or arch.head != "labels":
        return arch
    after = read_second_after(folder, arch.vocab_size)
    return replace(arch, encoder=replace(arch.encoder, second_after=after))


def _with_pooling(arch: ModelArch, folder: Path, config: ConfigFile) -> ModelArch:
    """`arch` with the way in which the folder says that embeddings and scores are made."""
    labels = read_labels(config) if arch.head == "labels" else ()
    spec = read_pooling(folder, config, arch.hidden_size, labels, of_encoder=_pooling_of_encoder(arch, config))
    return replace(arch, folder_pooling=replace_struct(spec, made_for_it=spec.made_for_it or arch.head != "vocabulary"))


def _pooling_of_encoder(arch: ModelArch, config: ConfigFile) -> PoolingKind | None:
    """How an encoder pools where its folder doesn't say it, or its head always does; None: `arch` is none."""
    family = FAMILIES[arch.name].encoder
    if arch.encoder is None or family is None:
        return None
    if family.pooling_key is None:
        return family.pooling
    told = config.get(family.pooling_key, "cls")
    if told not in ("cls", "mean"):
        raise CheckpointError(f"{config.path}: {family.pooling_key} is {told}, but supported are cls and mean")
    return "mean" if told == "mean" else "first"


def _with_quantization(arch: ModelArch, told: Sequence[tuple[Path, Mapping[str, Any]]]) -> ModelArch:
    """`arch` with the formats of its matrices and of its KV cache, by the files that describe them."""
    for path, values in told:
        quantization.check_groups(path, values)
    kv_cache = next(filter(None, (quantization.kv_cache_dtype(values) for _, values in told)), None)
    arch = replace(arch, kv_cache_dtype=kv_cache)
    for path, values in told:
        if not quantization.weights_are_quantized(values):
            continue
        if arch.mixture is None or not has_quantized_experts(values):
            return _with_formats(arch, read_quantized(path, values, arch.stored_layers, draft_head=arch.draft_head))
        arch = replace(arch, expert_format=EXPERTS_IN_MXFP4)
    return arch


def _with_formats(arch: ModelArch, quantized: Quantized) -> ModelArch:
    """`arch` with the formats of all layers, of which the `next_layer` comes last."""
    layers = [
        replace(spec, unquantized=kept, stored_in=others)
        for spec, kept, others in zip(arch.stored_layers, quantized.unquantized, quantized.stored_in, strict=True)
    ]
    return replace(
        arch,
        weight_format=quantized.fmt,
        stored_format=quantized.fmt,
        head_format=quantized.head,
        expert_format=quantized.experts or arch.expert_format,
        layers=tuple(layers[: arch.num_layers]),
        next_layer=arch.next_layer and layers[-1],
    )


def _read_dtype(*configs: ConfigFile) -> str | None:
    """The dtype that the first of them names; None: none does."""
    name = next((config.get(key) for config in configs for key in ("dtype", "torch_dtype") if config.get(key)), None)
    if name is not None and name not in DTYPES:
        raise CheckpointError(f"{configs[0].path}: dtype {name} is not supported; supported are {', '.join(DTYPES)}")
    return name
