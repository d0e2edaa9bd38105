"""Parameters are made of pieces: every shard of every layout, in blocks, and nothing is read that no device needs."""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jaxsgl.models import abstract_model, arch_from_folder
from jaxsgl.models.rope import RopeParams, split_half_order
from jaxsgl.weights import assembly
from jaxsgl.weights.assembly import Assembler, Progress, blocks, overlap
from jaxsgl.weights.names import recipe_of
from jaxsgl.weights.recipe import Piece, shape_of
from jaxsgl.weights.sharding import replicated
from jaxsgl.weights.tensor_files import TensorFiles
from tests.checkpoints import make_checkpoint
from tests.plain_model import mesh_of


def assemble(pieces: list[Piece], shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> npt.NDArray:
    with Assembler(Progress(0), lambda numbers: None) as assembler:
        made = assembler.start(pieces, shape, np.dtype(dtype), replicated(mesh_of())).finish()
    return np.asarray(made)


def counted(*shape: int) -> npt.NDArray[np.float32]:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@given(
    st.tuples(st.integers(0, 5), st.integers(1, 6)),
    st.tuples(st.integers(0, 3), st.integers(1, 4)),
    st.integers(0, 1),
)
def test_a_shard_is_cut_out_of_the_pieces(rows: tuple[int, int], columns: tuple[int, int], pair: int) -> None:
    """Two pieces fill [2, 6, 4], the second one by rows of its own; any part of it is that part of both."""
    whole = counted(2, 6, 4)
    pieces = [
        Piece((0,), whole[0]),
        Piece((slice(1, 2), slice(0, 2)), whole[1:, :2]),
        Piece((1, slice(2, 6)), whole[1, 2:]),
    ]
    bounds = [(pair, 2), (min(rows[0], rows[1] - 1), rows[1]), (min(columns[0], columns[1] - 1), columns[1])]
    shard = np.full([stop - start for start, stop in bounds], -1.0)
    for piece in pieces:
        common = overlap(bounds, piece, whole.shape)
        if common is not None:
            shard[common[0]] = piece.numbers[common[1]]
    np.testing.assert_array_equal(shard, whole[tuple(slice(*bound) for bound in bounds)])


@given(st.lists(st.integers(1, 5), max_size=4), st.sampled_from([1, 2, 4]))
def test_blocks_cover_an_array_once(shape: list[int], width: int) -> None:
    whole = np.zeros(shape, np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "BLOCK_BYTES", 12)
        for box in blocks(whole.shape, width):
            assert whole[box].size * width <= 12 or whole[box].size == 1
            part: Any = (*box, ...)
            whole[part] += 1
    assert (whole == 1).all()


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8])
def test_numbers_keep_their_bits_or_are_converted(stored: npt.DTypeLike, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "BLOCK_BYTES", 16)
    numbers = (counted(6, 5) - 11).astype(stored)
    pieces = [Piece((slice(0, 5),), numbers.T), Piece((5, slice(None)), numbers[:, 0])]
    expected = np.concatenate([numbers.T, numbers[:, 0][None]])
    for wanted in (stored, np.float32, ml_dtypes.bfloat16):
        np.testing.assert_array_equal(assemble(pieces, (6, 6), wanted), expected.astype(wanted))


def test_single_numbers_fill_a_vector() -> None:
    pieces = [Piece((i,), np.array(i, np.float32)) for i in range(3)]
    np.testing.assert_array_equal(assemble(pieces, (3,)), [0, 1, 2])


