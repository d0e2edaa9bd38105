"""Which of a checkpoint's matrices are quantized, and how each is, by `quantization_config` of its config.json.

`quantized_formats` reads the words for a format; this file reads to which modules they apply, and which modules make
our matrices. Called by `arch_file`.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxsgl.errors import CheckpointError
from jaxsgl.models.config_file import ConfigFile
from jaxsgl.models.layer_spec import ChannelDeltaNet, LayerSpec
from jaxsgl.models.quantization import WeightFormat, modelopt_part
from jaxsgl.models.quantized_formats import EXPERT_DTYPE, MODELOPT, SUPPORTED, read_expert_format, read_format

HEAD = "lm_head"
_CHANGES, _EXCEPTS = "+:", "-:"  # before an expression for modules with other numbers, and for unquantized ones
MODELOPT_FILE = "hf_quant_config.json"
_FILES = ("quantize_config.json", "quant_config.json")  # of GPTQ's and AWQ's software, where config.json says nothing
# Keys that tell the method of a configuration which names none; those that several have come last.
_TOLD_BY = {
    "packing_format": "auto-round", "autoround_version": "auto-round", "config_groups": "compressed-tensors",
    "w_bit": "awq", "zero_point": "awq", "desc_act": "gptq", "damp_percent": "gptq", "weight_block_size": "fp8",
    "load_in_4bit": "bitsandbytes", "load_in_8bit": "bitsandbytes", "sym": "gptq",
}  # fmt: skip
_UNQUANTIZED_BITS = 16  # and more, of AutoRound's modules
# Matrices of a layer, by the names of `LayerSpec.matrices`, and the modules that make each, in every spelling.
_MODULES: dict[str, tuple[tuple[str, ...], ...]] = {
    "qkv": (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("self_attn.qkv_proj",),
        ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        ("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        ("attention.query_key_value",),
    ),
    "q": (("self_attn.q_proj",),),
    "q_a": (("self_attn.q_a_proj",), ("attn.wq_a",)),
    "q_b": (("self_attn.q_b_proj",), ("attn.wq_b",)),
    "kv": (("self_attn.kv_proj",), ("attn.wkv",)),
    "o_b": (("self_attn.o_b_proj",), ("attn.wo_b",)),
    "kv_a": (("self_attn.kv_a_proj_with_mqa",),),
    "kv_b": (("self_attn.kv_b_proj",),),
    "index_q": (("self_attn.indexer.wq_b",),),
    "index_k": (("self_attn.indexer.wk",),),
    "o": (
        ("self_attn.o_proj",),
        ("self_attn.out_proj",),
        ("mixer.o_proj",),
        ("attn.attention.out_proj",),
        ("attention.dense",),
    ),
    "state_inputs": (
        ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        ("linear_attn.in_proj_qkvz",),
        ("mamba.in_proj",),
        ("mixer.in_proj",),
        ("conv.in_proj",),
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ),
    "state_output": (
        ("linear_attn.out_proj",),
        ("mamba.out_proj",),
        ("mixer.out_proj",),
        ("conv.out_proj",),
        ("self_attn.o_proj",),
    ),
    "embedding_gate": (("per_layer_input_gate",),),
    "embedding_out": (("per_layer_projection",),),
    "gate_up": (
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.gate_up_proj",),
        ("mixer.up_proj",),
        ("feed_forward.w1", "feed_forward.w3"),
        ("mlp.c_fc_0", "mlp.c_fc_1"),
    ),
    "down": (("mlp.down_proj",), ("mixer.down_proj",), ("feed_forward.w2",), ("mlp.c_proj",)),
    "experts": (
        ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.0.down_proj"),
        ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        ("block_sparse_moe.experts.0.w1", "block_sparse_moe.experts.0.w2", "block_sparse_moe.experts.0.w3"),
        ("experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj"),
        ("experts.gate_up_proj", "experts.down_proj"),
        *(tuple(f"{block}.experts.0.{name}" for name in ("w1", "w2", "w3")) for block in ("feed_forward", "ffn")),
        ("mixer.experts.0.up_proj", "mixer.experts.0.down_proj"),
        ("mixer.experts.up_proj", "mixer.experts.down_proj"),
    ),
    "shared": (
        *(
            (f"mlp.{word}.gate_proj", f"mlp.{word}.up_proj", f"mlp.{word}.down_proj")
            for word in ("shared_experts", "shared_expert", "shared_mlp")
        ),
        ("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
        tuple(f"ffn.shared_experts.{name}" for name in ("w1", "w2", "w3")),
    ),
}
# How names of the decoder's modules begin, in the different kinds of folders.
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "backbone.", "")
NEXT_MODULE = "mtp.layers.0"  # of a draft head, which is no part of the decoder


@dataclass(frozen=True)
class Quantized:
    """What `quantization_config` says of a model's matrices, by their names in `LayerSpec.matrices`.

    Attributes:
      fmt: the format that they keep.
      experts: the one that experts keep, if it is another; these are among the `unquantized` ones then.
      unquantized: of each layer, those that keep the model's dtype.
      stored_in: of each layer, those among them that the checkpoint has in other formats than `fmt`.
      head: the format of an output head that is quantized; None: any of the others.
    """

    fmt: WeightFormat
    unquantized: tuple[frozenset[str], ...]
    stored_in: tuple[tuple[tuple[str, WeightFormat], ...], ...]
    head: WeightFormat | None = None
    experts: WeightFormat | None = None


def described(folder: Path, config: ConfigFile) -> list[tuple[Path, Mapping[str, Any]]]:
    """What files of `folder` say of quantization, each with its path: config.json, else the files of GPTQ's and AWQ's
    software; and ModelOpt's.

    Raises `CheckpointError` for what is no object, and for MLX's numbers.
    """
    of_mlx = config.values.get("quantization")
    if isinstance(of_mlx, dict) and "group_size" in of_mlx:
        raise CheckpointError(
            f"{config.path}: weights quantized by MLX are not supported; supported are {SUPPORTED}. Serve the "
            "checkpoint that they were made of"
        )
    of_decoder = config.get("text_config")  # where Kimi's folders have it
    of_decoder = of_decoder.get("quantization_config") if isinstance(of_decoder, dict) else None
    told_here = config.get("quantization_config") or config.get("compression_config") or of_decoder
    of_experts = config.get(EXPERT_DTYPE)  # which DeepSeek V4 has beside it
    if isinstance(told_here, dict) and of_experts is not None:
        told_here = {EXPERT_DTYPE: of_experts, **told_here}
    found = [(config.path, told_here)]
    others = _FILES if not found[0][1] else ()
    paths = [folder / name for name in (*others, MODELOPT_FILE)]
    found += [(path, ConfigFile(path).values) for path in paths if path.is_file()]
    told = [(path, values) for path, values in found if values]
    for path, values in told:
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: quantization_config holds {values}, but must be an object")
    return [(path, _with_method(values)) for path, values in told]


def _with_method(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values with a method, if they name none and their keys tell one."""
    method = next((method for key, method in _TOLD_BY.items() if key in values), None)
    if values.get("quant_method") or method is None or "quant_algo" in values:
        return values
    return {**values, "quant_method": method}


