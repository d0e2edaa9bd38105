"""A request to come, as a few numbers, and the token ids of its prompt, made when it is sent.

A prompt is a list of pieces (seed, length); the same seed gives the same leading tokens. So equal prefixes cost nothing
to describe, and 100,000 requests fit into memory. Called by traces (which describe) and by those who send: clients of
the simulation and of real servers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

OUTPUT = -1  # seed of what an earlier turn was answered
OUTPUT_TOKEN = 0  # stands for it where nobody knows it; prompts have other ids


@dataclass(slots=True)
class Ask:
    """One request.

    Attributes:
      at_s: seconds after the start; of a later turn: after the end of the turn before.
      seeds, lengths: of the pieces of its prompt.
      output_len: tokens to generate.
      then: the next turn of the conversation.
    """

    at_s: float
    seeds: Sequence[int]
    lengths: Sequence[int]
    output_len: int
    then: Ask | None = None


def prompt_ids(ask: Ask, vocab_size: int) -> list[int]:
    """Ids of 1 to `vocab_size` - 1 (`OUTPUT_TOKEN` for answers): a hash of a piece's seed and the place in it."""
    return _prompt_ids(ask, vocab_size).tolist()


def prompt_pieces(ask: Ask, vocab_size: int, salt: int) -> list[list[int] | None]:
    """Such ids, cut where answers of earlier turns stand, each of which is None. Another `salt` gives other ids."""
    ids, pieces, end = _prompt_ids(ask, vocab_size, salt), list[list[int] | None](), 0
    described = zip(ask.seeds, ask.lengths, strict=True)
    for is_output, group in itertools.groupby(described, lambda piece: piece[0] == OUTPUT):
        start, end = end, end + sum(length for _, length in group)
        pieces.append(None if is_output else ids[start:end].tolist())
    return pieces


def _prompt_ids(ask: Ask, vocab_size: int, salt: int = 0) -> npt.NDArray[np.uint64]:
    lengths = np.asarray(ask.lengths, dtype=np.int64)
    seeds = np.repeat(np.asarray(ask.seeds, dtype=np.int64), lengths)
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    spread = _mixed(seeds, np.arange(len(seeds)) - starts, salt)
    ids = spread % np.uint64(vocab_size - 1) + np.uint64(1)
    ids[seeds == OUTPUT] = OUTPUT_TOKEN
    return ids


def _mixed(seeds: npt.NDArray[np.int64], places: npt.NDArray[np.int64], salt: int) -> npt.NDArray[np.uint64]:
    """Well spread 64 bits (the finalizer of SplitMix64, Steele et al. 2014)."""
    x = seeds.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + places.astype(np.uint64) * np.uint64(
        0xD1B54A32D192ED03
    )
    x += np.uint64(salt * 0xA0761D6478BD642F % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
