"""The program that runs the vision tower: patches of packed images in, rows of the pool of embeddings written.

With several bins each device encodes the images of its own one, and all devices write the rows of all of them: the pool
is the same on every device. Knows no requests. `programs` traces it for each shape of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsgl.batch.patches import NUM_TAPS, PLACES, EncodeBucket, TowerCapacity
from jaxsgl.models import Decoder
from jaxsgl.models.tensor_parallel import TENSOR_AXIS, all_parts
from jaxsgl.models.vision.tower import Patches

Encode: TypeAlias = Callable[[list[jax.Array], jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
ENCODE_DONATES = (1,)  # images


def make_encode(graphdef: nnx.GraphDef[Decoder], treedef: Any, num_bins: int) -> Encode:
    """`encode(params, images, pixels, columns, rows) -> images`, see `EncodeInputs`; each device has one bin of them.

    Rows behind the end of the pool, which are padding's, are dropped.
    """

    def encode(
        params: list[jax.Array], images: jax.Array, pixels: jax.Array, columns: jax.Array, rows: jax.Array
    ) -> jax.Array:
        tower = nnx.merge(graphdef, jax.tree.unflatten(treedef, params)).visual
        assert tower is not None
        made, places = tower(patches_of_call(pixels[0], columns[0])), rows[0]
        if num_bins > 1:
            made, places = all_parts(made), all_parts(places)
        return images.at[places].set(made.astype(images.dtype), mode="drop")

    return encode


def patches_of_call(pixels: jax.Array, columns: jax.Array) -> Patches:
    """What a call says of the patches of one bin: `pixels [P, C]`, `columns [P, PLACES]`."""
    taps, weights = 2 + NUM_TAPS, 2 + 2 * NUM_TAPS
    return Patches(
        pixels,
        columns[:, :2],
        columns[:, 2:taps],
        jax.lax.bitcast_convert_type(columns[:, taps:weights], jnp.float32),
        columns[:, weights],
    )


def call_shapes(bucket: EncodeBucket, capacity: TowerCapacity, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and places of pixels, columns and rows."""
    size, bins = bucket
    sharding = NamedSharding(mesh, PartitionSpec(TENSOR_AXIS if bins > 1 else None))
    shape = capacity.shape
    return (
        jax.ShapeDtypeStruct((bins, size, shape.patch_len), jnp.uint8, sharding=sharding),
        jax.ShapeDtypeStruct((bins, size, PLACES), jnp.int32, sharding=sharding),
        jax.ShapeDtypeStruct((bins, shape.tokens_of(size)), jnp.int32, sharding=sharding),
    )