def test_a_part_may_be_computed_as_it_is_read() -> None:
    class Doubled:
        shape, nbytes, dtype = (4, 2), 32, np.dtype(np.float32)

        def __getitem__(self, box: tuple[slice, ...]) -> npt.NDArray:
            return counted(4, 2)[box] * 2

    np.testing.assert_array_equal(assemble([Piece((), Doubled())], (4, 2)), counted(4, 2) * 2)


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (
            [Piece((0,), counted(3)), Piece((1, slice(0, 2)), counted(3))],
            r"numbers of shape \(3,\) for a part of shape \(2,\)",
        ),
        ([Piece((0,), counted(2)), Piece((2,), counted(2))], r"4 numbers for shape \(3, 2\)"),
    ],
)
def test_a_recipe_that_leaves_gaps_is_a_bug(pieces: list[Piece], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        shape_of(pieces)


def test_a_failed_read_ends_the_load() -> None:
    class Unreadable:
        shape, nbytes, dtype = (2,), 8, np.dtype(np.float32)

        def __getitem__(self, box: tuple[slice, ...]) -> npt.NDArray:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        assemble([Piece((), Unreadable())], (2,))


def test_on_a_cpu_the_buffer_that_was_filled_is_the_parameter() -> None:
    with Assembler(Progress(0), lambda numbers: None) as assembler:
        unfinished = assembler.start([Piece((), counted(3, 5))], (3, 5), np.dtype(np.float32), replicated(mesh_of()))
        made = unfinished.finish()
    ((_, buffer),) = unfinished.shards
    assert made.unsafe_buffer_pointer() == buffer.ctypes.data


def test_the_buffer_goes_with_the_parameter() -> None:
    """JAX lets go of it when Python collects garbage; a parameter that is given back must not stay in memory."""
    with Assembler(Progress(0), lambda numbers: None) as assembler:
        unfinished = assembler.start([Piece((), counted(3, 5))], (3, 5), np.dtype(np.float32), replicated(mesh_of()))
    made, ((_, buffer),) = unfinished.finish(), unfinished.shards
    alive = weakref.ref(buffer.base)
    del unfinished, buffer
    gc.collect()
    assert alive() is not None and made[0, 1] == 1
    made.delete()
    gc.collect()
    assert alive() is None


def test_no_recipe_reads_or_copies_a_tensor(tmp_path: Path) -> None:
    """Its pieces are views of the mapped files, so that a shard's slice is read without the rest."""
    for kind in ("llama_linear_rope_bias", "qwen3"):
        folder = make_checkpoint(kind, tmp_path / kind)
        arch = arch_from_folder(folder)
        tensors = TensorFiles(folder)
        for path, param in nnx.to_flat_state(abstract_model(arch, jax.numpy.dtype("float32"))[1]):
            recipe = recipe_of(path, arch)
            sources = tuple(tensors.tensor(source, arch) for source in recipe.sources)
            pieces = list(recipe.pieces(arch, sources))
            assert shape_of(pieces) == param.shape, path
            for piece in pieces:
                assert any(np.shares_memory(piece.numbers, source) for source in sources), path


@pytest.mark.parametrize(
    "rope", [RopeParams(interleaved=True), RopeParams(rotary_dim=8), RopeParams(rotary_dim=8, interleaved=True)]
)
def test_dimensions_of_heads_are_reordered_by_views(rope: RopeParams, tmp_path: Path) -> None:
    arch = replace(arch_from_folder(make_checkpoint("llama_tied", tmp_path)), ropes=(rope,))
    order = split_half_order(rope, arch.head_dim)
    q, k, v = counted(4 * 16, 3), -counted(2 * 16, 3), counted(2 * 16, 3) / 2
    pieces = list(recipe_of(("layers", 0, "attention", "qkv"), arch).pieces(arch, (q, k, v)))
    assert all(any(np.shares_memory(piece.numbers, tensor) for tensor in (q, k, v)) for piece in pieces)
    fused = assemble(pieces, shape_of(pieces))
    np.testing.assert_array_equal(fused[:, :2], q.reshape(2, 2, 16, 3)[:, :, order])
    np.testing.assert_array_equal(fused[:, 2], k.reshape(2, 16, 3)[:, order])
    np.testing.assert_array_equal(fused[:, 3], v.reshape(2, 16, 3))


def test_progress_is_logged_every_few_seconds_in_bytes(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 1.0, 6.0, 8.0, 9.0])
    progress = Progress(12_000_000_000, clock=lambda: next(times))
    with caplog.at_level(logging.INFO, "jaxsgl"):
        for _ in range(3):
            progress.add(3_000_000_000)
        progress.finish()
    assert caplog.messages == [
        "weights: 6.00 GB of 12.00 GB read, 1.00 GB/s",
        "weights: 9.00 GB read in 9.0 s, 1.00 GB/s",
    ]