def _whole_names(module: str) -> list[str]:
    """What the module of this name within the decoder, or of `NEXT_MODULE`, is called in the different kinds."""
    if module.startswith(NEXT_MODULE):
        return [module]
    return [*(prefix + module for prefix in _PREFIXES), f"transformer.h.{module.removeprefix('layers.')}"]


def _spellings(spec: LayerSpec, matrix: str) -> tuple[tuple[str, ...], ...]:
    """Those that files may have of a matrix of `spec`. Of experts next to an MLP none is within that MLP, and Kimi's
    delta-nets alone are called attention.
    """
    spellings = _MODULES[matrix]
    if matrix.startswith("state_"):
        is_channel_net = isinstance(spec.mixer, ChannelDeltaNet)
        return tuple(each for each in spellings if each[0].startswith("self_attn.") == is_channel_net)
    if matrix != "experts" or spec.experts is None:
        return spellings
    return tuple(each for each in spellings if each[0].startswith("experts."))


def _layer_names(num_layers: int, draft_head: bool) -> list[str]:
    names = [f"layers.{layer}" for layer in range(num_layers)]
    return [*names[:-1], NEXT_MODULE] if draft_head else names


def read_quantized(
    path: Path, config: Mapping[str, Any], layers: Sequence[LayerSpec], *, draft_head: bool = False
) -> Quantized:
    """What `quantization_config` of the file `path` says of `layers`, of which the last may be a `draft_head`.

    Of several formats one is kept, and what has another one is dequantized as it is loaded; but FP4 of experts in an
    FP8 release is kept, too, where they have kernels.

    Raises `CheckpointError` for a format that is not supported, by its name, and as `read_unquantized`.
    """
    groups = _groups(path, config)
    excepted, names = (
        read_unquantized(path, config, layers, draft_head=draft_head),
        _layer_names(len(layers), draft_head),
    )
    if groups is None:
        whole = Quantized(read_format(path, config), tuple(excepted), ((),) * len(layers))
        return _with_experts(whole, layers, read_expert_format(path, config))
    formats = [
        {
            name: fmt
            for name in sorted(spec.matrices - left)
            if (fmt := _format_of(path, groups, layer, _spellings(spec, name))) is not None
        }
        for layer, spec, left in zip(names, layers, excepted, strict=True)
    ]
    kept = _most_useful(formats)
    if kept is None:
        raise CheckpointError(f"{path}: quantization_config names no matrix of the decoder's layers")
    return Quantized(
        kept,
        tuple(
            spec.matrices - {name for name, fmt in of_layer.items() if fmt == kept}
            for spec, of_layer in zip(layers, formats, strict=True)
        ),
        tuple(tuple((name, fmt) for name, fmt in of_layer.items() if fmt != kept) for of_layer in formats),
        next((group.fmt for group in groups if group.has(HEAD)), None),
    )


