"""What a program of Hopper's kernels for products does: a producer's copies, and two consumers' products.

Owns the filling of shared memory, and the arithmetic. A tile is 128 outputs of one or two blocks of 128 rows, of which
each consumer has 64. A step multiplies 128 bytes of inputs of each row and output.

- In 16 bits it adds to the sums.
- In float8 these are a group of 128 inputs, and the result is added in float32, times the scales of rows and weights:
  so the few bits (some 14) with which `wgmma` adds float8 up matter within a group only.

Called by `float8_product` and `grouped_product`, which say what tiles there are. Source of the arithmetic in float8:
DeepSeek-V3's report (2024), section 3.3, and DeepGEMM.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import (
    WGMMA_ROWS,
    gpu_kernel,
    in_layout,
    load_vector,
    matmul,
    on_one_warp,
    operand,
    store_plain,
)
from pallas_kernels.scaled import ROW_GROUP

NUM_CONSUMERS = 2
STEP_BYTES = 128
BLOCK_ROWS = NUM_CONSUMERS * WGMMA_ROWS
TILE_OUTPUTS = 128
PIECE = 64  # outputs whose scales are equal, if weights have scales of groups
# What 227 KiB of shared memory hold of tiles of one block of rows or two: steps ahead, and pieces of results.
_STAGES, _BUFFERS = {1: 5, 2: 3}, {1: 2, 2: 4}
_REGISTERS = 40, 232  # of a thread of the producer, and of a consumer: 504 in all, three times what each starts with
_ROWS, _COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

Sums: TypeAlias = tuple[jax.Array, ...]  # of a block: `[64, n]` float32 for each piece of the outputs
# Makes the results of a block's sums.
Unit: TypeAlias = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static side of a call."""

    num_steps: int
    """Times 128 bytes of inputs."""
    operands: Any
    """dtype of rows and weights: float8, whose rows have scales, or one of 16 bits."""
    num_blocks: int
    """Blocks of rows in a tile, 1 or 2."""
    num_programs: int
    cuts_rows: bool
    """Whether a tile may have rows that aren't its own."""
    dtype: Any
    """Of the results."""
    interpret: bool
    weight_group: int = 0
    """Inputs of which an output has one scale; 0: all, if weights have scales."""
    block_outputs: int = PIECE
    """Outputs that share scales of groups, a multiple of `PIECE`."""
    unit: Unit | None = None
    """Of gated products: of `[64, 128]`, the first half of which are gates, `[64, 64]`."""

    @property
    def has_scales(self) -> bool:
        """Whether rows and weights have scales."""
        return jnp.dtype(self.operands).itemsize == 1

    @property
    def step_inputs(self) -> int:
        """Inputs that a step multiplies."""
        return STEP_BYTES // jnp.dtype(self.operands).itemsize

    @property
    def results(self) -> int:
        """Columns of the results of a tile."""
        return TILE_OUTPUTS // 2 if self.unit is not None else TILE_OUTPUTS

    @property
    def num_stages(self) -> int:
        """Steps that are kept in shared memory."""
        return _STAGES[self.num_blocks]

    @property
    def num_buffers(self) -> int:
        """Pieces of a warpgroup's results that may be on their way out: all of a tile, if there is room."""
        return 3 if self.cuts_rows and self.has_scales and self.num_blocks == 2 else _BUFFERS[self.num_blocks]

    @property
    def tile_rows(self) -> int:
        """Rows of a tile."""
        return self.num_blocks * BLOCK_ROWS

    @property
    def staged_columns(self) -> int:
        """Outputs that pass shared memory together on their way out: 128 bytes of a row."""
        return 128 // jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Tile:
    """One of a program's tiles."""

    row: jax.Array
    """Its first row, a multiple of 8."""
    output: jax.Array
    """Its first output, or of gated products its first gate."""
    weights: Any
    """`[O, I]`."""
    num_steps: Any
    """0 where the rows have no weights: their results are zeros."""
    w_scale: Any = None
    """`[O, G]`, or `[O]`; None of weights without."""
    begin: Any = 0
    end: Any = 0
    """Its own rows, if `Plan.cuts_rows`; none where the tile doesn't exist."""


