"""Sums of rows in C++ (`sums.cc`) for x86 processors. Called by `pallas_kernels.sums`."""

from __future__ import annotations

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp

from pallas_kernels.native import library
from pallas_kernels.target import target_device

What: TypeAlias = Literal["sum", "squares", "log", "top"]


def refuse(x: jax.Array) -> str | None:
    """Why sums of x `[.., n]` can't run here, because of the array or of this machine; or None."""
    if target_device().platform != "cpu":
        return f"it needs a cpu, this is a {target_device().platform}"
    if x.dtype != jnp.float32:
        return f"it takes float32, not {x.dtype}"
    return library.load()


def of_rows(x: jax.Array, what: What) -> jax.Array:
    """Of the last axis of x `[.., n]` float32 the sums, those of squares, the logs of sums, or the tops: `[..]`."""
    call = jax.ffi.ffi_call(library.ROW_SUMS, jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32))
    out: jax.Array = call(x, what=what)
    return out
