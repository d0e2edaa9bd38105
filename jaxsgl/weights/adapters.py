"""Reads LoRA adapters from the folders that PEFT writes: adapter_config.json and adapter_model.safetensors.

    AdapterFolder(folder, arch)    reads the configuration and the names and shapes of the tensors; refuses by name what
                                   the decoder's arithmetic (`models/lora.py`) can't express
    .columns(modules, dtype)       reads the numbers, as the pool's arrays keep them: fused, scaled, finite

Owns PEFT's keys and names. Never knows the pool or which adapters are loaded. Called by `engine/adapters.py`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxsgl.errors import CheckpointError
from jaxsgl.json_file import read_object
from jaxsgl.models import DenseMlp, ModelArch
from jaxsgl.models.layers import qkv_heads
from jaxsgl.models.lora import MODULES, QKV, adaptable_modules, pool_arrays
from jaxsgl.weights.pieces import fuse_heads
from jaxsgl.weights.stored_names import adapters_name
from jaxsgl.weights.tensor_files import FLOAT_DTYPES, MappedFile

_NAME = re.compile(r"\^?[\w.-]+")
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
Matrix = npt.NDArray[np.float32]

# Keys that say how the adapter was trained or initialized, or which tensors there are, which their names tell.
_HARMLESS = frozenset({
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core", "peft_type", "peft_version", "alpha_pattern",
    "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type",
    "use_rslora",
})  # fmt: skip
_WORDS = {
    "use_dora": "DoRA", "modules_to_save": "whole modules", "trainable_token_indices": "trained embeddings",
    "fan_in_fan_out": "transposed weights", "lora_bias": "biases of B", "use_qalora": "QALoRA",
    "layer_replication": "repeated layers", "target_parameters": "parameters of experts",
    "alora_invocation_tokens": "activated LoRA",
}  # fmt: skip
# Ways to begin a training that change the base model's weights as well.
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Those of a decoder that was adapted without its head begin with layers. Attention's gates are no MLP's.
_BASE = "base_model.model."
_TENSOR = re.compile(
    r"(?:language_model\.)?(?:model\.)?(?:language_model\.|decoder\.)?layers\.(\d+)\."
    r"(?:self_attn\.(?!gate_proj)|mlp\.|feed_forward\.|(?=fc[12]\.))(\w+)\.lora_(A|B)\.weight"
)
# Of Phi, OPT and StarCoder 2, which have no gates.
_OTHER_WORDS = {
    "dense": "o_proj", "out_proj": "o_proj", "fc1": "up_proj", "fc2": "down_proj", "c_fc": "up_proj",
    "c_proj": "down_proj",
}  # fmt: skip
_FUSED = {"qkv_proj": QKV, "gate_up_proj": ("gate_proj", "up_proj")}  # of Phi and GLM


class AdapterFolder:
    """An adapter on disk, for the model `arch`. Raises `CheckpointError` if it can't be served.

    Attributes:
      folder: where it lies.
      rank: the most columns of a module.
      modules: what it changes, by PEFT's names of unfused modules.
    """

    def __init__(self, folder: Path, arch: ModelArch) -> None:
        self.folder = folder
        self._arch = arch
        self._config = _read_config(folder)
        self._alpha = _number(folder, "lora_alpha", self._config.get("lora_alpha", 8))
        self._alphas = _alpha_pattern(folder, self._config.get("alpha_pattern") or {})
        if not (folder / WEIGHTS_FILE).is_file():
            raise CheckpointError(f"{folder} has no {WEIGHTS_FILE}: save the adapter as safetensors")
        self._file = MappedFile(folder / WEIGHTS_FILE)
        self._pairs = self._find_pairs()
        self.rank = max(self._rank_of(names) for names in self._pairs.values())
        self.modules = frozenset(part for _, module in self._pairs for part in _FUSED.get(module, (module,)))

    def digest(self) -> str:
        """Of all numbers and what scales them: equal for equal adapters. Reads them all."""
        digest = hashlib.blake2b(digest_size=16)
        for (layer, module), names in sorted(self._pairs.items()):
            digest.update(f"{layer} {module} {self._scale(names['A'], self._rank_of(names))!r} ".encode())
            for part in "AB":
                array = self._file.array(names[part])
                digest.update(f"{array.dtype} {array.shape} ".encode())
                digest.update(array.tobytes())
        return digest.hexdigest()

    def columns(self, modules: frozenset[str], dtype: npt.DTypeLike) -> list[dict[str, npt.NDArray[Any]]]:
        """The arrays of `pool_arrays` with `rank` columns, by layer; zeros where the adapter changes nothing.

        Raises `CheckpointError` if it changes other modules than `modules`, or holds numbers that aren't finite.
        """
        if not self.modules <= modules:
            others = ", ".join(sorted(self.modules - modules))
            raise CheckpointError(
                f"{self.folder} changes {others}, but adapters may change {', '.join(sorted(modules))} here: start the "
                "server with --lora-target-modules all"
            )
        layers = []
        for layer in range(self._arch.num_layers):
            arrays = {
                name: np.zeros(array.shape, np.float32)
                for name, array in pool_arrays(self._arch, layer, modules, self.rank).items()
            }
            self._fill(layer, modules, arrays)
            layers.append({name: np.ascontiguousarray(array.astype(dtype)) for name, array in arrays.items()})
            if not all(np.isfinite(array.astype(np.float32)).all() for array in layers[-1].values()):
                raise CheckpointError(f"{self.folder} holds numbers that aren't finite in {np.dtype(dtype).name}")
        return layers

    def _fill(self, layer: int, modules: frozenset[str], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        pairs = {
            part: pair
            for (of_layer, module), names in self._pairs.items()
            if of_layer == layer
            for part, pair in self._unfused(module, names).items()
        }
        for group, members in (("qkv_a", QKV), ("gate_up_a", MODULES[4:6])):
            for place, module in enumerate(module for module in members if module in modules):
                if module in pairs:
                    a = pairs[module][0]
                    arrays[group][place, : len(a)] = a
        for module, (a, b) in pairs.items():
            if f"{module}_a" in arrays:
                arrays[f"{module}_a"][: len(a)] = a
            rows = np.moveaxis(self._heads(module, b) if module in QKV else b, -1, 0)
            arrays[f"{module}_b"][: len(rows)] = rows

    def _unfused(self, module: str, names: dict[str, str]) -> dict[str, tuple[Matrix, Matrix]]:
        """A `[r, in]` and the scaled B `[out, r]` of a module, of each part of a fused one."""
        a, b = (self._file.array(names[part]).astype(np.float32) for part in "AB")
        b = b * np.float32(self._scale(names["A"], len(a)))
        if module not in _FUSED:
            return {module: (a, b)}
        sizes = [_shape_of(self._arch, part)[0] for part in _FUSED[module]]
        parts = np.split(b, np.cumsum(sizes)[:-1])
        return {part: (a, of_part) for part, of_part in zip(_FUSED[module], parts, strict=True)}

    def _heads(self, module: str, b: Matrix) -> Matrix:
        """B `[out, r]` as `[K, heads, H, r]`, in the order in which the fused weights keep heads and dimensions."""
        arch = self._arch
        whole = np.zeros((*qkv_heads(arch), b.shape[1]), np.float32)
        parts = tuple(
            b if each == module else np.zeros((_shape_of(arch, each)[0], b.shape[1]), np.float32) for each in QKV
        )
        for place, numbers in fuse_heads(arch, parts):
            whole[place] = np.asarray(numbers)
        first, last = {"q_proj": (0, -2), "k_proj": (-2, -1), "v_proj": (-1, None)}[module]
        return whole[:, first:last]

    def _scale(self, name: str, rank: int) -> float:
        """alpha / r, or alpha / sqrt(r) for rank-stabilized LoRA (arXiv 2312.03732); names match as in PEFT."""
        module = name.removeprefix(_BASE).removesuffix(".lora_A.weight")
        found = (alpha for name, alpha in self._alphas.items() if _names(name, module))
        alpha = next(found, self._alpha)
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _find_pairs(self) -> dict[tuple[int, str], dict[str, str]]:
        """The names of A and B, by layer and module, fused ones as the checkpoint calls them; all are checked."""
        pairs: dict[tuple[int, str], dict[str, str]] = {}
        for name in self._file.tensors:
            match = _TENSOR.fullmatch(adapters_name(name.removeprefix(_BASE), self._arch))
            if match is None or int(match[1]) >= self._arch.num_layers:
                elsewhere = f"belongs to no layer of {self._arch.name} that an adapter may change{self._base()}"
                raise CheckpointError(f"{self.folder}: tensor {name} {_why_not(name) or elsewhere}")
            pairs.setdefault((int(match[1]), _OTHER_WORDS.get(match[2], match[2])), {})[match[3]] = name
        if not pairs:
            raise CheckpointError(f"{self.folder} holds no tensors")
        for (layer, module), names in pairs.items():
            self._check(layer, module, names)
        return pairs

    def _check(self, layer: int, module: str, names: dict[str, str]) -> None:
        arch, parts = self._arch, _FUSED.get(module, (module,))
        in_mlp = parts[0] in MODULES[4:]
        if not adaptable_modules(arch).issuperset(parts) or (
            in_mlp and not isinstance(arch.layers[layer].mlp, DenseMlp)
        ):
            raise CheckpointError(
                f"{self.folder} changes {module} of layer {layer}, but adapters may change "
                f"{', '.join(module for module in MODULES if module in adaptable_modules(arch))} of attention and "
                "dense MLPs only, not experts, routers or heads"
            )
        if names.keys() != {"A", "B"}:
            raise CheckpointError(f"{self.folder}: {next(iter(names.values()))} stands alone, without its other half")
        out, inputs = sum(_shape_of(arch, part)[0] for part in parts), _shape_of(arch, parts[0])[1]
        rank = self._rank_of(names)
        for part, expected in (("A", (rank, inputs)), ("B", (out, rank))):
            stored = self._file.tensors[names[part]]
            if stored.shape != expected or stored.dtype not in FLOAT_DTYPES or not rank:
                raise CheckpointError(
                    f"{self.folder}: tensor {names[part]} is {stored.dtype} of shape {stored.shape}, but must be "
                    f"floats of shape {expected} for {arch.name}{self._base()}"
                )

    def _base(self) -> str:
        """What the adapter says that it was trained for, after an error that may come from another model."""
        base = self._config.get("base_model_name_or_path")
        return f": it was trained for {base!r:.200}, which it needs" if base else ""

    def _rank_of(self, names: Mapping[str, str]) -> int:
        shape = self._file.tensors[names["A"]].shape if "A" in names else ()
        return shape[0] if shape else 0


def _alpha_pattern(folder: Path, given: Any) -> dict[str, float]:
    """alpha by name of modules. PEFT takes the names for regular expressions, which may take for ever: those that are
    more than a name are refused."""
    if not isinstance(given, dict):
        raise CheckpointError(f"{folder}: alpha_pattern holds a {type(given).__name__}, but must hold an object")
    for name in given:
        if not _NAME.fullmatch(name):
            raise CheckpointError(
                f"{folder}: alpha_pattern names {name[:100]!r}, which is a regular expression: write the names of "
                "modules that it stands for, such as q_proj, mlp.up_proj or ^model.layers.0.mlp.up_proj"
            )
    return {name: _number(folder, f"alpha_pattern of {name}", alpha) for name, alpha in given.items()}


def _names(name: str, module: str) -> bool:
    """Whether a name of `alpha_pattern` stands for a module: its whole name after ^, otherwise the end of it."""
    return name[1:] == module if name.startswith("^") else f".{module}".endswith(f".{name}")


def _number(folder: Path, what: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise CheckpointError(f"{folder}: {what} is {given!r:.100}, but must be a finite number")
    return float(given)


def _read_config(folder: Path) -> dict[str, Any]:
    """The configuration, if all that it says can be served."""
    if not (folder / CONFIG_FILE).exists():
        holds = "a model's config.json" if (folder / "config.json").exists() else f"no {CONFIG_FILE}"
        raise CheckpointError(
            f"{folder} is not an adapter's folder: it has {holds}; name the one that PEFT's save_pretrained wrote, "
            f"with {CONFIG_FILE} and {WEIGHTS_FILE}"
        )
    try:
        config = read_object(folder / CONFIG_FILE)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} is not an adapter's folder: {error}") from error
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{folder} is an adapter of kind {config.get('peft_type')}: only LORA is supported")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{folder}: bias is {config['bias']}, but an adapter can't change biases here: use none")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGE_THE_BASE):  # PEFT ignores case, too
        raise CheckpointError(
            f"{folder}: init_lora_weights is {start}, which changes the base model, too: save the adapter with "
            "path_initial_model_for_weight_conversion"
        )
    set_keys = (key for key, value in config.items() if key not in _HARMLESS and value not in (None, False, {}, []))
    for key in set_keys:
        words = f" ({_WORDS[key]})" if key in _WORDS else ""
        raise CheckpointError(f"{folder}: {key}{words} is {config[key]!r:.100}, which is not supported")
    return config


def _why_not(name: str) -> str | None:
    """Why no model is served with a tensor of this name; None: some are."""
    for part, why in (
        ("lora_embedding", "changes embeddings, which is not supported"),
        ("lora_magnitude_vector", "belongs to DoRA, which is not supported"),
        ("bias", "is a bias, which is not supported"),
        ("lm_head", "changes the output head, which is not supported"),
        ("embed_tokens", "changes embeddings, which is not supported"),
        ("expert", "changes experts, which is not supported"),
    ):
        if part in name:
            return why
    return None


def _shape_of(arch: ModelArch, module: str) -> tuple[int, int]:
    """`(out, in)` of a module as the checkpoint stores it."""
    d, f, nh, kh = arch.hidden_size, arch.ffn_size, arch.num_heads * arch.head_dim, arch.stored_kv_heads * arch.head_dim
    return {
        "q_proj": (nh, d), "k_proj": (kh, d), "v_proj": (kh, d), "o_proj": (d, nh),
        "gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f),
    }[module]  # fmt: skip
