"""Maps the tensors of mixtures of experts to our parameters: one tensor per expert, or all experts stacked in one.

Checkpoints name experts singly, or stack them as `[E, out, in]` or `[E, in, out]`; the shapes of a layer's two stacks,
of which one at least isn't square, tell these apart. A stack may be in FP8, with a stack of scales (`quantized.py`), or
in MXFP4, as blocks and scales. Our parameters are `gate_up [E, 2, F, D]`, an expert's gates before its ups, and
`down [E, D, F]`. As in `names`, recipes make views only. `quantized.py` asks here first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from jaxsgl.errors import CheckpointError
from jaxsgl.models import ModelArch
from jaxsgl.models.layer_spec import MoeMlp
from jaxsgl.weights.mxfp4 import Mxfp4, Mxfp4Scales
from jaxsgl.weights.pieces import as_is, of_transposed, split_gate_up, stacked
from jaxsgl.weights.recipe import Path, Piece, Recipe, Source, Tensor, shape_of
from jaxsgl.weights.stored_names import stored_name
from pallas_kernels import Router

ShapeOf = Callable[[str], tuple[int, ...] | None]  # of the checkpoint's tensor of that name; None: there is none


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls the tensors of a layer's experts.

    Attributes:
      block: how all names begin; `{}` stands for the layer.
      router: the router's weights, which may have a `.bias` next to them.
      choice_bias: the bias that counts for the choice alone, and its axes.
      may_lack_bias: without that tensor the bias is 0.
      gate, up, down: of one expert, for which `{}` stands.
      stacked_gate_up, stacked_down: of all experts. Biases are called so with `_bias`.
      stacked_up: of all experts, where they have no gates.
      latent_in, latent_out: what makes the numbers that experts read, and goes back from those that they make.
      factor: what the shares of experts are multiplied by.
      shared: how names of shared experts begin, after the block's.
      fused_shared: how they begin where gates and ups are one tensor, the layer included; "": they are two.
      interleaved: a stack has gates and ups in turns; else all gates before all ups.
      transposed: stacks are `[E, in, out]` where their shapes don't tell.
      in_memory: the names in transformers' models, of which `state_dict()` and some folders have other ones; None: they
        are the same.
    """

    block: str = "model.layers.{}.mlp."
    router: str = "gate.weight"
    choice_bias: tuple[str, tuple[str, ...]] = ("gate.e_score_correction_bias", ("E",))
    may_lack_bias: bool = False
    gate: str = "experts.{}.gate_proj.weight"
    up: str = "experts.{}.up_proj.weight"
    down: str = "experts.{}.down_proj.weight"
    stacked_gate_up: str = "experts.gate_up_proj"
    stacked_down: str = "experts.down_proj"
    stacked_up: str = "experts.up_proj"
    latent_in: str = "fc1_latent_proj.weight"
    latent_out: str = "fc2_latent_proj.weight"
    factor: str = ""
    shared: str = "shared_experts."
    fused_shared: str = ""
    interleaved: bool = False
    transposed: bool = False
    in_memory: ExpertNames | None = None

    def of_checkpoint(self, router: Router, has: Callable[[str], bool]) -> ExpertNames:
        """These names or those in memory: the first of which the checkpoint `has` the small tensors, by their ends."""
        for names in filter(None, (self, self.in_memory)):
            small = (names.router, *((names.choice_bias[0],) if router.choice_bias else ()))
            if all(has(names.block + name) for name in small):
                return names
        return self


_MIXTRAL = ExpertNames(
    block="model.layers.{}.block_sparse_moe.",
    gate="experts.{}.w1.weight",
    up="experts.{}.w3.weight",
    down="experts.{}.w2.weight",
    in_memory=ExpertNames(),
)
_GRANITE_IN_MEMORY = ExpertNames(
    block="model.layers.{}.block_sparse_moe.", router="router.weight", fused_shared="model.layers.{}.shared_mlp."
)
_GRANITE = replace(
    _GRANITE_IN_MEMORY,
    router="router.layer.weight",
    stacked_gate_up="input_linear.weight",
    stacked_down="output_linear.weight",
    in_memory=_GRANITE_IN_MEMORY,
)
_MINIMAX_BIAS = ("e_score_correction_bias", ("E",))
_ERNIE_BIAS = ("moe_statics.e_score_correction_bias", ("1", "E"))

