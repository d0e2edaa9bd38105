"""How a checkpoint's matrices are quantized, by `quantization_config` of its config.json.

Reads the words of FP8 releases, compressed-tensors, ModelOpt, AWQ and GPTQ; refuses every other format by its name, and
options that would change results. Never knows tensors: `weights/stored_matrix.py` reads them. Called by `arch`.
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
from jaxsgl.models.layer_spec import LayerSpec
from jaxsgl.models.quantization import Storage, WeightFormat, modelopt_part
from pallas_kernels.packed import MXFP4_GROUP

SUPPORTED = (
    "fp8 (e4m3, in blocks or per tensor), compressed-tensors (float8, int8, int4, nvfp4, mxfp4), modelopt (FP8, "
    "NVFP4), awq, gptq and auto-round (2, 3, 4 and 8 bits), mxfp4 (experts)"
)
EXPERTS_IN_MXFP4 = WeightFormat(
    "mxfp4", "float4_e2m1fn", group=MXFP4_GROUP, storage=Storage("mxfp4", 4, scale="_scales")
)
HEAD = "lm_head"
MODELOPT = "modelopt"  # what its methods begin with, and what a configuration without a method is
FP4_GROUP = 16  # inputs that share a scale in NVFP4
# Floats of 4 bits in compressed-tensors: how they are stored, and in groups of how many.
FP4_FORMATS = {"nvfp4-pack-quantized": ("packed_fp4", FP4_GROUP), "mxfp4-pack-quantized": ("packed_mxfp4", MXFP4_GROUP)}
FP8_IN_BLOCKS = ("FP8_PB_WO", "FP8_BLOCK_SCALES")
FP8_ALGOS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", *FP8_IN_BLOCKS)
FP8_BLOCK = 128
_CHANGES, _EXCEPTS = "+:", "-:"  # before an expression for modules with other numbers, and for unquantized ones
# How AutoRound packs: as the software for GPTQ, for AWQ, or for GPTQ but with zero points that are not less one.
AS_GPTQ = ("auto_round:auto_gptq", "auto_round:gptq", "auto_gptq")
AS_AWQ = ("auto_round:auto_awq", "auto_round:awq", "auto_awq")
AUTO_ROUND = "auto_round"
GPTQ_FORMS = ("gptq", "gptq_v2")  # of the first one, zero points are stored less one
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
    ),
    "q": (("self_attn.q_proj",),),
    "q_a": (("self_attn.q_a_proj",),),
    "q_b": (("self_attn.q_b_proj",),),
    "kv_a": (("self_attn.kv_a_proj_with_mqa",),),
    "kv_b": (("self_attn.kv_b_proj",),),
    "index_q": (("self_attn.indexer.wq_b",),),
    "index_k": (("self_attn.indexer.wk",),),
    "o": (("self_attn.o_proj",), ("self_attn.out_proj",), ("mixer.o_proj",)),
    "state_inputs": (
        ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        ("linear_attn.in_proj_qkvz",),
        ("mamba.in_proj",),
        ("mixer.in_proj",),
        ("conv.in_proj",),
    ),
    "state_output": (("linear_attn.out_proj",), ("mamba.out_proj",), ("mixer.out_proj",), ("conv.out_proj",)),
    "embedding_gate": (("per_layer_input_gate",),),
    "embedding_out": (("per_layer_projection",),),
    "gate_up": (
        ("mlp.gate_proj", "mlp.up_proj"),
        ("mlp.gate_up_proj",),
        ("mixer.up_proj",),
        ("feed_forward.w1", "feed_forward.w3"),
    ),
    "down": (("mlp.down_proj",), ("mixer.down_proj",), ("feed_forward.w2",)),
    "experts": (
        ("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.0.down_proj"),
        ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        ("block_sparse_moe.experts.0.w1", "block_sparse_moe.experts.0.w2", "block_sparse_moe.experts.0.w3"),
        ("experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj"),
        ("experts.gate_up_proj", "experts.down_proj"),
        tuple(f"feed_forward.experts.0.{name}" for name in ("w1", "w2", "w3")),
        ("mixer.experts.0.up_proj", "mixer.experts.0.down_proj"),
        ("mixer.experts.up_proj", "mixer.experts.down_proj"),
    ),
    "shared": (
        *(
            (f"mlp.{word}.gate_proj", f"mlp.{word}.up_proj", f"mlp.{word}.down_proj")
            for word in ("shared_experts", "shared_expert", "shared_mlp")
        ),
        ("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
    ),
}
# How names of the decoder's modules begin, in the different kinds of folders.
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "backbone.")
NEXT_MODULE = "mtp.layers.0"  # of a draft head, which is no part of the decoder


@dataclass(frozen=True)
class Quantized:
    """What `quantization_config` says of a model's matrices, by their names in `LayerSpec.matrices`.

    Attributes:
      fmt: the format that they keep.
      unquantized: of each layer, those that keep the model's dtype.
      stored_in: of each layer, those among them that the checkpoint has in other formats than `fmt`.
      head: the format of an output head that is quantized; None: any of the others.
    """

    fmt: WeightFormat
    unquantized: tuple[frozenset[str], ...]
    stored_in: tuple[tuple[tuple[str, WeightFormat], ...], ...]
    head: WeightFormat | None = None


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
    return [module] if module.startswith(NEXT_MODULE) else [prefix + module for prefix in _PREFIXES]


def _spellings(spec: LayerSpec, matrix: str) -> tuple[tuple[str, ...], ...]:
    """Those that files may have of a matrix of `spec`. Of experts next to an MLP none is within that MLP."""
    spellings = _MODULES[matrix]
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

    Of several formats one is kept, and what has another one is dequantized as it is loaded.

    Raises `CheckpointError` for a format that is not supported, by its name, and as `read_unquantized`.
    """
    groups = _groups(path, config)
    excepted, names = (
        read_unquantized(path, config, layers, draft_head=draft_head),
        _layer_names(len(layers), draft_head),
    )
    if groups is None:
        return Quantized(read_format(path, config), tuple(excepted), ((),) * len(layers))
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