@dataclasses.dataclass(frozen=True)
class Refs:
    """The memory of a program."""

    x: Any
    """`[T, I]`."""
    out: Any
    """`[T, O]`."""
    x_tiles: Any
    """`[stages, blocks, 128, inputs of a step]`."""
    w_tiles: Any
    """`[stages, 128, inputs of a step]`."""
    staging: Any
    """`[consumers, buffers, 64, columns]`."""
    arrived: Any
    """A barrier for each stage: its weights, its first block, and that block's scales are there."""
    free: Any
    """A barrier for each stage: both consumers have read it."""
    x_scale: Any = None
    """`[I / 128, T]`; None of rows without."""
    x_scales: Any = None
    """`[stages, blocks, 128]`."""
    arrived_too: Any = None
    """A barrier for each stage: the other block and its scales are there. None if a tile has one block."""
    plain_staging: Any = None
    """`[consumers, 64, columns]`, whose rows can be copied one by one. None if no tile is cut."""


def launch(plan: Plan, name: str, shape: tuple[int, int], body: Callable[..., None]) -> Callable[..., Any]:
    """A function of the kernel's arguments. `body` gets these, the results `shape`, `plan`, and what `Refs` needs."""
    return gpu_kernel(
        functools.partial(body, plan=plan),
        name=name,
        out_type=jax.ShapeDtypeStruct(shape, plan.dtype),
        scratch_types=_scratch(plan),
        grid=(plan.num_programs,),
        grid_names=("program",),
        num_warpgroups=NUM_CONSUMERS + 1,
        warpgroup_name="warpgroup",
        interpret=plan.interpret,
        approx_math=True,
        reduction_scratch_bytes=0,
    )


def _scratch(plan: Plan) -> dict[str, Any]:
    """The types of the memory of `Refs` that is shared memory."""
    stages, blocks = plan.num_stages, plan.num_blocks
    staging = NUM_CONSUMERS, plan.num_buffers, WGMMA_ROWS, plan.staged_columns
    of_rows, of_weights = 1 + plan.has_scales, 1 if plan.unit is None else 2  # copies
    memory = {
        "x_tiles": operand((stages, blocks, BLOCK_ROWS, plan.step_inputs), plan.operands),
        "w_tiles": operand((stages, TILE_OUTPUTS, plan.step_inputs), plan.operands),
        "staging": (operand if jnp.dtype(plan.dtype).itemsize == 2 else plgpu.SMEM)(staging, plan.dtype),
        "arrived": plgpu.Barrier(num_arrivals=of_weights + of_rows, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=NUM_CONSUMERS, num_barriers=stages),
    }
    if plan.has_scales:
        memory["x_scales"] = plgpu.SMEM((stages, blocks, BLOCK_ROWS), jnp.float32)
    if plan.cuts_rows:
        memory["plain_staging"] = plgpu.SMEM((NUM_CONSUMERS, WGMMA_ROWS, plan.staged_columns), plan.dtype)
    if blocks == 2:
        memory["arrived_too"] = plgpu.Barrier(num_arrivals=of_rows, num_barriers=stages)
    return memory


Visit: TypeAlias = Callable[[Tile, jax.Array], None]  # a tile, and how many steps the program did before it
Walk: TypeAlias = Callable[[Visit], jax.Array]  # over all tiles of the program; how many steps it has


def run(plan: Plan, refs: Refs, walk: Walk) -> None:
    """What each warpgroup of a program does."""
    warpgroup = lax.axis_index("warpgroup")
    of_producer, of_consumer = _REGISTERS

    def multiply() -> None:
        plgpu.set_max_registers(of_consumer, action="increase")
        walk(lambda tile, done: _multiply_and_write(plan, refs, warpgroup, tile, done))
        plgpu.wait_smem_to_gmem(0)

    def copy() -> None:
        plgpu.set_max_registers(of_producer, action="decrease")
        on_one_warp(lambda: _produce(plan, refs, walk))

    pl.when(warpgroup < NUM_CONSUMERS)(multiply)
    pl.when(warpgroup == NUM_CONSUMERS)(copy)


def _produce(plan: Plan, refs: Refs, walk: Walk) -> None:
    """Fill the stages for all tiles of this program, then wait until the consumers have read them."""

    def visit(tile: Tile, done: jax.Array) -> None:
        lax.fori_loop(0, tile.num_steps, lambda step, _: _fill(plan, refs, tile, step, done + step), None)

    end = walk(visit)
    first = lax.max(end - plan.num_stages, 0)
    lax.fori_loop(first, end, lambda turn, _: _wait_until_free(plan, refs, turn), None)


