"""`quantized_product` in XLA: for CPUs, and where a kernel refuses. Called through `xla.BACKEND`."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dots import dot_precision
from pallas_kernels.native import product as native
from pallas_kernels.packed import PackedMatrix
from pallas_kernels.scaled import ScaledMatrix, widened
from pallas_kernels.target import target_device


def quantized_product(
    x: jax.Array, weights: ScaledMatrix | PackedMatrix, dtype: DTypeLike, in_parts: bool, interpret: bool
) -> jax.Array:
    """See `backend.QuantizedProduct`. C++ multiplies on a CPU that has it, so that a row's bits depend on no other row.

    XLA writes the scaled weights to memory before it multiplies, at two to five times the traffic of the product. Up to
    a quarter of a group's size of rows, sums of the groups, which are scaled afterwards, are less than that.
    """
    # Otherwise XLA may scale the weights of all layers before the first one is multiplied, and keep them.
    x, weights = jax.lax.optimization_barrier((x, weights))
    if isinstance(weights, PackedMatrix):
        weights = weights.as_scaled()
    has_whole_groups = weights.num_inputs % weights.group == 0
    if target_device().platform != "cpu" and 4 * len(x) <= weights.group and has_whole_groups:
        return _from_sums_of_groups(x, weights).astype(dtype)
    values = widened(weights.numbers, weights.scale, weights.zero, weights.group, x.dtype)
    if native.refuse_float(x, values) is None:
        return native.float_product(x, values).astype(dtype)
    # Sums in float32 would be rounded by a kernel of their own where XLA takes cuBLAS.
    sums = jnp.float32 if target_device().platform == "cpu" else dtype
    out = jnp.einsum("td,nd->tn", x, values, precision=dot_precision(x), preferred_element_type=sums)
    return out.astype(dtype)


def _from_sums_of_groups(x_TD: jax.Array, weights: ScaledMatrix) -> jax.Array:
    """`[T, N]` float32."""
    groups = weights.scale.shape[-1]
    x_TGI, w_NGI = (of.reshape(len(of), groups, -1) for of in (x_TD, weights.numbers.astype(x_TD.dtype)))
    sums_GTN = jnp.einsum(
        "tgi,ngi->gtn", x_TGI, w_NGI, precision=dot_precision(x_TD), preferred_element_type=jnp.float32
    )
    if weights.zero is not None:
        sums_TG = jnp.sum(x_TGI, axis=-1, dtype=jnp.float32)
        sums_GTN = sums_GTN - sums_TG.T[:, :, None] * weights.zero.T[:, None, :]
    return jnp.einsum("gtn,ng->tn", sums_GTN, weights.scale, precision="highest")
