"""Sequences as texts, one letter a token, laid out in pages as the radix cache would have it.

A page belongs to all sequences whose texts are the same up to its end. Places that no sequence sees hold NaN.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

NUM_SEQS, LONGEST = 48, 256  # in all cases, so that they share compiled programs


def own(length: int, number: int) -> str:
    """A text that shares no letter with those of other numbers."""
    return chr(0x1000 + number) * length


def family(prefix: str, size: int, tail: int) -> list[str]:
    """`size` texts that begin with `prefix` and go on, each in its own way, for `tail` tokens and more."""
    return [prefix + own(tail + 3 * i, i) for i in range(size)]


TEXTS = {
    "groups of 1 to 9": [t for n in range(1, 10) for t in family(chr(0x60 + n) * (60 + 15 * n), n, 4)],
    "nested": [
        *family("s" * 130, 5, 1),
        *family("s" * 130 + "a" * 70, 6, 2),
        *family("s" * 130 + "b" * 20, 9, 64),
        own(200, 99),
    ],
    "equal to the end": [*["t" * 256] * 5, *["u" * 200] * 3, *["v" * 129] * 9, "w" * 64, "w" * 64],
    "at borders": [t * n for i, n in enumerate((64, 65, 127, 128, 129, 192)) for t in 3 * [chr(0x61 + i)]],
    "cut off anywhere": ["p" * n for n in (256, 255, 240, 193, 192, 191, 180, 130, 129)],
    "one is short": [*family("q" * 200, 8, 9), "q"],
    "less than a tile": [*family("a" * 63, 4, 100), *family("b" * 17, 5, 0), *family("c", 3, 30)],
    "alone": [own(40 * i, i) for i in range(1, 6)],
}


@st.composite
def random_texts(draw) -> list[str]:
    """Up to `NUM_SEQS` texts: a part of a common beginning, a part of one of three branches, then their own tokens."""
    some = st.one_of(st.integers(0, 80), st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 80]))
    branch = st.tuples(st.sampled_from("abc"), st.sampled_from([0, 40, 64, 80]))
    system = "s" * draw(st.sampled_from([0, 16, 63, 64, 96]))
    parts = draw(st.lists(st.tuples(branch, some), min_size=2, max_size=NUM_SEQS))
    return [system + letter * length + own(tail, i) for i, ((letter, length), tail) in enumerate(parts)]


def lay_out(texts: list[str], page_size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Page table `[NUM_SEQS, P]` and lengths of the texts in random order, padding rows between them.

    Table entries past a sequence's end, all those of padding included, are as another sequence has them.
    """
    rng = np.random.default_rng(seed)
    texts = [*texts, *[""] * (NUM_SEQS - len(texts))]
    texts = [texts[i] for i in rng.permutation(NUM_SEQS)]
    pages_per_seq = -(-LONGEST // page_size)
    free = iter(1 + rng.permutation(NUM_SEQS * pages_per_seq))
    page_of: dict[str, int] = {}
    table = np.zeros((NUM_SEQS, pages_per_seq), int)
    for s, text in enumerate(texts):
        for j in range(-(-len(text) // page_size)):
            table[s, j] = page_of.setdefault(text[: (j + 1) * page_size], next(free))
    for s, text in enumerate(texts):
        end = -(-len(text) // page_size)
        table[s, end:] = table[rng.integers(NUM_SEQS), end:]
    return table, np.array([len(text) for text in texts])


def unseen_places(table: np.ndarray, lengths: np.ndarray, page_size: int) -> np.ndarray:
    """`[num_pages, page_size]`: True where no sequence has a token. All pages of the table and the dummy page."""
    unseen = np.ones((1 + table.size, page_size), bool)
    for row, length in zip(table, lengths, strict=True):
        position = np.arange(length)
        unseen[row[position // page_size], position % page_size] = False
    return unseen
