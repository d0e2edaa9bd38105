"""What devices exchange in one step: collectives of a compiled program, against what tensor parallelism needs.

A layer whose matrices are split over devices needs two sums over them, each of the residual stream `[T, D]`: after
attention and after the MLP or the experts. The embedding needs one more, and the choice of a token a few numbers per
row and device. Where devices are ranks with tokens of their own, these sums are within a rank, and a layer gathers the
tokens of all ranks before its MLP or experts and scatters the sums after them. Whatever exceeds that is a problem.
Imports no JAX. Called by `hlo`, `launch_report` and `prediction`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
PER_LAYER = 2
EDGES = 1 / 64  # of a layer's bytes: a TPU pads what it scatters to whole tiles and hands the edges to the next device


@dataclass(frozen=True)
class Wanted:
    """What theory wants of a step on several devices.

    Attributes:
      num_devices: that share the work.
      residual_bytes: of `[T, D]` in the format of activations, of one rank.
      num_rows: rows that get a token, of one rank.
      num_ranks: that the devices are divided into.
      recurring: layers of a group, where they recur in groups: these count as one layer.
    """

    num_devices: int
    residual_bytes: int
    num_rows: int
    num_ranks: int = 1
    recurring: int = 1

    @property
    def sums(self) -> int:
        """Sums of a rank's residual stream in a layer."""
        return PER_LAYER * self.recurring if self.num_devices > self.num_ranks else 0

    @property
    def exchanges(self) -> int:
        """What a layer gathers from and scatters to all ranks."""
        return 2 * self.recurring if self.num_ranks > 1 else 0

    @property
    def layer_bytes(self) -> int:
        """The most that a layer's collectives may carry."""
        return (self.sums + self.exchanges * self.num_ranks) * self.residual_bytes

    @property
    def rest_bytes(self) -> int:
        """The most that collectives outside of layers may carry: the embedding's sum, and the choice of tokens.

        Ranks tell each other once who is padding. XLA does so together with the first layer's tokens, which then aren't
        counted as the layer's.
        """
        with_flags = self.num_ranks * self.residual_bytes if self.exchanges else 0
        return self.residual_bytes + self.choice_bytes + with_flags

    @property
    def needed(self) -> str:
        """A layer's collectives, in words."""
        pairs = f"{self.recurring} all-gather and {self.recurring} reduce-scatter over {self.num_ranks} ranks"
        of_ranks = [pairs] if self.exchanges else []
        return ", ".join([*([f"{self.sums} all-reduce"] if self.sums else []), *of_ranks])

    @property
    def choice_bytes(self) -> int:
        """The most that the choice of tokens may exchange: a value and an index of each device for each row, twice."""
        return 2 * self.num_devices * self.num_rows * 8


def kind_of(opcode: str) -> str | None:
    """The collective that an HLO operation is or starts; None for any other."""
    name = opcode.removesuffix("-start")
    return name if name in COLLECTIVES else None


def num_peers(attributes: str) -> int:
    """How many devices take part in each group, from an instruction's attributes; 0 if they don't say it."""
    if "source_target_pairs" in attributes:
        return 2
    if groups := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(groups[1].split(","))
    if groups := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(groups[1])
    if groups := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", groups[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", groups[2]))
    return 0


def carried(kind: str, bytes_read: int, bytes_written: int) -> int:
    """Bytes of the whole array that a collective sums, gathers or scatters."""
    return bytes_read if kind == "reduce-scatter" else bytes_written


def sent(kind: str, whole_bytes: int, peers: int) -> float:
    """Bytes that each device must send over its links: at least, with or without a ring."""
    if kind == "collective-permute" or peers < 2:
        return float(whole_bytes)
    share = (peers - 1) / peers * whole_bytes
    return 2 * share if kind == "all-reduce" else share


def problems_of(layer: Sequence[tuple[str, int]], rest: Sequence[tuple[str, int]], wanted: Wanted) -> list[str]:
    """What is exchanged beyond need: the collectives of one layer, and those of a step that are in no layer.

    Each is its kind and the bytes that it `carried`. A sum that is scattered and gathered again counts as one.
    """
    found, of = [], "a layer" if wanted.recurring == 1 else f"a group of {wanted.recurring} layers"
    counts = Counter(kind for kind, _ in layer)
    listed = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))
    if wanted.num_ranks > 1:  # their tokens are gathered and scattered for their own sake, and not as a sum
        edges = wanted.layer_bytes * EDGES
        num_exchanges = sum(kind != "collective-permute" or moved > edges for kind, moved in layer)
        moved, limit = sum(moved for _, moved in layer), wanted.layer_bytes + edges
    else:
        num_exchanges, moved, limit = _sums(counts), sum(_carried_once(layer)), wanted.layer_bytes
    if num_exchanges > wanted.sums + wanted.exchanges:
        found.append(f"{of} has {listed}; {wanted.needed} are needed")
    if moved > limit:
        found.append(f"collectives of {of} carry {moved} bytes; {wanted.layer_bytes} are needed")
    if (moved := sum(_carried_once(rest))) > wanted.rest_bytes:
        found.append(f"collectives outside of layers carry {moved} bytes; {wanted.rest_bytes} are needed")
    return found


def _sums(counts: Mapping[str, int]) -> int:
    pairs = min(counts.get("reduce-scatter", 0), counts.get("all-gather", 0))
    return sum(counts.values()) - pairs


def _carried_once(every: Sequence[tuple[str, int]]) -> list[int]:
    """Bytes of each, without the gathers of what was summed and scattered."""
    scattered = Counter(moved for kind, moved in every if kind == "reduce-scatter")
    once = []
    for kind, moved in every:
        if kind == "all-gather" and scattered[moved]:
            scattered[moved] -= 1
        else:
            once.append(moved)
    return once