# What names of a stack's numbers end with.
STACKED_NUMBERS = ("", "_weight_packed", "_packed", "_qweight")

NAMES: dict[str, ExpertNames] = {
    "MixtralForCausalLM": _MIXTRAL,
    "KimiLinearForCausalLM": _MIXTRAL,
    "PhimoeForCausalLM": replace(_MIXTRAL, in_memory=ExpertNames(router="router.weight")),
    "MiniMaxM2ForCausalLM": replace(
        _MIXTRAL, choice_bias=_MINIMAX_BIAS, in_memory=ExpertNames(choice_bias=_MINIMAX_BIAS)
    ),
    "Ernie4_5_MoeForCausalLM": ExpertNames(
        choice_bias=_ERNIE_BIAS, in_memory=ExpertNames(choice_bias=("gate." + _ERNIE_BIAS[0], _ERNIE_BIAS[1]))
    ),
    **dict.fromkeys(
        (
            "Qwen2MoeForCausalLM",
            "Qwen3NextForCausalLM",
            "Qwen3_5MoeForCausalLM",
            "Qwen3_5MoeForConditionalGeneration",
        ),
        ExpertNames(shared="shared_expert."),
    ),
    **dict.fromkeys(
        (
            "GraniteMoeForCausalLM",
            "GraniteMoeSharedForCausalLM",
            "GraniteMoeHybridForCausalLM",
            "GraniteMoeSWAForCausalLM",
        ),
        _GRANITE,
    ),
    "Lfm2MoeForCausalLM": ExpertNames(
        block="model.layers.{}.feed_forward.",
        choice_bias=("expert_bias", ("E",)),
        gate="experts.{}.w1.weight",
        up="experts.{}.w3.weight",
        down="experts.{}.w2.weight",
    ),
    "JambaForCausalLM": ExpertNames(block="model.layers.{}.feed_forward.", router="router.weight"),
    "NemotronHForCausalLM": ExpertNames(block="model.layers.{}.mixer."),
    **dict.fromkeys(
        ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
        ExpertNames(
            block="model.layers.{}.feed_forward.", router="router.weight", shared="shared_expert.", transposed=True
        ),
    ),
    "AXK1ForCausalLM": ExpertNames(may_lack_bias=True),
    "LongcatFlashForCausalLM": ExpertNames(
        block="model.layers.{}.moe.",
        router="router.classifier.weight",
        choice_bias=("router.e_score_correction_bias", ("EI",)),
    ),
    "HunYuanMoEV1ForCausalLM": ExpertNames(router="gate.wg.weight", shared="shared_mlp."),
    "AfmoeForCausalLM": ExpertNames(router="router.gate.weight", choice_bias=("expert_bias", ("E",))),
    "Kolibri1ForCausalLM": ExpertNames(
        block="model.layers.{}.",
        router="mlp.gate.weight",
        choice_bias=("moe.router.expert_bias", ("E",)),
        gate="mlp.experts.{}.gate_proj.weight",
        up="mlp.experts.{}.up_proj.weight",
        down="mlp.experts.{}.down_proj.weight",
        stacked_gate_up="mlp.experts.gate_up_proj",
        stacked_down="mlp.experts.down_proj",
        shared="mlp.shared_experts.",
    ),
    "LagunaForCausalLM": ExpertNames(
        choice_bias=("experts.e_score_correction_bias", ("E",)), shared="shared_expert.", in_memory=ExpertNames()
    ),
    "HYV3ForCausalLM": ExpertNames(
        router="router.gate.weight",
        choice_bias=("expert_bias", ("E",)),
        shared="shared_mlp.",
        in_memory=ExpertNames(choice_bias=_MINIMAX_BIAS),
    ),
    "ExaoneMoeForCausalLM": ExpertNames(choice_bias=_MINIMAX_BIAS, in_memory=ExpertNames()),
    **dict.fromkeys(
        ("GptOssForCausalLM", "InternVLGptOssForConditionalGeneration"),
        ExpertNames(router="router.weight", interleaved=True, transposed=True),
    ),
    **dict.fromkeys(
        ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
        ExpertNames(
            block="model.layers.{}.",
            router="router.proj.weight",
            factor="router.per_expert_scale",
        ),
    ),
}