def _with_experts(quantized: Quantized, layers: Sequence[LayerSpec], fmt: WeightFormat | None) -> Quantized:
    """The same with experts of `layers` in a format of their own; None: they have none."""
    if fmt is None:
        return quantized
    pairs = list(zip(layers, quantized.unquantized, strict=True))
    stored_in = tuple((("experts", fmt),) if "experts" in spec.matrices - left else () for spec, left in pairs)
    unquantized = tuple(left | (spec.matrices & {"experts"}) for spec, left in pairs)
    return replace(quantized, experts=fmt, unquantized=unquantized, stored_in=stored_in)


def _most_useful(formats: Sequence[Mapping[str, WeightFormat]]) -> WeightFormat | None:
    """That of experts, which are most of a model, unless they are dequantized in any case; else that of most matrices.

    `formats` are those of each layer's matrices.
    """
    counts = Counter[WeightFormat]()
    for name, fmt in (each for of_layer in formats for each in of_layer.items()):
        is_kept = fmt.storage is not None and fmt.storage.kind not in ("fp4", "packed_fp4")
        counts[fmt] += is_kept * len(formats) * len(_MODULES) if name == "experts" else 1
    return max(counts, key=lambda fmt: counts[fmt], default=None)


def _format_of(
    path: Path, groups: Sequence[_Group], layer: str, spellings: tuple[tuple[str, ...], ...]
) -> WeightFormat | None:
    """The format of the first of `groups` that the matrix of a named layer is of; None: of none, or not quantized.

    Of the `spellings` that files may have of the matrix, the one counts that an earlier group names.

    Raises `CheckpointError` if what is multiplied at once is of several.
    """
    first = len(groups)
    for spelling in spellings:
        modules = [f"{layer}.{module}" for module in spelling]
        places = [
            next((i for i, group in enumerate(groups) if any(map(group.has, _whole_names(each)))), None)
            for each in modules
        ]
        formats = [None if place is None else groups[place].fmt for place in places]
        if any(each != formats[0] for each in formats):
            raise CheckpointError(
                f"{path}: quantization_config has several formats for {', '.join(modules)}, which are multiplied at "
                "once: give them one"
            )
        first = min([first, *(place for place in places if place is not None)])
    return groups[first].fmt if first < len(groups) else None


