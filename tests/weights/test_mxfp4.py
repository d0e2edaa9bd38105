"""MXFP4 decodes to the numbers that transformers makes of it, whole and in parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from jaxsgl.errors import CheckpointError
from jaxsgl.weights.mxfp4 import Mxfp4


def random_tensors(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Every byte, and scales from 2 ** -100 to 2 ** 100."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (3, 10, 4, 16), np.uint8)
    blocks[0].reshape(-1)[:256] = np.arange(256)
    return blocks, rng.integers(27, 228, (3, 10, 4), np.uint8)


def test_all_codes_decode_to_what_transformers_makes_of_them() -> None:
    blocks, scales = random_tensors(0)
    expected = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales)).transpose(1, 2).float().numpy()
    matrices = Mxfp4(blocks, scales, "w")
    assert matrices.shape == expected.shape == (3, 10, 128)
    np.testing.assert_array_equal(matrices[(slice(None),)].astype(np.float32), expected)
    for box in ((slice(1, 3), slice(2, 9), slice(5, 70)), (slice(0, 1), slice(4, 5)), (slice(2, 3),)):
        np.testing.assert_array_equal(matrices[box].astype(np.float32), expected[box])
    gates = Mxfp4(blocks[:, ::2], scales[:, ::2], "w")
    np.testing.assert_array_equal(gates[(slice(None),)].astype(np.float32), expected[:, ::2])


def test_blocks_of_zeros_may_have_any_small_scale() -> None:
    blocks, scales = np.zeros((1, 1, 2, 16), np.uint8), np.array([[[0, 1]]], np.uint8)
    assert (Mxfp4(blocks, scales, "w")[(slice(None),)].astype(np.float32) == 0).all()


def test_tensors_that_do_not_fit_and_scales_beyond_bfloat16_are_refused() -> None:
    blocks, scales = random_tensors(1)
    with pytest.raises(CheckpointError, match=r"w: blocks are uint8 \(3, 10, 3, 16\)"):
        Mxfp4(blocks[:, :, :3], scales, "w")
    scales[1, 2, 3] = 255
    with pytest.raises(CheckpointError, match="w: a scale is"):
        Mxfp4(blocks, scales, "w")[(slice(None),)]
