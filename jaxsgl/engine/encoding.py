"""The programs that run the vision tower: patches of packed images in, rows of the pool of embeddings written.

One program encodes a call. An image whose encoding would keep running requests waiting for longer than `--max-itl-ms`
allows is encoded in parts: programs for the beginning, a layer and the ends, where a layer's number is an argument, so
that there are four for each shape. The engine owns a `TowerParts`, which keeps what is between them.

With several bins each device encodes the images of its own one, and all devices write the rows of all of them: the pool
is the same on every device. Knows no requests and no times. `step_programs`
makes programs of them for each shape of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsgl.batch.patches import JOINED_TAPS, EncodeBucket, EncodeInputs, EncodePart, TowerCapacity
from jaxsgl.models import Decoder
from jaxsgl.models.tensor_parallel import TENSOR_AXIS, all_parts
from jaxsgl.models.towers.attention import Patches
from jaxsgl.models.towers.tower import Tower

Encode: TypeAlias = Callable[[list[jax.Array], jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
ENCODE_DONATES = (1,)  # images


def make_encode(graphdef: nnx.GraphDef[Decoder], treedef: Any, num_bins: int) -> Encode:
    """`encode(params, images, pixels, columns, rows) -> images`, see `EncodeInputs`; each device has one bin of them.

    Rows past the end of the pool, which are padding's, are dropped.
    """

    def encode(
        params: list[jax.Array], images: jax.Array, pixels: jax.Array, columns: jax.Array, rows: jax.Array
    ) -> jax.Array:
        tower = nnx.merge(graphdef, jax.tree.unflatten(treedef, params)).visual
        assert tower is not None
        made, places = placed(tower, tower(patches_of_call(pixels[0], columns[0])), rows[0])
        if num_bins > 1:
            made, places = all_parts(made), all_parts(places)
        return images.at[places].set(made.astype(images.dtype), mode="drop")

    return encode


def patches_of_call(pixels: jax.Array, columns: jax.Array) -> Patches:
    """What a call says of the patches of one bin: `pixels [P, C]`, and `columns` as in `EncodeInputs`."""
    weights = columns.shape[1] - 2
    taps = 1 + weights // 2
    return Patches(
        pixels,
        columns[:, :2],
        columns[:, 2:taps],
        jax.lax.bitcast_convert_type(columns[:, taps:weights], jnp.float32),
        columns[:, weights],
        columns[:, weights + 1],
    )


def placed(tower: Tower, made: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens and their rows in the pool, from what the tower makes of patches and what a call says of one bin."""
    if not tower.arch.tokens.joins_tiles:
        return made, rows
    weights = jax.lax.bitcast_convert_type(rows[:, 1 + JOINED_TAPS :], jnp.float32)
    return tower.joined(made, rows[:, 1 : 1 + JOINED_TAPS], weights), rows[:, 0]


def call_shapes(bucket: EncodeBucket, capacity: TowerCapacity, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and places of pixels, columns and rows."""
    size, bins = bucket
    sharding = NamedSharding(mesh, PartitionSpec(TENSOR_AXIS if bins > 1 else None))
    shape = capacity.shape
    of_token = (1 + 2 * JOINED_TAPS,) if shape.joined_side else ()
    return (
        jax.ShapeDtypeStruct((bins, size, shape.patch_len), jnp.uint8, sharding=sharding),
        jax.ShapeDtypeStruct((bins, size, shape.num_columns), jnp.int32, sharding=sharding),
        jax.ShapeDtypeStruct((bins, shape.tokens_of(size), *of_token), jnp.int32, sharding=sharding),
    )


BEGIN, LAYER, TAP, END = PART_KINDS = ("encode begin", "encode layer", "encode tap", "encode end")
PART_DONATES = {"encode begin": (), "encode layer": (1,), "encode tap": (1,), "encode end": (1,)}


class Between(NamedTuple):
    """What is kept between layers.

    Attributes:
      hidden: `[P, M]`.
      columns: `[1, P, num_columns]`, as they came.
    """

    hidden: jax.Array
    columns: jax.Array


Program: TypeAlias = Callable[..., Any]


def make_part(kind: str, graphdef: nnx.GraphDef[Decoder], treedef: Any) -> Program:
    """The program of a kind of `PART_KINDS`:

    begin(params, pixels, columns) -> Between
    layer(params, Between, layer) -> Between
    tap(params, images, hidden, rows, tap) -> images    what deepstack adds, by its number
    end(params, images, hidden, rows) -> images         the embeddings
    """

    def tower_of(params: list[jax.Array]) -> Tower:
        tower = nnx.merge(graphdef, jax.tree.unflatten(treedef, params)).visual
        assert isinstance(tower, Tower)
        return tower

    def begin(params: list[jax.Array], pixels: jax.Array, columns: jax.Array) -> Between:
        return Between(tower_of(params).embed(patches_of_call(pixels[0], columns[0])), columns)

    def layer(params: list[jax.Array], between: Between, number: jax.Array) -> Between:
        tower, hidden = tower_of(params), between.hidden
        around = tower.surroundings(patches_of_call(hidden, between.columns[0]))
        return between._replace(hidden=tower.layer(number, hidden, around))

    def tap(
        params: list[jax.Array], images: jax.Array, hidden: jax.Array, rows: jax.Array, number: jax.Array
    ) -> jax.Array:
        tower = tower_of(params)
        assert tower.deepstack is not None
        return _written(images, tower.deepstack(hidden, number), rows[0], 1 + number, tower.arch.out_size)

    def end(params: list[jax.Array], images: jax.Array, hidden: jax.Array, rows: jax.Array) -> jax.Array:
        tower = tower_of(params)
        return _written(images, *placed(tower, tower.tokens(hidden), rows[0]), jnp.int32(0), tower.arch.out_size)

    programs: dict[str, Program] = dict(zip(PART_KINDS, (begin, layer, tap, end), strict=True))
    return programs[kind]


def _written(images: jax.Array, made: jax.Array, rows: jax.Array, block: jax.Array, out_size: int) -> jax.Array:
    """The pool with `made [P / 4, D]` in the block of that number of the rows `[P / 4]`."""
    blocks = images.reshape(len(images), -1, out_size)
    return blocks.at[rows, block].set(made.astype(images.dtype), mode="drop").reshape(images.shape)


class TowerParts:
    """Runs parts, and keeps what is between them.

    Args:
      program: the compiled program of a kind, for a part's bucket.
      taps: layers after which deepstack takes something.
    """

    def __init__(self, program: Callable[[str, EncodeInputs], Program], taps: tuple[int, ...]) -> None:
        self._program, self._taps = program, taps
        self._between: Between | None = None

    def run(self, params: list[jax.Array], images: jax.Array, part: EncodePart) -> jax.Array:
        """Launches the part; returns the pool of embeddings. The first part forgets what was between others."""
        call = part.call
        if part.first == 0:
            self._between = self._program(BEGIN, call)(params, call.pixels, call.columns)
        layer = self._program(LAYER, call)
        for number in range(part.first, part.stop):
            assert self._between is not None, "a part comes before the first one"
            self._between = layer(params, self._between, np.int32(number))
            if number in self._taps:
                index = np.int32(self._taps.index(number))
                images = self._program(TAP, call)(params, images, self._between.hidden, call.rows, index)
        if part.is_last:
            assert self._between is not None
            images = self._program(END, call)(params, images, self._between.hidden, call.rows)
            self._between = None
        return images