def read_format(path: Path, config: Mapping[str, Any], within: str = "") -> WeightFormat:
    """The format that `quantization_config` of the file `path` describes, where it describes one.

    Errors name the part `within` it that `config` is read for.

    Raises `CheckpointError` for a format that is not supported, by its name.
    """
    method = config.get("quant_method", MODELOPT)
    readers = {
        "fp8": _fp8,
        "compressed-tensors": _compressed_tensors,
        **dict.fromkeys((MODELOPT, f"{MODELOPT}_fp4", f"{MODELOPT}_fp8", f"{MODELOPT}_mixed"), _modelopt),
        "awq": _awq,
        "gptq": _gptq,
        "auto-round": _auto_round,
        "gguf": _gguf,
    }
    if method not in readers:
        raise CheckpointError(f"{path}: weights quantized by {method} are not supported; supported are {SUPPORTED}")
    reader = _Reader(path, config, within)
    return readers[method](reader)


def read_unquantized(
    path: Path, config: Mapping[str, Any], layers: Sequence[LayerSpec], *, draft_head: bool = False
) -> list[frozenset[str]]:
    """The matrices of each layer that `quantization_config` excepts, by their names in `LayerSpec.matrices`.

    An exception is a part of a module's name, cut at its dots ("mlp.gate", "model.layers.3", "visual"), a whole name
    with "*" for any letters, or after "re:" an expression for how it begins. One that means no matrix of ours, as a
    norm, changes nothing. Modules that are no targets of compressed-tensors are excepted, too.

    Raises `CheckpointError` if it excepts a part of what is multiplied at once, or if an expression is none.
    """
    keys = ("ignore", "modules_to_not_convert", "exclude_modules")
    told = [str(each) for key in keys for each in modelopt_part(config).get(key) or ()]
    expressions = [_expression(path, each) for each in told if each.startswith("re:")]
    names_with_stars = [each for each in told if "*" in each and not each.startswith("re:")]
    expressions += [re.compile(fnmatch.translate(each)) for each in names_with_stars]
    parts = [f".{each.strip('.')}." for each in told if not each.startswith("re:")]
    targets = _targets(path, config)

    def is_excepted(module: str) -> bool:
        names = _whole_names(module)
        return any(part in f".{name}." for part in parts for name in names) or any(
            expression.match(name) for expression in expressions for name in names
        )

    def is_no_target(module: str) -> bool:
        return not any(target.match(name) for target in targets or () for name in _whole_names(module))

    def is_whole(layer: str, modules: tuple[str, ...], is_left: Callable[[str], bool]) -> bool:
        excepted = [is_left(f"{layer}.{module}") for module in modules]
        if any(excepted) and not all(excepted):
            raise CheckpointError(
                f"{path}: quantization_config leaves {modules[excepted.index(True)]} of {layer} unquantized and "
                f"{modules[excepted.index(False)]} not, but they are multiplied at once: except both or none"
            )
        return all(excepted)

    def is_kept(layer: str, spellings: tuple[tuple[str, ...], ...]) -> bool:
        if targets is not None and all(is_whole(layer, each, is_no_target) for each in spellings):
            return True
        return any(is_whole(layer, each, is_excepted) for each in spellings)

    if not told and targets is None:
        return [frozenset()] * len(layers)
    return [
        frozenset(name for name in spec.matrices if is_kept(layer, _spellings(spec, name)))
        for layer, spec in zip(_layer_names(len(layers), draft_head), layers, strict=True)
    ]


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


