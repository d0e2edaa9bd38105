"""`Case`: a call of an operation and what it should return, and how far its results may be off.

Owns the measure of an error. Never knows operations. Made by `cases`, run by `__main__`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

RUNS = 3  # with the same inputs: a race shows in some of them
# Error of a token's row over its norm. Numbers of 16 bits have 0.2 to 0.5%, float8 that is stored up to 6%; a row
# that is wrong has some 100%.
TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 2e-2}
FLOAT8_TOLERANCE = 8e-2


@dataclasses.dataclass(frozen=True)
class Case:
    """A call and what it should return.

    Attributes:
        name: of its batch.
        tolerance: of `error`.
        call: its results on a backend, interpreted or not: arrays `[rows, ..]`.
        right: what they should be, in float32. Where that is NaN, so must the results be.
        others: what JAX's own kernel computes, which is asked after a wrong result; None where JAX has no such kernel.
    """

    name: str
    tolerance: float
    call: Callable[[str, bool], list[jax.Array]]
    right: Callable[[], list[jax.Array]]
    others: Callable[[], list[jax.Array]] | None = None

    def error(self, backend: str, interpret: bool = False) -> float:
        """The largest error of a row in any of `RUNS` runs, over the row's norm; infinite for NaN that shouldn't be."""
        return self._error([self.call(backend, interpret) for _ in range(RUNS)])

    def second_opinion(self) -> str:
        """Whether JAX's own kernel is right where ours is wrong, in words; empty where JAX has no such kernel."""
        if self.others is None:
            return ""
        try:
            error = self._error([self.others()])
        except Exception as problem:  # compilers and drivers raise errors of any class
            return f"; JAX's own kernel raised {type(problem).__name__}"
        if error <= self.tolerance:
            return "; JAX's own kernel is right"
        return f"; JAX's own kernel is wrong too, by {error:.1e}: suspect the device and its software"

    def _error(self, found: list[list[jax.Array]]) -> float:
        with jax.default_matmul_precision("highest"):
            right = self.right()
        return max(float(row_error(a, b)) for results in found for a, b in zip(results, right, strict=True))


@jax.jit
def row_error(out: jax.Array, right: jax.Array) -> jax.Array:
    """The largest error of a row of `out` over the norm of the row of `right`, which is not taken for almost zero."""
    out, right = (each.astype(jnp.float32).reshape(len(each), -1) for each in (out, right))
    difference = jnp.where(jnp.isnan(out) & jnp.isnan(right), 0, out - right)
    norms = jnp.linalg.norm(jnp.nan_to_num(right), axis=1)
    errors = jnp.linalg.norm(difference, axis=1) / jnp.maximum(norms, 1e-3 * jnp.max(norms) + 1e-30)
    return jnp.max(jnp.where(jnp.isfinite(errors), errors, jnp.inf))
