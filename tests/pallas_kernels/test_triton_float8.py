"""A float8 cache as words: every code becomes its number, and every element finds its place again."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_kv import FLOAT8
from pallas_kernels.triton import float8

CODES = np.arange(256, dtype=np.uint8).view(FLOAT8)


def test_every_code_unpacks_to_its_number() -> None:
    for plane in range(float8.PLANES):
        row = np.zeros((256, 8), FLOAT8)
        row[:, 4 + plane] = CODES
        planes = float8.unpack(float8.as_words(jnp.asarray(row)))
        numbers = np.asarray(planes[plane][:, 1], np.float32) * float8.UNPACKED_SCALE
        np.testing.assert_array_equal(numbers, CODES.astype(np.float32))  # NaN equals NaN here
        assert (np.signbit(numbers) == np.signbit(CODES.astype(np.float32))).all()
        assert all((np.asarray(other) == 0).all() for i, other in enumerate(planes) if i != plane)


def test_words_and_planes_convert_back_exactly() -> None:
    array = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 16)), FLOAT8)
    words = float8.as_words(array)
    assert words.shape == (3, 2, 4) and (float8.from_words(words) == array).all()
    assert (float8.planes_last(float8.planes_first(array)) == array).all()


def test_planes_come_in_the_order_of_unpacking() -> None:
    array = jnp.asarray(np.random.default_rng(1).normal(size=(5, 16)), FLOAT8)
    unpacked = jnp.concatenate(float8.unpack(float8.as_words(array)), axis=-1)
    expected = float8.planes_first(array).astype(jnp.float16) / float8.UNPACKED_SCALE
    assert (unpacked == expected).all()
