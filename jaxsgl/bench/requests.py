"""The requests of a benchmark, described by a few numbers, and the token ids of their prompts.

`Job`: a request that is there from the start, with its prompt. `Ask`: a request of a trace, which arrives at some time;
its prompt is made when it is sent. It is a list of pieces (seed, length), and the same seed gives the same leading
tokens. So equal prefixes cost nothing to describe, and 100,000 requests fit into memory. Knows no engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxsgl.requests.request import Request, SamplingParams

OUTPUT = -1  # seed of a piece that is the output of an earlier turn
OUTPUT_TOKEN = 0  # stands for tokens of an output whose ids are not known; prompts have other ids


@dataclass(slots=True)
class Ask:
    """A request of a trace.

    Attributes:
      at_s: when it arrives, in seconds after the start; for a later turn, after the end of the turn before.
      seeds, lengths: seed and number of tokens of each piece of its prompt.
      output_len: tokens to generate.
      then: the next turn of the conversation.
    """

    at_s: float
    seeds: Sequence[int]
    lengths: Sequence[int]
    output_len: int
    then: Ask | None = None


def prompt_ids(ask: Ask, vocab_size: int) -> list[int]:
    """The prompt's ids, from 1 to `vocab_size` - 1: a hash of the piece's seed and the place in the piece.

    Outputs of earlier turns stand as `OUTPUT_TOKEN`.
    """
    ids: list[int] = _prompt_ids(ask, vocab_size).tolist()
    return ids


def prompt_pieces(ask: Ask, vocab_size: int, salt: int) -> list[list[int] | None]:
    """The prompt's ids, cut at the outputs of earlier turns; None stands for each output. `salt` changes all ids."""
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
    """Hashes to 64 well-mixed bits (the finalizer of SplitMix64, Steele et al. 2014)."""
    x = seeds.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + places.astype(np.uint64) * np.uint64(
        0xD1B54A32D192ED03
    )
    x += np.uint64(salt * 0xA0761D6478BD642F % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return hashed


FIRST_ID = 2  # ids below are BOS and EOS in the shapes of `models`


@dataclass(frozen=True)
class Job:
    """A request that is there from the start.

    Attributes:
      prompt_ids: ids of its prompt.
      output_len: tokens to generate; EOS does not end the output.
    """

    prompt_ids: list[int]
    output_len: int


@dataclass(frozen=True)
class Lengths:
    """A uniform distribution of lengths in tokens, from `least` to `most`, both included."""

    least: int
    most: int

    def draw(self, rng: np.random.Generator) -> int:
        """Draws a length."""
        return int(rng.integers(self.least, self.most, endpoint=True))


def greedy_requests(jobs: Sequence[Job]) -> list[Request]:
    """The jobs as requests to an engine: greedy, and EOS does not end them. Ids are "0", "1" and so on."""
    return [
        Request(str(i), job.prompt_ids, SamplingParams(temperature=0.0, max_tokens=job.output_len, ignore_eos=True))
        for i, job in enumerate(jobs)
    ]


def random_jobs(count: int, inputs: Lengths, outputs: Lengths, vocab_size: int, seed: int = 0) -> list[Job]:
    """Jobs whose prompts are random and share no prefix."""
    rng = np.random.default_rng(seed)
    return [Job(_ids(rng, inputs.draw(rng), vocab_size), outputs.draw(rng)) for _ in range(count)]


def shared_prefix_jobs(
    groups: int, per_group: int, prefix_len: int, questions: Lengths, outputs: Lengths, vocab_size: int, seed: int = 0
) -> list[Job]:
    """Jobs in random order, in groups whose prompts begin with the same `prefix_len` tokens."""
    rng = np.random.default_rng(seed)
    prefixes = [_ids(rng, prefix_len, vocab_size) for _ in range(groups)]
    jobs = [
        Job(prefix + _ids(rng, questions.draw(rng), vocab_size), outputs.draw(rng))
        for prefix in prefixes
        for _ in range(per_group)
    ]
    return [jobs[i] for i in rng.permutation(len(jobs))]


def _ids(rng: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    ids: list[int] = rng.integers(FIRST_ID, vocab_size, count).tolist()
    return ids