def _groups(path: Path, config: Mapping[str, Any]) -> list[_Group] | None:
    """The groups of modules that have formats of their own; None: all have one."""
    told, method = modelopt_part(config), config.get("quant_method", MODELOPT)
    if str(method).startswith(MODELOPT) and told.get("quant_algo") == "MIXED_PRECISION":
        return _modelopt_groups(path, told)
    if method == "gptq" and config.get("dynamic"):
        return _gptq_groups(path, config)
    if method == "auto-round" and config.get("extra_config"):
        return _auto_round_groups(path, config)
    groups = {
        name: group for name, group in (config.get("config_groups") or {}).items() if (group or {}).get("weights")
    }
    if method != "compressed-tensors" or len({str(group["weights"]) for group in groups.values()}) < 2:
        return None
    named: list[_Group] = []
    rest: list[_Group] = []
    for name, group in groups.items():
        alone = {**config, "config_groups": {name: group}, "format": group.get("format") or config.get("format")}
        targets, fmt = _targets(path, alone), read_format(path, alone)
        (rest if targets is None else named).append(_Group(fmt, _all if targets is None else _matching(targets)))
    return named + rest  # what is named counts before kinds of modules


def _modelopt_groups(path: Path, told: Mapping[str, Any]) -> list[_Group]:
    """By `quantized_layers`, an object of modules; those within one are quantized as it is."""
    layers = told.get("quantized_layers")
    if not isinstance(layers, Mapping) or not all(isinstance(each, Mapping) for each in layers.values()):
        raise CheckpointError(
            f"{path}: quantization_config: quant_algo is MIXED_PRECISION, but quantized_layers, an object that gives "
            "each module its quant_algo, is missing"
        )
    modules: dict[WeightFormat | None, list[str]] = {}
    for module, values in layers.items():
        if values.get("quant_algo") not in (None, "UNQUANTIZED"):
            modules.setdefault(read_format(path, {"quant_method": MODELOPT, **values}), []).append(module)
    return _named(modules)


def _gptq_groups(path: Path, config: Mapping[str, Any]) -> list[_Group]:
    """By `dynamic`, expressions for how names begin, of which the first one counts, with what the modules have else."""
    whole = {key: value for key, value in config.items() if key != "dynamic"}
    made = []
    for told, values in _by_module(path, config, "dynamic").items():
        expression = _expression(path, f"re:{told.removeprefix(_EXCEPTS).removeprefix(_CHANGES)}")
        fmt = None if told.startswith(_EXCEPTS) else read_format(path, {**whole, **values}, f"dynamic {told}")
        made.append(_Group(fmt, _matching([expression])))
    return [*made, _Group(read_format(path, whole), _all)]


def _auto_round_groups(path: Path, config: Mapping[str, Any]) -> list[_Group]:
    """By `extra_config`: whole names, then expressions that are found in names, with what the modules have else."""
    whole = {key: value for key, value in config.items() if key != "extra_config"}
    modules: dict[WeightFormat | None, list[str]] = {}
    made = []
    for told, values in _by_module(path, config, "extra_config").items():
        is_plain = (values.get("bits") or 0) >= _UNQUANTIZED_BITS
        fmt = None if is_plain else read_format(path, {**whole, **values}, f"extra_config {told}")
        if re.search(r"[*+?^$()\[\]{}|\\]", told):
            made.append(_Group(fmt, _matching([_expression(path, f"re:.*(?:{told})")])))
        else:
            modules.setdefault(fmt, []).append(told)
    return [*_named(modules), *made, _Group(read_format(path, whole), _all)]


def _by_module(path: Path, config: Mapping[str, Any], key: str) -> Mapping[str, Mapping[str, Any]]:
    """The object at `key`, of an object for each module or expression. Raises `CheckpointError` for anything else."""
    told = config[key]
    if not isinstance(told, Mapping) or not all(isinstance(each, Mapping) for each in told.values()):
        raise CheckpointError(
            f"{path}: quantization_config: {key} is {str(told)[:60]}, but must be an object that gives each module an "
            'object, as {"lm_head": {"bits": 8}}'
        )
    return told


@dataclass(frozen=True)
class _Group:
    """Modules that have one format.

    Attributes:
      fmt: the format; None: they are not quantized.
      has: whether the module of a whole name is one.
    """

    fmt: WeightFormat | None
    has: Callable[[str], bool]


def _all(module: str) -> bool:
    return True


def _matching(expressions: Sequence[re.Pattern[str]]) -> Callable[[str], bool]:
    """Whether a name begins as one of `expressions` says."""
    return lambda module: any(expression.match(module) for expression in expressions)