def _fill(plan: Plan, refs: Refs, tile: Tile, step: jax.Array, turn: jax.Array) -> None:
    stage = lax.rem(turn, plan.num_stages)
    pl.when(turn >= plan.num_stages)(lambda: _wait_until_free(plan, refs, turn))
    inputs = pl.ds(step * plan.step_inputs, plan.step_inputs)
    starts = [tile.output] if plan.unit is None else [tile.output, tile.output + tile.weights.shape[0] // 2]
    size = TILE_OUTPUTS // len(starts)
    for number, start in enumerate(starts):
        part = refs.w_tiles.at[stage, pl.ds(number * size, size)]
        plgpu.copy_gmem_to_smem(tile.weights.at[pl.ds(start, size), inputs], part, refs.arrived.at[stage])
    for block in range(plan.num_blocks):
        rows = pl.ds(tile.row + block * BLOCK_ROWS, BLOCK_ROWS)
        arrived = _arrived(refs, block).at[stage]
        plgpu.copy_gmem_to_smem(refs.x.at[rows, inputs], refs.x_tiles.at[stage, block], arrived)
        if plan.has_scales:
            plgpu.copy_gmem_to_smem(refs.x_scale.at[step, rows], refs.x_scales.at[stage, block], arrived)


def _wait_until_free(plan: Plan, refs: Refs, turn: jax.Array) -> None:
    plgpu.barrier_wait(refs.free.at[lax.rem(turn, plan.num_stages)])


def _multiply_and_write(plan: Plan, refs: Refs, warpgroup: jax.Array, tile: Tile, done: jax.Array) -> None:
    """This warpgroup's rows of a tile."""

    def with_blocks(num_blocks: int = plan.num_blocks) -> None:
        for block, sums in enumerate(_multiply(plan, refs, warpgroup, tile, done, num_blocks)):
            _write(plan, refs, warpgroup, tile, block, _finished(plan, tile, sums))

    if not plan.cuts_rows:
        with_blocks()
        return
    # Of the last tile of an expert often one block is enough, or none: this warpgroup's part has no row of its own.
    mine = tile.end - tile.row - warpgroup * WGMMA_ROWS
    needed = lax.min(lax.max(lax.div(mine + BLOCK_ROWS - 1, BLOCK_ROWS), 0), plan.num_blocks)
    for num_blocks in range(plan.num_blocks + 1):
        pl.when((needed == num_blocks) & (tile.end > tile.begin))(functools.partial(with_blocks, num_blocks))


def _multiply(plan: Plan, refs: Refs, warpgroup: jax.Array, tile: Tile, done: jax.Array, num_blocks: int) -> list[Sums]:
    """The sums of so many blocks. Blocks have barriers of their own: `ptxas` moves nothing across a wait, and so keeps
    the products of one block at a time in registers, next to the sums of both."""
    mine = pl.ds(warpgroup * WGMMA_ROWS, WGMMA_ROWS)
    pieces = TILE_OUTPUTS // PIECE if plan.has_scales else 1

    def add(step: jax.Array, sums: list[Sums]) -> list[Sums]:
        stage = lax.rem(done + step, plan.num_stages)
        of_weights = _scales_of_weights(plan, tile, step) if plan.has_scales else []
        new: list[Sums] = []
        for block in range(plan.num_blocks):
            plgpu.barrier_wait(_arrived(refs, block).at[stage])
            if block >= num_blocks:
                continue
            operands = refs.x_tiles.at[stage, block, mine], refs.w_tiles.at[stage]
            if not plan.has_scales:
                (total,) = sums[block]
                new.append((matmul(*operands, total, transpose_b=True, interpret=plan.interpret),))
                continue
            of_rows = load_vector(refs.x_scales.at[stage, block, mine], _ROWS, interpret=plan.interpret)
            product = matmul(*operands, transpose_b=True, interpret=plan.interpret)
            new.append(_added(sums[block], product, of_rows, of_weights))
        plgpu.barrier_arrive(refs.free.at[stage])
        return new

    zeros = jnp.zeros((WGMMA_ROWS, TILE_OUTPUTS // pieces), jnp.float32)
    start = [(in_layout(zeros, plgpu.Layout.WGMMA, interpret=plan.interpret),) * pieces for _ in range(num_blocks)]
    sums: list[Sums] = lax.fori_loop(0, tile.num_steps, add, start)
    return sums


def _added(sums: Sums, product: jax.Array, of_rows: jax.Array, of_weights: list[jax.Array | None]) -> Sums:
    """The sums and the product `[64, 128]`, times the scales of its rows and of pieces of its outputs."""
    added = []
    for piece, (total, scale) in enumerate(zip(sums, of_weights, strict=True)):
        values = product[:, piece * PIECE : (piece + 1) * PIECE]
        factor = of_rows if scale is None else of_rows * scale
        added.append(total + values * lax.broadcast_in_dim(factor, values.shape, (0,)))
    return tuple(added)


def _scales_of_weights(plan: Plan, tile: Tile, step: jax.Array) -> list[jax.Array | None]:
    """Of the weights of a step, that of each piece of the outputs; None: they are applied at the end."""
    pieces = range(0, TILE_OUTPUTS, PIECE)
    if not plan.weight_group:
        return [None for _ in pieces]
    group = lax.div(step * ROW_GROUP, plan.weight_group)
    shared = min(plan.block_outputs, TILE_OUTPUTS)
    different = {first: tile.w_scale[tile.output + first, group] for first in range(0, TILE_OUTPUTS, shared)}
    return [different[first // shared * shared] for first in pieces]


def _finished(plan: Plan, tile: Tile, sums: Sums) -> Sums:
    """The results: of sums that are scaled, or units of gates."""
    if plan.unit is not None:
        return (plan.unit(sums[0]),)
    return _scaled(plan, tile, sums) if plan.has_scales and not plan.weight_group else sums


def _scaled(plan: Plan, tile: Tile, sums: Sums) -> Sums:
    """The sums times the scale of each output."""
    scaled = []
    for piece, total in enumerate(sums):
        of_outputs = tile.w_scale.at[pl.ds(tile.output + piece * PIECE, PIECE)]
        scale = load_vector(of_outputs, _COLUMNS, interpret=plan.interpret)
        scaled.append(total * lax.broadcast_in_dim(scale, total.shape, (1,)))
    return tuple(scaled)


def _write(plan: Plan, refs: Refs, warpgroup: jax.Array, tile: Tile, block: int, results: Sums) -> None:
    """Write this warpgroup's rows of a block, those of them that are the tile's, to their places."""
    row = tile.row + block * BLOCK_ROWS + warpgroup * WGMMA_ROWS
    if not plan.cuts_rows:
        _write_whole(plan, refs, warpgroup, tile, block, row, results)
        return
    is_whole = (row >= tile.begin) & (row + WGMMA_ROWS <= tile.end)
    pl.when(is_whole)(lambda: _write_whole(plan, refs, warpgroup, tile, block, row, results))
    pl.when(jnp.logical_not(is_whole))(lambda: _write_rows(plan, refs, warpgroup, tile, row, results))


def _cut(plan: Plan, results: Sums, width: int) -> Iterator[tuple[int, jax.Array]]:
    """The results in pieces of so many columns, each with its first column."""
    for column in range(0, plan.results, width):
        piece, first = divmod(column, results[0].shape[1])
        yield column, results[piece][:, first : first + width].astype(plan.dtype)


def _write_whole(
    plan: Plan, refs: Refs, warpgroup: jax.Array, tile: Tile, block: int, row: jax.Array, results: Sums
) -> None:
    """The first piece of a tile waits until memory has all results of the tile before; its others follow each other."""
    width = plan.staged_columns
    for number, (column, piece) in enumerate(_cut(plan, results, width), block * (plan.results // width)):
        plgpu.wait_smem_to_gmem(plan.num_buffers - 1 if number else 0, wait_read_only=True)
        staging = refs.staging.at[warpgroup, number % plan.num_buffers]
        if piece.dtype.itemsize == 2:
            staging[...] = piece
        else:
            store_plain(staging, piece)
        plgpu.commit_smem()
        columns = pl.ds(tile.output + column, width)
        plgpu.copy_smem_to_gmem(staging, refs.out.at[pl.ds(row, WGMMA_ROWS), columns])


def _write_rows(plan: Plan, refs: Refs, warpgroup: jax.Array, tile: Tile, row: jax.Array, results: Sums) -> None:
    """TMA copies a fixed number of rows, so a count is put together from powers of two, the largest first."""
    first = lax.max(tile.begin - row, 0)
    count = lax.max(lax.min(tile.end - row, WGMMA_ROWS) - first, 0)
    staging, width = refs.plain_staging.at[warpgroup], plan.staged_columns
    for column, piece in _cut(plan, results, width):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        store_plain(staging, piece)
        plgpu.commit_smem()
        columns = pl.ds(tile.output + column, width)
        size = WGMMA_ROWS
        while size:

            def copy(size: int = size, columns: Any = columns) -> None:
                at = first + lax.div(count, 2 * size) * (2 * size)
                plgpu.copy_smem_to_gmem(staging.at[pl.ds(at, size)], refs.out.at[pl.ds(row + at, size), columns])

            pl.when((count & size) != 0)(copy)
            size //= 2


def _arrived(refs: Refs, block: int) -> Any:
    return refs.arrived if block == 0 else refs.arrived_too