def has_quantized_experts(config: Mapping[str, Any]) -> bool:
    """Whether experts are quantized, and nothing else is: MXFP4."""
    return config.get("quant_method") == "mxfp4"


class _Reader:
    """Values of a configuration, with errors that name file, key and value."""

    def __init__(self, path: Path, values: Mapping[str, Any], within: str = "") -> None:
        self.path = path
        self.values = values
        self._within = within
        self._where = f"{path}: quantization_config: {within}{': ' if within else ''}"

    def with_values(self, values: Mapping[str, Any]) -> _Reader:
        """The same with these values in place of its own."""
        return _Reader(self.path, {**self.values, **values}, self._within)

    def one_of(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """The value, which must be one of `allowed`; `default` where it is missing or null."""
        value = self.values.get(key)
        value = default if value is None else value
        if value not in allowed:
            told = ", ".join(map(str, allowed))
            raise CheckpointError(f"{self._where}{key} is {value}; supported are {told}")
        return value

    def group(self, key: str = "group_size") -> int | None:
        """Inputs that share a scale; None for -1, all of them."""
        value = self.values.get(key, -1)
        if value in (None, -1):
            return None
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self._where}{key} is {value}, but must be -1, or 1 and more")
        return value


def _fp8(config: _Reader) -> WeightFormat:
    """FP8 releases: DeepSeek's and Qwen's blocks with `weight_scale_inv`, or one `weight_scale` for a tensor."""
    config.one_of("fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    if config.values.get("weight_block_size") is None:
        return WeightFormat("fp8", "float8_e4m3fn", storage=Storage("plain", scale="weight_scale"))
    rows, columns = _block(config, "weight_block_size")
    storage = Storage("plain", scale="weight_scale_inv", block_rows=rows)
    return WeightFormat("fp8", "float8_e4m3fn", group=columns, storage=storage)


def _gguf(config: _Reader) -> WeightFormat:
    """Of a folder that `weights/gguf_folder.py` made: blocks of 32 inputs with a scale, read as numbers and scales."""
    numbers = {"Q8_0": "int8", "Q4_0": "int4"}
    kind = config.one_of("format", *numbers)
    return WeightFormat("gguf", numbers[kind], group=32, storage=Storage("plain", scale="weight_scale"))


def _compressed_tensors(config: _Reader) -> WeightFormat:
    groups = [group for group in (config.values.get("config_groups") or {}).values() if (group or {}).get("weights")]
    if len({str(group["weights"]) for group in groups}) != 1:
        raise CheckpointError(
            f"{config.path}: quantization_config has {len(groups)} formats of weights, but 1 is supported"
        )
    _refuse_what_weights_lack(config)
    formats = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", *FP4_FORMATS)
    form = config.one_of("format", *formats)
    weights = _Reader(config.path, groups[0]["weights"])
    kind, bits = weights.one_of("type", "float", "int", default="int"), weights.one_of("num_bits", 8, 4, default=8)
    strategy = weights.one_of("strategy", "tensor", "channel", "group", "block", "tensor_group", default="tensor")
    has_zeros = not weights.one_of("symmetric", True, False, default=True)
    actorder = weights.one_of("actorder", None, False, "weight", "static", "group", "dynamic")
    group = weights.group() if strategy == "group" else None
    if form in FP4_FORMATS:
        stored_as, size = FP4_FORMATS[form]
        for key, value in (("type", "float"), ("num_bits", 4), ("group_size", size)):
            weights.one_of(key, value)
        return WeightFormat("compressed-tensors", "int8", group=size, storage=Storage(stored_as, 4))
    if kind == "float":
        if bits != 8 or has_zeros:
            raise CheckpointError(
                f"{config.path}: weights of {bits} bits of type float are not supported as {form}: give "
                f"{' or '.join(FP4_FORMATS)}"
            )
        rows, columns = _block(weights, "block_structure") if strategy == "block" else (1, group)
        storage = Storage("plain", scale="weight_scale", block_rows=rows)
        return WeightFormat("compressed-tensors", "float8_e4m3fn", group=columns, storage=storage)
    packed = form == "pack-quantized"
    if strategy == "block" or (bits == 4 and not packed):
        raise CheckpointError(f"{config.path}: int{bits} weights by {strategy} as {form} are not supported")
    storage = Storage("packed" if packed else "plain", bits, scale="weight_scale", has_zeros=has_zeros)
    return WeightFormat(
        "compressed-tensors", f"int{bits}", group=group, has_zeros=has_zeros,
        reorders=packed and actorder in ("group", "dynamic"), storage=storage,
    )  # fmt: skip


def _refuse_what_weights_lack(config: _Reader) -> None:
    """Raises `CheckpointError` for sparse weights, and for rotations that aren't folded into the weights."""
    sparse = (config.values.get("sparsity_config") or {}).get("format") or "dense"
    if sparse != "dense":
        raise CheckpointError(f"{config.path}: quantization_config: sparsity_config is {sparse}; supported is dense")
    schemes = ((config.values.get("transform_config") or {}).get("config_groups") or {}).values()
    places = [str(each.get("location")) for scheme in schemes for each in scheme.get("apply") or ()]
    online = [place for place in places if not place.startswith("weight_")]
    if online:
        raise CheckpointError(
            f"{config.path}: quantization_config: transform_config rotates at {online[0]}, but activations are not "
            "rotated here: supported are rotations of weights"
        )


def _block(weights: _Reader, key: str) -> tuple[int, int]:
    """Outputs and inputs that share a scale; older folders write "128x128"."""
    told = weights.values.get(key)
    sides = told.split("x") if isinstance(told, str) else told
    if not isinstance(sides, list) or len(sides) != 2 or not all(str(side).isdecimal() for side in sides):
        raise CheckpointError(
            f"{weights.path}: quantization_config: {key} is {told}, but must be two numbers, as [128, 128]"
        )
    return int(sides[0]), int(sides[1])


def _modelopt(config: _Reader) -> WeightFormat:
    """FP8 with a scale for a tensor, output or block, or NVFP4: 4 bits in groups, whose scales of float8 have a scale.

    Their values are whole numbers after doubling, and are kept as int8.
    """
    inner = _Reader(config.path, modelopt_part(config.values))
    algo = inner.one_of("quant_algo", *FP8_ALGOS, "NVFP4", "W4A16_NVFP4")
    if algo in FP8_ALGOS:
        block = inner.group() or FP8_BLOCK if algo in FP8_IN_BLOCKS else None
        storage = Storage("plain", scale="weight_scale", block_rows=block or 1)
        return WeightFormat("modelopt", "float8_e4m3fn", group=block, storage=storage)
    group = inner.one_of("group_size", FP4_GROUP, default=FP4_GROUP)
    return WeightFormat("modelopt", "int8", group=group, storage=Storage("fp4", 4))


def _awq(config: _Reader) -> WeightFormat:
    bits = config.one_of("bits" if "bits" in config.values else "w_bit", 4)
    config.one_of("version", "gemm", "GEMM", default="gemm")
    group = config.group("group_size" if "group_size" in config.values else "q_group_size")
    return WeightFormat(
        "awq", "int4", group=group, has_zeros=True, storage=Storage("awq", bits, "scales", has_zeros=True)
    )


def _auto_round(config: _Reader) -> WeightFormat:
    """AutoRound packs as GPTQ's or AWQ's software does, but for zero points of its own form.

    Folders of old versions name a `backend`, which may be the packing.
    """
    config.one_of("data_type", "int", default="int")
    key = "packing_format" if config.values.get("packing_format") or not config.values.get("backend") else "backend"
    packing = config.one_of(key, *AS_GPTQ, *AS_AWQ, AUTO_ROUND, default=AS_GPTQ[0])
    form = "gptq_v2" if packing == AUTO_ROUND else "gptq"
    values = {"version": "gemm", "desc_act": False, "checkpoint_format": form, "format": form}
    return replace((_awq if packing in AS_AWQ else _gptq)(config.with_values(values)), method="auto-round")


def _gptq(config: _Reader) -> WeightFormat:
    """Numbers of 2 and 3 bits are kept in 4."""
    bits = config.one_of("bits", 2, 3, 4, 8)
    form = config.one_of("format", *GPTQ_FORMS, default=GPTQ_FORMS[0])
    of_files = config.one_of("checkpoint_format", *GPTQ_FORMS, default=form)
    if config.values.get("format") and of_files != form:
        raise CheckpointError(
            f"{config.path}: quantization_config: format is {form} and checkpoint_format is {of_files}, which store "
            "zero points otherwise: leave the one that is right"
        )
    has_zeros = not config.one_of("sym", True, False, default=True)
    group = config.group()
    storage = Storage("gptq", bits, "scales", has_zeros=has_zeros, zeros_one_less=of_files == GPTQ_FORMS[0])
    reorders = group is not None and bool(config.values.get("desc_act"))
    numbers = "int8" if bits == 8 else "int4"
    return WeightFormat("gptq", numbers, group=group, has_zeros=has_zeros, reorders=reorders, storage=storage)
