"""What a token must be, computed from a row of logits with NumPy alone: the oracle of sampling features.

Penalties, bias, stop tokens that must wait, temperature, top-k, top-p, min-p and the draw itself, in float64 with
sorts; the random number by Threefry (Salmon et al. 2011) written out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from jaxsgl.requests.request import SamplingParams

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
MASK = 2**32 - 1


def edited(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], stop_ids: frozenset[int]
) -> np.ndarray:
    out = logits.astype(np.float64)
    for token in {*prompt, *output}:
        out[token] = (
            out[token] / params.repetition_penalty if out[token] > 0 else out[token] * params.repetition_penalty
        )
    for token, times in Counter(output).items():
        out[token] -= params.frequency_penalty * times + params.presence_penalty
    for token, bias in params.logit_bias.items():
        out[token] += bias
    if len(output) < params.min_tokens:
        out[list(stop_ids)] = -np.inf
    return out


def probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    scaled = logits / params.temperature
    probs = np.exp(scaled - scaled.max())
    order = np.argsort(-probs, kind="stable")
    keep = np.zeros(len(probs), bool)
    keep[order[: params.top_k if params.top_k > 0 else None]] = True
    probs = np.where(keep, probs, 0) / probs[keep].sum()
    if params.top_p < 1:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= params.top_p]] = 0
    probs[probs < params.min_p * probs.max()] = 0
    return probs / probs.sum()


def threefry(key: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (block[0] + keys[0]) & MASK, (block[1] + keys[1]) & MASK
    for turn in range(5):
        for rotation in ROTATIONS[turn % 2]:
            x = (x + y) & MASK
            y = ((y << rotation) | (y >> (32 - rotation))) & MASK
            y ^= x
        x = (x + keys[(turn + 1) % 3]) & MASK
        y = (y + keys[(turn + 2) % 3] + turn + 1) & MASK
    return x, y


def uniform(seed: int, position: int) -> float:
    """23 random bits as a number in [0, 1)."""
    high, low = threefry((seed, position), (0, 0))
    return ((high ^ low) >> 9) / 2**23


def choose(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: frozenset[int] = frozenset(),
    index: int = 0,
) -> int:
    """The token behind `prompt` and `output` in sample `index`."""
    logits = edited(logits, params, prompt, output, stop_ids)
    if params.greedy:
        return int(logits.argmax())
    assert params.seed is not None
    where = uniform((params.seed + index) % 2**32, len(prompt) + len(output))
    ends = np.cumsum(probabilities(logits, params))
    return int(np.searchsorted(ends, where * ends[-1], side="right"))


def replay(
    logits_of: Callable[[list[int]], np.ndarray],
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    eos_ids: frozenset[int] = frozenset(),
    index: int = 0,
) -> list[int]:
    """What `output` must be: each token is chosen after the tokens of `output` before it.

    So one run of the model is enough, `logits_of` giving `[T, V]`. An output that ends too early or too late has
    another length.
    """
    assert params.max_tokens is not None
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
    expected: list[int] = []
    for place, logits in enumerate(logits_of([*prompt, *output])[len(prompt) - 1 :]):
        if place == params.max_tokens or (expected and expected[-1] in stop_ids):
            break
        expected.append(choose(logits, params, prompt, output[:place], stop_ids, index))
    return expected


def logprobs(logits: np.ndarray) -> np.ndarray:
    """Log-softmax over the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
