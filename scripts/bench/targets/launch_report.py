"""What a compiled program launches, for its full number of layers: kernels by kind, command buffers, bytes, FLOPs.

A forward program of few layers stands for one of many. From the second layer on all layers launch the same kernels,
which is checked: what lies between the last two attention kernels is a layer, and the rest is launched once. Layers
that recur in groups are taken together, as many attention kernels apart as a group has. The first layers may launch
more, what is made once for all: tables of a rope, masks of a window. Of branches those on the largest side of their
condition are counted (`hlo`): in a step with an index, those of sequences longer than what it chooses. Imports no JAX.
Called by `compile_for`; `predict_gpu.py` reads the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.targets.collectives import COLLECTIVES, Wanted, carried, problems_of
from bench.targets.hlo import Launch, launches
from bench.targets.thunks import CommandBuffers, command_buffers_in

KINDS = (
    "attention", "merge", "states", "experts", "float8 experts", "packed experts", "quantized", "float8",
    "experts of many", "float8 of many", "float8 experts of many", "pallas", "product", "small",
    *COLLECTIVES,
)  # fmt: skip
WEIGHTS_COUNTED = 0.999  # at least; vectors lie in arrays of all layers, of which few layers were compiled
_THUNKS_OF_COLLECTIVES = ("All", "Collective", "ReduceScatter", "Ragged")
FIELDS = ("kind", "bytes_read", "bytes_written", "flops", "peers", "matrix_bytes", "shared_bytes", "by")


@dataclass(frozen=True)
class Layers:
    """The layers of a model of which a program has the first ones.

    Attributes:
      compiled: how many it has.
      of_model: how many the model has.
      recurring: so many consecutive ones are a group, and all groups are alike, but for layers before the first one.
      attending: indices of those that attend, of the compiled ones; (): all.
    """

    compiled: int
    of_model: int
    recurring: int = 1
    attending: tuple[int, ...] = ()

    @property
    def groups(self) -> int:
        """How often they recur in the program."""
        return self.compiled // self.recurring

    @property
    def left_out(self) -> int:
        """How often they would recur besides."""
        return (self.of_model - self.compiled) // self.recurring

    def kernels_of_group(self, count: int) -> int:
        """How many of the program's `count` attention kernels the last group has.

        Raises:
          ValueError: they can't be shared out evenly among the layers that attend.
        """
        attending = self.attending or range(self.compiled)
        of_group = sum(layer >= self.compiled - self.recurring for layer in attending)
        of_group_kernels, left = divmod(count * of_group, len(attending))
        if of_group_kernels == 0 or left:
            raise ValueError(f"{count} attention kernels in {len(attending)} layers that attend")
        return of_group_kernels


def launch_report(
    text: str,
    dumps: Path,
    uncounted: Collection[tuple[int, ...]],
    layers: Layers | None,
    weight_bytes: int = 0,
    wanted: Wanted | None = None,
) -> dict[str, Any]:
    """The report, for JSON.

    Args:
      text: the optimized HLO.
      dumps: folder with XLA's dumps of the program.
      uncounted: see `hlo.launches`.
      layers: see there; None for programs without layers.
      weight_bytes: of the weights that a step must read, all layers together; fewer bytes read are a problem.
      wanted: what devices that share the step must exchange; None on one device.
    """
    every = launches(text, uncounted)
    module = text.split(",", 1)[0].removeprefix("HloModule ").strip()
    buffers = command_buffers_in(dumps, module)
    problems = []
    layer: list[Launch] = []
    repeats = 0
    if layers is not None and layers.groups == 1:
        layer = list(every)  # no group recurs, so all layers were compiled
    elif layers is not None:
        layer, before = last_layers(every, layers)
        repeats = layers.left_out
        if buffers is not None and kernels_of(layer) != kernels_of(before):  # on TPUs they differ by small copies
            differ = dict(kernels_of(layer) - kernels_of(before)), dict(kernels_of(before) - kernels_of(layer))
            problems.append(
                f"the last two layers launch different kernels, so that layers can't be multiplied: the last one "
                f"{differ[0]}, the one before {differ[1]}"
            )
    if buffers is not None and wanted is None:
        problems += _loose(buffers, turns_are_known=all(each.times for each in every))
    if buffers is not None and buffers.num_sliced:
        problems.append(
            f"{buffers.num_sliced} kernels take slices of an input (DynamicSliceFusion); before CUDA 12.9 each of them "
            "breaks the command buffer"
        )
    whole = [*every, *layer * repeats]
    if wanted is not None and layers is not None:
        problems += problems_of(*_exchanges(every, layer, layers), wanted)
    read = sum(each.bytes_read * each.times for each in whole)
    if layers is not None and buffers is None:
        # A TPU fetches matrices ahead, as it finds room: the last layer's share of that is not its own matrices.
        read += repeats * (sum(e.matrix_bytes for e in every) // layers.groups - sum(e.matrix_bytes for e in layer))
    if read < WEIGHTS_COUNTED * weight_bytes:
        problems.append(f"{read} bytes read are counted, the weights have {weight_bytes}")
    return {
        "num_layers": layers.of_model if layers else 0,
        "recurring": layers.recurring if layers else 0,
        "layer_kinds": dict(kernels_of(layer)),
        "num_launches": sum(each.times for each in whole if each.kind != "prefetch"),
        "num_branched": sum(each.times for each in whole if each.is_branched),
        **_graphs(buffers, layers),
        "bytes_read": read,
        "bytes_written": sum(each.bytes_written * each.times for each in whole),
        "flops": sum(each.flops * each.times for each in whole),
        "exchanged": exchanged(whole, wanted),
        "listed": [asdict(each) for each in layer or every],
        "kernels": [{**dict(zip(FIELDS, key, strict=True)), "count": n} for key, n in _counted(whole).items()],
        "problems": problems,
    }


def _loose(buffers: CommandBuffers, *, turns_are_known: bool) -> list[str]:
    """Why a program is more than one command buffer, and one for the body of each loop whose turns are known."""
    most = 1 + buffers.num_loops if turns_are_known else 1
    outside = buffers.outside if turns_are_known else (*buffers.outside, *buffers.conditions)
    if buffers.count == most and not outside:
        return []
    return [f"{buffers.count} command buffers; {', '.join(sorted(set(outside))) or 'nothing'} outside of them"]


def _graphs(buffers: CommandBuffers | None, layers: Layers | None) -> dict[str, int | None]:
    """Command buffers and the kernels outside of them, for all layers; collectives cut a step at every layer."""
    if buffers is None:
        return {"command_buffers": None, "loose_kernels": None}
    loose = sum(
        not each.removeprefix("k").startswith(_THUNKS_OF_COLLECTIVES)
        for each in (*buffers.outside, *buffers.conditions)
    )
    if layers is None or buffers.count == 1:
        return {"command_buffers": buffers.count, "loose_kernels": loose}
    return {
        "command_buffers": buffers.count + layers.left_out * (buffers.count // layers.groups),
        "loose_kernels": loose + layers.left_out * (loose // layers.groups),
    }


def exchanged(whole: Sequence[Launch], wanted: Wanted | None) -> list[dict[str, Any]]:
    """What devices exchange in a call of the program: kind, by what, bytes of the whole array, peers, and how often."""
    counts: Counter[tuple[str, str, int, int]] = Counter()
    for each in whole:
        if each.kind in COLLECTIVES:
            peers = each.peers or (wanted.num_devices if wanted else 0)
            counts[each.kind, each.by, carried(each.kind, each.bytes_read, each.bytes_written), peers] += each.times
    names = ("kind", "by", "bytes", "peers")
    return [dict(zip(names, key, strict=True), count=n) for key, n in counts.items()]


def _exchanges(
    every: Sequence[Launch], layer: Sequence[Launch], layers: Layers
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """The collectives of the layer, and those of the program that are in none, as `problems_of` takes them."""
    of_layer, of_all = (
        [(each.kind, carried(each.kind, each.bytes_read, each.bytes_written)) for each in some if each.peers]
        for some in (layer, every)
    )
    of_layers = {each: count * layers.compiled // layers.recurring for each, count in Counter(of_layer).items()}
    rest = Counter(of_all) - Counter(of_layers)
    return of_layer, list(rest.elements())


def _counted(whole: Sequence[Launch]) -> Counter[tuple[Any, ...]]:
    """How often kernels that are alike run in one call of the program."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for each in whole:
        counts[tuple(getattr(each, name) for name in FIELDS)] += each.times
    return counts


def kernels_of(layer: Sequence[Launch]) -> Counter[str]:
    """How many kernels of each kind; a TPU's prefetches are none."""
    return Counter(each.kind for each in layer if each.kind != "prefetch")


def last_layers(every: Sequence[Launch], layers: Layers) -> tuple[list[Launch], list[Launch]]:
    """The launches of the last whole layer or group, from one attention to the next, and of the one before it.

    Raises:
      ValueError: see `Layers.kernels_of_group`.
    """
    marks = [place for place, each in enumerate(every) if each.kind == "attention"]
    per_group = layers.kernels_of_group(len(marks))
    before, begin, end = marks[-1 - 2 * per_group], marks[-1 - per_group], marks[-1]
    return list(every[begin:end]), list(every[before:begin])
