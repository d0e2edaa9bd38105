"""Requests that are all there at the start: prompts of random ids, with lengths drawn from a seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FIRST_ID = 2  # ids below are BOS and EOS in the shapes of `models`


@dataclass(frozen=True)
class Job:
    """One request.

    Attributes:
      prompt_ids: its prompt.
      output_len: tokens to generate, EOS ignored.
    """

    prompt_ids: list[int]
    output_len: int


@dataclass(frozen=True)
class Lengths:
    """Tokens, uniform from `least` to `most`, both included."""

    least: int
    most: int

    def draw(self, rng: np.random.Generator) -> int:
        """A length."""
        return int(rng.integers(self.least, self.most, endpoint=True))


def random_jobs(count: int, inputs: Lengths, outputs: Lengths, vocab_size: int, seed: int = 0) -> list[Job]:
    """Prompts that share nothing."""
    rng = np.random.default_rng(seed)
    return [Job(_ids(rng, inputs.draw(rng), vocab_size), outputs.draw(rng)) for _ in range(count)]


def shared_prefix_jobs(
    groups: int, per_group: int, prefix_len: int, questions: Lengths, outputs: Lengths, vocab_size: int, seed: int = 0
) -> list[Job]:
    """Groups of prompts that begin with the same `prefix_len` tokens, shuffled."""
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
