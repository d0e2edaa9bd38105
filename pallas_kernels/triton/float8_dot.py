"""Products of float8 tiles on the matrix units that multiply float8, inside a Triton kernel.

Owns one primitive. Pallas's own dot leaves Triton's limit of sums in less than float32 at 0, for which Triton converts
float8 to float16 on Hopper and multiplies at half the rate: `wgmma` of float8 keeps some 14 bits of its sums. Callers
add the sums of a few steps up in float32 themselves. Called by `float8_product`.

JAX has no public way to set that limit. The part of it that is used here is looked for when it is needed, and
`is_possible` says whether this JAX has it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallas_kernels.jax_internals import triton_lowering

_ANY_NUMBER = 2**30  # of sums, before they are added up in float32
_float8_dot = Primitive("float8_dot")


def float8_dot(left: jax.Array, right: jax.Array) -> jax.Array:
    """`left [M, K]` times `right [N, K]`, both float8: `[M, N]` float32, whose sums may have fewer bits."""
    assert is_possible(), "a kernel refuses first"
    product: jax.Array = _float8_dot.bind(left, right)
    return product


@functools.cache
def is_possible() -> bool:
    """Whether this JAX lets a kernel say how exact a product's sums are to be; arranges it."""
    try:
        from jaxlib.mlir import ir

        lowering = triton_lowering()
        of_dot: Any = lowering.triton_lowering_rules[lax.dot_general_p]
        register: Any = lowering.register_lowering
    except (ImportError, AttributeError, KeyError):
        return False

    def lower(ctx: Any, left: Any, right: Any) -> Any:
        dims = (((1,), (1,)), ((), ()))
        options = {"precision": None, "preferred_element_type": jnp.float32, "out_sharding": None}
        out = of_dot(ctx, left, right, dimension_numbers=dims, **options)
        assert out.owner.name == "tt.dot", f"a product became {out.owner.name}"
        limit = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), _ANY_NUMBER)
        out.owner.attributes["maxNumImpreciseAcc"] = limit
        return out

    register(_float8_dot)(lower)
    return True


def _by_xla(left: jax.Array, right: jax.Array) -> jax.Array:
    """For interpreters."""
    return jnp.dot(left.astype(jnp.float32), right.astype(jnp.float32).T, precision="highest")


def _shape(left: Any, right: Any) -> Any:
    return jax.core.ShapedArray((left.shape[0], right.shape[0]), jnp.dtype(jnp.float32))


_float8_dot.def_abstract_eval(_shape)
_float8_dot.def_impl(_by_xla)
mlir.register_lowering(_float8_dot, mlir.lower_fun(_by_xla, multiple_results=False))
