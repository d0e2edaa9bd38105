"""Text of several hundred tokens that means nothing."""

from __future__ import annotations

import random

SUBJECTS = ("the old house", "a quiet river", "the tall tree", "a small boat", "the green hill", "a grey cat")
VERBS = ("stands near", "looks at", "waits for", "moves past", "belongs to", "lies behind")


def filler(seed: int, num_sentences: int = 60) -> str:
    rng = random.Random(seed)
    sentences = [f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(SUBJECTS)}." for _ in range(num_sentences)]
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)
