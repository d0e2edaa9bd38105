"""Maps the tensors of a vision tower to our parameters, in which those of all layers are stacked.

As in `names`, recipes make views only. `quantized.py` asks here first for what is under `visual`.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxsgl.models import ModelArch
from jaxsgl.weights.names import Path, Piece, Recipe, Source, Tensor

PREFIX = "model.visual."

_BLOCK = "blocks.{}."
# Our name -> the tensor's name without ".weight" and ".bias", and the axes of the weights; `{}` stands for the index.
_LINEAR: dict[str, tuple[str, tuple[str, ...]]] = {
    "patches": ("patch_embed.proj", ("VM", "VI", "VT", "VP", "VP")),
    "qkv": (_BLOCK + "attn.qkv", ("V3M", "VM")),
    "o": (_BLOCK + "attn.proj", ("VM", "VM")),
    "fc1": (_BLOCK + "mlp.linear_fc1", ("VF", "VM")),
    "fc2": (_BLOCK + "mlp.linear_fc2", ("VM", "VF")),
    "norm1": (_BLOCK + "norm1", ("VM",)),
    "norm2": (_BLOCK + "norm2", ("VM",)),
    "positions": ("pos_embed", ("VG", "VM")),
}
_MERGER = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
_MERGER_AXES = {"fc1": ("VW", "VW"), "fc2": ("D", "VW")}


def recipe_of_tower(path: Path, arch: ModelArch) -> Recipe | None:
    """The recipe of the parameter at `path`; None unless it belongs to a vision tower."""
    if path[0] != "visual":
        return None
    assert arch.vision is not None
    names = [str(part) for part in path[1:]]
    is_bias = names[-1].endswith("_bias")
    own = names[-1].removesuffix("_bias")
    count = 1
    axes: tuple[str, ...]
    if names[0] == "merger":
        tensor, axes = f"merger.{_MERGER[own]}", _MERGER_AXES.get(own, ("VM",))
    elif names[0] == "deepstack":
        tensor, axes = f"deepstack_merger_list.{{}}.{_MERGER[own]}", _MERGER_AXES.get(own, ("VW",))
        count = len(arch.vision.deepstack_layers)
    else:
        tensor, axes = _LINEAR[own]
        count = arch.vision.num_layers if tensor.startswith(_BLOCK) else 1
    ending, axes = (".bias", axes[:1]) if is_bias else (".weight", axes)
    sources = tuple(Source(PREFIX + tensor.format(index) + ending, axes) for index in range(count))
    if "{}" in tensor:
        return Recipe(sources, _stacked)
    return Recipe(sources, _patches if own == "patches" and not is_bias else _one)


def _one(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    yield Piece((), tensors[0])


def _patches(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    """A convolution whose windows don't overlap is a product of flattened patches."""
    yield Piece((), tensors[0].reshape(len(tensors[0]), -1))


def _stacked(arch: ModelArch, tensors: tuple[Tensor, ...]) -> Iterator[Piece]:
    for index, tensor in enumerate(tensors):
        yield Piece((index,), tensor)