def mixture_at(path: Path, arch: ModelArch) -> MoeMlp | None:
    """The mixture of experts that the parameter at `path` belongs to."""
    if path[0] != "layers" or path[2] not in ("mlp", "experts"):
        return None
    assert isinstance(path[1], int)
    layer = arch.layers[path[1]]
    mlp = layer.experts if path[2] == "experts" else layer.mlp
    return mlp if isinstance(mlp, MoeMlp) else None


def recipe_of_experts(path: Path, arch: ModelArch, shape_of: ShapeOf) -> Recipe | None:
    """The recipe of the parameter at `path`; None unless it belongs to a mixture of experts."""
    mixture = mixture_at(path, arch)
    if mixture is None:
        return None
    assert isinstance(path[1], int)
    return _of_layer(path[1], mixture, arch, shape_of).recipe(*map(str, path[3:]))


def with_padded_units(path: Path, pieces: tuple[Piece, ...], arch: ModelArch) -> tuple[Piece, ...]:
    """The pieces of the parameter at `path`; if it has an axis of experts' units, with zeros after them.

    That are the third ones of `gate_up [E, 2, F, D]`, `down [E, D, F]` and biases `[E, 2, F]`, or these units' groups
    or pairs.
    """
    mixture = mixture_at(path, arch)
    if mixture is None or not mixture.padding or path[3] == "shared":
        return pieces
    shape = shape_of(pieces)
    if len(shape) < 3 or shape[2] == 1:
        return pieces
    padding, rest = divmod(shape[2] * mixture.padding, mixture.ffn_size)
    assert rest == 0, f"{mixture.padding} after {mixture.ffn_size} units are no whole number after {shape[2]}"
    zeros = np.broadcast_to(np.zeros((), pieces[0].numbers.dtype), (*shape[:2], padding, *shape[3:]))
    before = (slice(None), slice(None))
    cut = (Piece((*place, *before[len(place) :], slice(shape[2])), numbers) for place, numbers in pieces)
    return *cut, Piece((*before, slice(shape[2], shape[2] + padding)), zeros)


def recipe_of_mxfp4(path: Path, part: str, most_scale: int, arch: ModelArch, shape_of: ShapeOf) -> Recipe:
    """The recipe of a part, "numbers" or "scale", of the stack at `path`, which is kept in MXFP4 as it is published.

    Larger scales than `most_scale` are refused.
    """
    layer = path[1]
    assert isinstance(layer, int)
    mlp = arch.layers[layer].mlp
    assert isinstance(mlp, MoeMlp)
    return _of_layer(layer, mlp, arch, shape_of).part_of_packed(str(path[3]), part, most_scale)


def _of_layer(layer: int, mlp: MoeMlp, arch: ModelArch, shape_of: ShapeOf) -> _OfLayer:
    def as_stored(name: str) -> str:
        return stored_name(name.format(arch.stage.layers_before + layer), arch)

    names = NAMES.get(arch.name, ExpertNames()).of_checkpoint(
        mlp.router, lambda name: shape_of(as_stored(name)) is not None
    )
    return _OfLayer(names, as_stored(names.block), as_stored(names.fused_shared), mlp, arch, shape_of)


