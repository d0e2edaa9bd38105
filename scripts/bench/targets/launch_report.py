"""What a compiled program launches, for its full number of layers: kernels by kind, command buffers, bytes, FLOPs.

A forward program of few layers stands for one of many. From the second layer on all layers launch the same kernels,
which is checked: what lies between the last two attention kernels is a layer, and the rest is launched once. Imports no
JAX. Called by `compile_for`; `predict_gpu.py` reads the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.targets.hlo import Launch, launches
from bench.targets.thunks import command_buffers_in

KINDS = ("attention", "experts", "pallas", "product", "small")
WEIGHTS_COUNTED = 0.999  # at least; vectors lie in arrays of all layers, of which few layers were compiled
FIELDS = ("kind", "bytes_read", "bytes_written", "flops")


def launch_report(
    text: str,
    dumps: Path,
    uncounted: Collection[tuple[int, ...]],
    layers: tuple[int, int] | None,
    weight_bytes: int = 0,
) -> dict[str, Any]:
    """The report, for JSON.

    Args:
      text: the optimized HLO.
      dumps: folder with XLA's dumps of the program.
      uncounted: see `hlo.launches`.
      layers: how many layers were compiled and how many the model has; None for programs without layers.
      weight_bytes: of the weights that a step must read, all layers together; fewer bytes read are a problem.
    """
    every = launches(text, uncounted)
    module = text.split(",", 1)[0].removeprefix("HloModule ").strip()
    buffers = command_buffers_in(dumps, module)
    problems = []
    layer: list[Launch] = []
    repeats = 0
    if layers is not None:
        layer, before = last_layers(every, layers[0])
        repeats = layers[1] - layers[0]
        if buffers is not None and kernels_of(layer) != kernels_of(before):  # on TPUs they differ by small copies
            problems.append("the last two layers launch different kernels, so that layers can't be multiplied")
    if buffers is not None and (buffers.count != 1 or buffers.outside):
        listed = ", ".join(sorted(set(buffers.outside))) or "nothing"
        problems.append(f"{buffers.count} command buffers; {listed} outside of them")
    if buffers is not None and buffers.num_sliced:
        problems.append(
            f"{buffers.num_sliced} kernels take slices of an input (DynamicSliceFusion); before CUDA 12.9 each of them "
            "breaks the command buffer"
        )
    whole = [*every, *layer * repeats]
    read = sum(each.bytes_read * each.times for each in whole)
    if layers is not None:
        # A TPU fetches matrices ahead, as it finds room: the last layer's share of that is not its own matrices.
        read += repeats * (sum(e.matrix_bytes for e in every) // layers[0] - sum(e.matrix_bytes for e in layer))
    if read < WEIGHTS_COUNTED * weight_bytes:
        problems.append(f"{read} bytes read are counted, the weights have {weight_bytes}")
    return {
        "num_layers": layers[1] if layers else 0,
        "layer_kinds": dict(kernels_of(layer)),
        "num_launches": sum(each.times for each in whole if each.kind != "prefetch"),
        "command_buffers": None if buffers is None else buffers.count,
        "bytes_read": read,
        "bytes_written": sum(each.bytes_written * each.times for each in whole),
        "flops": sum(each.flops * each.times for each in whole),
        "listed": [asdict(each) for each in layer or every],
        "kernels": [{**dict(zip(FIELDS, key, strict=True)), "count": n} for key, n in _counted(whole).items()],
        "problems": problems,
    }


def _counted(whole: Sequence[Launch]) -> Counter[tuple[Any, ...]]:
    """How often kernels that are alike run in one call of the program."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for each in whole:
        counts[tuple(getattr(each, name) for name in FIELDS)] += each.times
    return counts


def kernels_of(layer: Sequence[Launch]) -> Counter[str]:
    """How many kernels of each kind; a TPU's prefetches are none."""
    return Counter(each.kind for each in layer if each.kind != "prefetch")


def last_layers(every: Sequence[Launch], num_layers: int) -> tuple[list[Launch], list[Launch]]:
    """The launches of the last whole layer, from one attention to the next, and of the layer before it.

    Raises:
      ValueError: the attention kernels can't be shared out evenly among so many layers.
    """
    marks = [place for place, each in enumerate(every) if each.kind == "attention"]
    per_layer, left = divmod(len(marks), num_layers)
    if per_layer == 0 or left:
        raise ValueError(f"{len(marks)} attention kernels in {num_layers} layers")
    begins = marks[::per_layer]
    return list(every[begins[-2] : begins[-1]]), list(every[begins[-3] : begins[-2]])
