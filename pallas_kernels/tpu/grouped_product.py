"""`grouped_product` on TPUs: JAX's own Pallas kernel for it (megablox). Called through `tpu.BACKEND`.

`lax.ragged_dot` runs natively there too, but wants weights `[E, in, out]`: with weights as checkpoints store them, XLA
makes a transposed copy of all of them at each call (768 MiB for 128 experts of 1536 x 2048, seen in a compiled program
for a v5e). This kernel reads them as they lie.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import next_power_of_2

from pallas_kernels.experts import Groups

_LANES = 128
# Rows, inputs and outputs of a tile, chosen by hand: half a MiB of bfloat16 weights in a copy. Not measured.
_MOST_ROWS, _MOST_INPUTS, _MOST_OUTPUTS = 128, 512, 512


def refuse_grouped_product(x: jax.Array, groups: Groups, weights: jax.Array) -> str | None:
    """Why this backend can't take x and weights `[E, out, in]`, or None when it can."""
    if weights.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it takes bfloat16 and float32 weights, not {weights.dtype}"
    if any(size % _LANES for size in weights.shape[1:]):
        return f"the weights are {weights.shape}; it takes multiples of {(_LANES, _LANES)}"
    return None


@functools.partial(jax.jit, static_argnames=("of_tokens", "interpret"))
def grouped_product(x: jax.Array, groups: Groups, weights: jax.Array, of_tokens: bool, interpret: bool) -> jax.Array:
    """See `backend.GroupedProduct`."""
    from jax.experimental.pallas.ops.tpu import megablox  # no other platform needs it

    num_places, num_out, num_in = groups.num_places, *weights.shape[1:]
    smallest = 32 // weights.dtype.itemsize  # rows of a native tile
    num_rows = min(max(next_power_of_2(num_places), smallest), _MOST_ROWS)
    rows = (x[groups.tokens] if of_tokens else x).astype(weights.dtype)
    rows = jnp.pad(rows, ((0, -num_places % num_rows), (0, 0)))
    tile = num_rows, min(num_in, _MOST_INPUTS), min(num_out, _MOST_OUTPUTS)
    y: jax.Array = megablox.gmm(
        rows, weights, groups.sizes, preferred_element_type=x.dtype, tiling=tile, transpose_rhs=True,
        interpret=interpret,
    )[:num_places]  # fmt: skip
    # It writes no rows behind those of the last expert.
    has_expert = jnp.arange(num_places) < jnp.sum(groups.sizes)
    return jnp.where(has_expert[:, None], y, 0)