def _named(modules: Mapping[WeightFormat | None, Sequence[str]]) -> list[_Group]:
    """A group for each format, of the modules that are named, or that are within named ones."""

    def within(names: frozenset[str]) -> Callable[[str], bool]:
        def has(module: str) -> bool:
            parts = module.split(".")
            ends = range(1, len(parts) + 1)
            return any(".".join(parts[first:end]) in names for end in ends for first in range(end))

        return has

    return [_Group(fmt, within(frozenset(names))) for fmt, names in modules.items()]


def read_unquantized(
    path: Path, config: Mapping[str, Any], layers: Sequence[LayerSpec], *, draft_head: bool = False
) -> list[frozenset[str]]:
    """The matrices of each layer that `quantization_config` excepts, by their names in `LayerSpec.matrices`.

    Raises `CheckpointError` if it excepts a part of what is multiplied at once, or if an expression is none.
    """
    exceptions = _Exceptions(path, config)
    if exceptions.are_none:
        return [frozenset()] * len(layers)
    return [
        frozenset(name for name in spec.matrices if exceptions.has_one_of(layer, _spellings(spec, name)))
        for layer, spec in zip(_layer_names(len(layers), draft_head), layers, strict=True)
    ]


class _Exceptions:
    """The modules that `quantization_config` excepts.

    An exception is a part of a module's name, cut at its dots ("mlp.gate", "model.layers.3", "visual"), a whole name
    with "*" for any letters, or after "re:" an expression for how it begins. One that means no matrix of ours, as a
    norm, changes nothing. Modules that are no targets of compressed-tensors are excepted, too.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        keys = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")
        told = [str(each) for key in keys for each in modelopt_part(config).get(key) or ()]
        names = [each for each in told if not each.startswith("re:")]
        self._path = path
        self._parts = [f".{each.strip('.')}." for each in names]
        self._expressions = [_expression(path, each) for each in told if each.startswith("re:")]
        self._expressions += [re.compile(fnmatch.translate(each)) for each in names if "*" in each]
        self._targets = _targets(path, config)

    @property
    def are_none(self) -> bool:
        """Whether all modules are quantized."""
        return not self._parts and not self._expressions and self._targets is None

    def has_one_of(self, layer: str, spellings: tuple[tuple[str, ...], ...]) -> bool:
        """Whether a matrix of the named layer is excepted, whose modules files spell in one of these ways."""
        if self._targets is not None and all(self._is_whole(layer, each, self._is_no_target) for each in spellings):
            return True
        return any(self._is_whole(layer, each, self._is_named) for each in spellings)

    def _is_named(self, module: str) -> bool:
        names = _whole_names(module)
        return any(part in f".{name}." for part in self._parts for name in names) or any(
            expression.match(name) for expression in self._expressions for name in names
        )

    def _is_no_target(self, module: str) -> bool:
        return not any(target.match(name) for target in self._targets or () for name in _whole_names(module))

    def _is_whole(self, layer: str, modules: tuple[str, ...], is_left: Callable[[str], bool]) -> bool:
        """Whether all `modules` of one matrix are left unquantized; some of them can't be."""
        excepted = [is_left(f"{layer}.{module}") for module in modules]
        if any(excepted) and not all(excepted):
            raise CheckpointError(
                f"{self._path}: quantization_config leaves {modules[excepted.index(True)]} of {layer} unquantized and "
                f"{modules[excepted.index(False)]} not, but they are multiplied at once: except both or none"
            )
        return all(excepted)


def _expression(path: Path, told: str) -> re.Pattern[str]:
    """What `told` says after "re:"; else the name that it is."""
    if not told.startswith("re:"):
        return re.compile(re.escape(told))
    try:
        return re.compile(told.removeprefix("re:"))
    except re.error as error:
        raise CheckpointError(
            f"{path}: quantization_config names modules by {told!r}, which is no regular expression: {error}"
        ) from error


def _targets(path: Path, config: Mapping[str, Any]) -> list[re.Pattern[str]] | None:
    """Expressions for how the names of compressed-tensors' targets begin; None: all matrices are."""
    groups = (config.get("config_groups") or {}).values()
    told = [str(each) for group in groups for each in (group or {}).get("targets") or ()]
    if config.get("quant_method") != "compressed-tensors" or not told or "Linear" in told:
        return None
    return [_expression(path, each) for each in told]
