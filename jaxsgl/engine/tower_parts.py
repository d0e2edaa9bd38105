"""The vision tower in parts: programs for its beginning, a layer and its ends, and what is kept between them.

Used for an image whose whole encoding would keep running requests waiting for longer than `--max-itl-ms` allows; any
other has one program (`encoding.py`). A layer's number is an argument, so there are four programs for each shape.
`Programs` compiles them; the engine owns a `TowerParts`. Knows no requests and no times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxsgl.batch.patches import EncodeInputs, EncodePart
from jaxsgl.engine.encoding import patches_of_call
from jaxsgl.models import Decoder
from jaxsgl.models.vision.arch import VisionArch
from jaxsgl.models.vision.tower import Tower, rope_tables

PART_KINDS = ("encode begin", "encode layer", "encode tap", "encode end")
PART_DONATES = {"encode begin": (), "encode layer": (1,), "encode tap": (1,), "encode end": (1,)}


class Between(NamedTuple):
    """What is kept between layers.

    Attributes:
      hidden: `[P, M]`.
      columns: `[1, P, PLACES]`, as they came.
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
        tower, columns = tower_of(params), between.columns[0]
        cos, sin = rope_tables(columns[:, :2], tower.arch)
        return between._replace(hidden=tower.layer(number, between.hidden, cos, sin, columns[:, -1]))

    def tap(
        params: list[jax.Array], images: jax.Array, hidden: jax.Array, rows: jax.Array, number: jax.Array
    ) -> jax.Array:
        tower = tower_of(params)
        assert tower.deepstack is not None
        return _written(images, tower.deepstack(hidden, number), rows, 1 + number, tower.arch)

    def end(params: list[jax.Array], images: jax.Array, hidden: jax.Array, rows: jax.Array) -> jax.Array:
        tower = tower_of(params)
        return _written(images, tower.merger(hidden), rows, jnp.int32(0), tower.arch)

    programs: dict[str, Program] = dict(zip(PART_KINDS, (begin, layer, tap, end), strict=True))
    return programs[kind]


def _written(images: jax.Array, made: jax.Array, rows: jax.Array, block: jax.Array, arch: VisionArch) -> jax.Array:
    """The pool with `made [P / 4, D]` in the block of that number of the rows `[1, P / 4]`."""
    blocks = images.reshape(len(images), -1, arch.out_size)
    return blocks.at[rows[0], block].set(made.astype(images.dtype), mode="drop").reshape(images.shape)


class TowerParts:
    """Runs parts, and keeps what is between them.

    Args:
      program: the compiled program of a kind, for a part's bucket.
      taps: layers behind which deepstack takes something.
    """

    def __init__(self, program: Callable[[str, EncodeInputs], Program], taps: tuple[int, ...]) -> None:
        self._program, self._taps = program, taps
        self._between: Between | None = None

    def run(self, params: list[jax.Array], images: jax.Array, part: EncodePart) -> jax.Array:
        """Launches the part; returns the pool of embeddings. The first part forgets what was between others."""
        call = part.call
        begin, layer, tap, end = (self._program(kind, call) for kind in PART_KINDS)
        if part.first == 0:
            self._between = begin(params, call.pixels, call.columns)
        for number in range(part.first, part.stop):
            assert self._between is not None, "a part comes before the first one"
            self._between = layer(params, self._between, np.int32(number))
            if number in self._taps:
                index = np.int32(self._taps.index(number))
                images = tap(params, images, self._between.hidden, call.rows, index)
        if part.is_last:
            assert self._between is not None
            images = end(params, images, self._between.hidden, call.rows)
            self._between = None
        return images
