"""Rows of the pool of embeddings: one place for each, and the images used last stay."""

from __future__ import annotations

import random

import pytest

from jaxsgl.cache.embeddings import EmbeddingRows, HeldImage


def held(pool: EmbeddingRows, name: str, tokens: int) -> HeldImage:
    image = pool.lock(name.encode(), tokens)
    image.encoded = True
    return image


def test_an_image_keeps_its_rows_until_others_need_them() -> None:
    pool = EmbeddingRows(10)
    a, b = held(pool, "a", 4), held(pool, "b", 4)
    pool.unlock(a)
    pool.unlock(b)
    assert pool.num_available == 10
    assert held(pool, "a", 4) is a
    c = held(pool, "c", 6)  # takes b's, since a is locked
    assert pool.find(b"b") is None and pool.find(b"a") is a
    pool.check([a, c])
    assert pool.num_available == 0
    pool.unlock(a)
    assert pool.num_available == 4


def test_the_image_unused_for_longest_leaves_first() -> None:
    pool = EmbeddingRows(9)
    for name in "abc":
        pool.unlock(held(pool, name, 3))
    pool.unlock(held(pool, "a", 3))
    pool.unlock(held(pool, "d", 3))
    assert [name for name in "abcd" if pool.find(name.encode())] == ["a", "c", "d"]


def test_an_image_that_no_call_writes_is_forgotten_with_its_last_lock() -> None:
    pool = EmbeddingRows(4)
    image = pool.lock(b"a", 4)
    assert pool.lock(b"a", 4) is image
    pool.unlock(image)
    assert pool.find(b"a") is image
    pool.unlock(image)
    assert pool.find(b"a") is None
    pool.check([])


def test_retired_images_are_found_no_more_and_give_their_rows_back() -> None:
    pool = EmbeddingRows(8)
    locked, free = held(pool, "a", 4), held(pool, "b", 4)
    pool.unlock(free)
    pool.retire()
    assert pool.find(b"a") is None and pool.find(b"b") is None
    again = held(pool, "a", 4)
    assert not set(again.rows.tolist()) & set(locked.rows.tolist())
    pool.check([locked, again])
    pool.unlock(locked)
    pool.unlock(again)
    pool.check([])
    assert pool.num_available == 8
    pool.flush()
    assert pool.find(b"a") is None


@pytest.mark.parametrize("seed", range(5))
def test_no_row_is_lost_in_random_histories(seed: int) -> None:
    rng = random.Random(seed)
    pool = EmbeddingRows(30)
    lengths = {name: rng.randint(1, 9) for name in "abcdefghij"}
    locks: list[HeldImage] = []
    for _ in range(400):
        name = rng.choice("abcdefghij")
        found = pool.find(name.encode())
        action = rng.random()
        if action < 0.5 and ((found and found.num_locks) or pool.num_available >= lengths[name]):
            locks.append(held(pool, name, lengths[name]))
        elif action < 0.97 and locks:
            pool.unlock(locks.pop(rng.randrange(len(locks))))
        elif action > 0.985:
            pool.retire()
        else:
            pool.flush()
        pool.check(locks)
