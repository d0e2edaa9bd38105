"""Predict how long a decode's attention takes on an H200 that is not there, by how its items are given to programs.

    python scripts/bench decode_plan                  # microseconds: batches of several lengths, 8 kv heads of 128
    python scripts/bench decode_plan --spread 0.07    # programs differ in speed, with this standard deviation

Each batch is cut into items and chains by `pallas_kernels.partition`, as the kernel's is. A place that is free takes
the next program, which reads nothing until its first tile has arrived; all that read share the bandwidth, and none
gets more than its copies in flight allow. The constants are those of `predict_gpu.py`. Nothing is measured. The pass
that merges splits isn't counted. "dealt" stands for a persistent grid: one program per place, items dealt out back and
forth. In brackets: programs of a kv head, and kv heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax.numpy as jnp
import numpy as np

from bench.output import command_parser
from bench.targets.prediction import ASSUMED
from pallas_kernels.options import AttentionOptions
from pallas_kernels.partition import BEGIN, END, SplitPlan, chain_items, most_splits, split_sequences

HEADS, TILE_TOKENS, MIN_SPLIT_TOKENS = 8, 64, 128
TILE_BYTES = 2 * TILE_TOKENS * 128 * 2
PLACES = ASSUMED.num_slots // HEADS  # of one kv head; all heads are alike

Chains = list[np.ndarray]
"""The sizes in tiles of each program's items."""


def batches(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Lengths of sequences, by what they are called."""
    even = {f"{rows} x 1k": np.full(rows, 1024) for rows in (32, 64, 128, 200, 256, 512)}
    return {
        **even,
        "256 x 200": np.full(256, 200),
        "256, uniform up to 2k": rng.integers(1, 2048, 256),
        "256, log-normal around 1k": np.clip(rng.lognormal(np.log(1024), 0.8, 256), 1, 32_768).astype(int),
        "1 x 32k and 127 x 1k": np.array([32_768] + [1024] * 127),
        "1 x 32k and 255 x 1k": np.array([32_768] + [1024] * 255),
    }


def cut(lengths: np.ndarray) -> tuple[np.ndarray, Chains]:
    """The sizes of a batch's items, the largest first, and its chains, as on an H200."""
    rows = len(lengths)
    most = most_splits(rows, PLACES)
    num_items = min(rows * most, rows + PLACES)
    plan = SplitPlan(num_items, most, PLACES, MIN_SPLIT_TOKENS // TILE_TOKENS, TILE_TOKENS)
    splits = split_sequences(plan, jnp.asarray(lengths, jnp.int32), AttentionOptions())
    table = np.asarray(splits.items)
    sizes = table[:, END] - table[:, BEGIN]
    if not plan.is_chained:
        return sizes, alone(sizes)
    first = np.asarray(chain_items(plan, splits))
    return sizes, [part for part in np.split(sizes, first[1:-1])[: len(first) - 1] if part.any()]


def alone(sizes: np.ndarray) -> Chains:
    """A program for each item."""
    return [np.array([size]) for size in sizes if size]


def dealt(sizes: np.ndarray) -> Chains:
    """A program for each place, to which items are dealt out forwards, then backwards, and so on."""
    place = np.arange(len(sizes)) % (2 * PLACES)
    place = np.where(place < PLACES, place, 2 * PLACES - 1 - place)
    return [sizes[place == each] for each in range(PLACES) if sizes[place == each].any()]


def microseconds(chains: Chains, speeds: Callable[[], float]) -> float:
    """The time until the last program of the list has ended; each draws its speed."""
    waiting = [float(chain.sum()) * TILE_BYTES * HEADS for chain in chains][::-1]
    bandwidth, most = ASSUMED.bytes_per_s / 1e6, ASSUMED.slot_bytes_per_us * HEADS
    left, speed, begins = (np.zeros(PLACES) for _ in range(3))  # of the program in each place
    now = 0.0
    while True:
        for place in np.flatnonzero(left <= 0)[: len(waiting)]:
            left[place], speed[place], begins[place] = waiting.pop(), speeds(), now + ASSUMED.slot_start_us
        if not (left > 0).any():
            return now
        reads = (left > 0) & (begins <= now)
        rates = np.where(reads, np.minimum(most, bandwidth * speed / max(speed[reads].sum(), 1e-9)), 0)
        ends = now + left[reads] / rates[reads]
        then = min([*ends, *begins[(left > 0) & ~reads]])
        left -= rates * (then - now)
        left[left < 1] = 0  # byte
        now = then


def mean(chains: Chains, spread: float, seeds: Iterable[int]) -> float:
    """The mean time over seeds of the programs' speeds."""

    def once(seed: int) -> float:
        rng = np.random.default_rng(seed)
        return microseconds(chains, lambda: max(0.1, 1 + spread * rng.standard_normal()))

    return float(np.mean([once(seed) for seed in seeds]))


def main(arguments: list[str]) -> None:
    """Prints a line for each batch."""
    parser = command_parser(__doc__, __name__)
    parser.add_argument("--spread", type=float, default=0.0, help="standard deviation of the programs' speeds (0)")
    options = parser.parse_args(arguments)
    seeds = range(5 if options.spread else 1)
    print(f"{'lengths':<28} {'floor':>8} {'a program per item':>20} {'chains':>14} {'dealt':>14}")
    for name, lengths in batches(np.random.default_rng(0)).items():
        sizes, chains = cut(lengths)
        floor = sizes.sum() * TILE_BYTES * HEADS / ASSUMED.bytes_per_s * 1e6
        found = [(mean(each, options.spread, seeds), len(each)) for each in (alone(sizes), chains, dealt(sizes))]
        shown = [f"{time:.0f} ({programs} x {HEADS})" for time, programs in found]
        print(f"{name:<28} {floor:>8.0f} {shown[0]:>20} {shown[1]:>14} {shown[2]:>14}")