@dataclass(frozen=True)
class _OfLayer:
    names: ExpertNames
    block: str
    fused_shared: str
    mlp: MoeMlp
    arch: ModelArch
    shape_of: ShapeOf

    def recipe(self, name: str, of_shared: str = "") -> Recipe:
        """The recipe of the parameter `name`, or of `of_shared` within the shared experts."""
        names, block = self.names, self.block
        if name == "shared":
            return self._shared(of_shared)
        small = {
            "router": (names.router, ("EI" if self.mlp.num_identities else "E", "D")),
            "router_bias": (names.router.replace(".weight", ".bias"), ("E",)),
            "choice_bias": names.choice_bias,
            "experts_of_tokens": (names.router.removesuffix("weight") + "tid2eid", ("V", "AT")),
            "expert_factor": (names.factor, ("E",)),
            "shared_gate": ("shared_expert_gate.weight", ("1", "D")),
            "down_bias": (names.stacked_down + "_bias", ("E", "D")),
            "latent_in": (names.latent_in, ("EL", "D")),
            "latent_out": (names.latent_out, ("D", "EL")),
        }
        if name == "choice_bias" and names.may_lack_bias and self.shape_of(block + names.choice_bias[0]) is None:
            return Recipe((), partial(_zeros, self.mlp.num_experts))
        if name in small:
            tensor, axes = small[name]
            source = Source(block + tensor, axes, has_ids=name == "experts_of_tokens")
            return Recipe((source,), _flat if name == "choice_bias" else as_is)
        if name == "gate_up_bias":
            return Recipe((Source(block + names.stacked_gate_up + "_bias", ("E", "2EF")),), self._gate_up)
        if self.shape_of(block + names.stacked_gate_up + "_blocks") is not None:
            return self._packed(name)
        is_stacked = any(self.shape_of(block + self._stacked_first + end) is not None for end in STACKED_NUMBERS)
        return self._stacked(name) if is_stacked else self._single(name)

    @property
    def _width(self) -> str:
        """The axis of what experts read and make."""
        return "EL" if self.mlp.latent_size else "D"

    @property
    def _stacked_first(self) -> str:
        """The stack of gates and ups, or of ups."""
        return self.names.stacked_gate_up if self.arch.gated else self.names.stacked_up

    def _single(self, name: str) -> Recipe:
        """Of one tensor per expert, or two."""
        first = (self.names.gate, self.names.up) if self.arch.gated else (self.names.up,)
        kinds = first if name == "gate_up" else (self.names.down,)
        axes = ("EF", self._width) if name == "gate_up" else (self._width, "EF")
        sources = tuple(
            Source(self.block + kind.format(expert), axes) for expert in range(self.mlp.num_experts) for kind in kinds
        )
        return Recipe(sources, partial(_of_units, self.arch.unit_rows) if name == "gate_up" else stacked)

    def _stacked(self, name: str) -> Recipe:
        """Of one tensor for all experts."""
        is_transposed = self._is_transposed()
        tensor = self._stacked_first if name == "gate_up" else self.names.stacked_down
        rows = "2EF" if self.arch.gated else "EF"
        axes = ("E", rows, self._width) if name == "gate_up" else ("E", self._width, "EF")
        if is_transposed:
            axes = (axes[0], axes[2], axes[1])
        pieces = self._gate_up if name == "gate_up" else as_is
        source = Source(self.block + tensor, axes, is_transposed=is_transposed)
        return Recipe((source,), partial(of_transposed, pieces) if is_transposed else pieces)

    def _packed(self, name: str) -> Recipe:
        """Of a stack in MXFP4, which is `[E, out, in]`."""
        return Recipe(self._sources_of_packed(name), partial(self._decoded, name))

    def part_of_packed(self, name: str, part: str, most_scale: int) -> Recipe:
        """Of the "numbers" `[E, out, in / 2]` of such a stack, or of its scales `[E, out, in / 32]`, as they are."""
        return Recipe(self._sources_of_packed(name), partial(self._as_stored, name, part, most_scale))

    def _sources_of_packed(self, name: str) -> tuple[Source, ...]:
        tensor = self.block + (self.names.stacked_gate_up if name == "gate_up" else self.names.stacked_down)
        return tuple(Source(tensor + part, None) for part in ("_blocks", "_scales"))

    def _decoded(self, name: str, arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
        tensor = self._check_packed(name, tensors)
        pieces = self._gate_up if name == "gate_up" else as_is
        for blocks, scales in zip(*(pieces(arch, (part,)) for part in tensors), strict=True):
            assert isinstance(blocks.numbers, np.ndarray) and isinstance(scales.numbers, np.ndarray)
            yield Piece(blocks.place, Mxfp4(blocks.numbers, scales.numbers, tensor))

    def _as_stored(
        self, name: str, part: str, most_scale: int, arch: ModelArch, tensors: tuple[Tensor, ...]
    ) -> Iterator[Piece]:
        tensor = self._check_packed(name, tensors)
        blocks, scales = tensors
        stack = blocks.reshape(*blocks.shape[:2], -1) if part == "numbers" else scales
        for place, stored in (self._gate_up if name == "gate_up" else as_is)(arch, (stack,)):
            assert isinstance(stored, np.ndarray)
            yield Piece(place, stored if part == "numbers" else Mxfp4Scales(stored, tensor, most_scale))

    def _check_packed(self, name: str, tensors: tuple[Tensor, ...]) -> str:
        """The stack's name. Raises `CheckpointError` unless it has the shape that config.json asks for."""
        f, d = self.mlp.ffn_size, self.arch.hidden_size
        tensor = self._sources_of_packed(name)[0].name.removesuffix("_blocks")
        blocks, scales = tensors
        shape = Mxfp4(blocks, scales, tensor).shape
        expected = (self.mlp.num_experts, *((2 * f, d) if name == "gate_up" else (d, f)))
        if shape != expected:
            raise CheckpointError(f"tensor {tensor} in MXFP4 has shape {shape}, but config.json asks for {expected}")
        return tensor

    def _is_transposed(self) -> bool:
        """Whether stacks are `[E, in, out]`, by the one whose matrices aren't square.

        Two numbers in a byte make the axis of inputs shorter.
        """
        count, size, num_in = self.mlp.num_experts, self.mlp.ffn_size, self.mlp.width(self.arch.hidden_size)
        for name, num_out, length in (
            (self._stacked_first, self.arch.unit_rows * size, num_in),
            (self.names.stacked_down, num_in, size),
        ):
            shape = self.shape_of(self.block + name)
            for inputs in (length, length // 2):
                if num_out != inputs and shape in ((count, num_out, inputs), (count, inputs, num_out)):
                    return shape == (count, inputs, num_out)
        return self.names.transposed

    def _gate_up(self, arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
        """A stack `[E, U F, ..]`, gates first."""
        stack, size = tensors[0], self.mlp.ffn_size
        if not self.arch.gated:
            yield Piece((), stack[:, None])
            return
        halves = (stack[:, ::2], stack[:, 1::2]) if self.names.interleaved else (stack[:, :size], stack[:, size:])
        for row, half in enumerate(halves):
            yield Piece((slice(None), slice(row, row + 1)), half[:, None])

    def _shared(self, name: str) -> Recipe:
        """Of the shared experts, which are one MLP."""
        if fused := self.fused_shared:
            if name == "down":
                return Recipe((Source(fused + "output_linear.weight", ("D", "SF")),), as_is)
            return Recipe((Source(fused + "input_linear.weight", ("2SF", "D")),), split_gate_up)
        prefix = self.block + self.names.shared
        if name == "down":
            return Recipe((Source(prefix + "down_proj.weight", ("D", "SF")),), as_is)
        kinds = ("gate_proj", "up_proj") if self.arch.gated else ("up_proj",)
        return Recipe(tuple(Source(f"{prefix}{kind}.weight", ("SF", "D")) for kind in kinds), stacked)


def _zeros(count: int, arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    yield Piece((), np.zeros(count, np.float32))


def _flat(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    yield Piece((), tensors[0].reshape(-1))


def _of_units(unit_rows: int, arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """Of each expert its gate, if it has one, then its up."""
    for index, tensor in enumerate(tensors):
        yield Piece(divmod(index, unit_rows), tensor)
