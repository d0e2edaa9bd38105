"""Checks `rotate_and_store` and `add_and_norm` on one backend with one spec, like `check` does the ops on pages.

Owns what is right for them, in NumPy and float64 on the same inputs: every query, every stored number and every sum.
Called by `check kernels`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from bench.kernels.check import CRASHED, FAILED, PASSED, REFUSED, TOLERANCE, Check
from pallas_kernels import FusedQkv, PagedKv, add_and_norm, rotate_and_store
from pallas_kernels.dispatch import BACKEND_OF_NAME
from pallas_kernels.paged_kv import FLOAT8
from pallas_kernels.specs import ArgSpec

Array = npt.NDArray[Any]

FLOAT8_TOLERANCE = 2**-4 + 2e-2  # half a unit of its last place, and what was rounded before
NUM_PARTS = 4  # of an update
EPS = 1e-6


def check_layer(spec: ArgSpec, backend: str, *, runs: int, interpret: bool = False) -> list[Check]:
    """Checks both ops, as far as the backend has them."""
    has = BACKEND_OF_NAME[backend]
    checks = []
    if backend == "xla" or has.rotate_and_store is not None:
        checks.append(guarded("rotate_and_store", _check_rotate, spec, backend, runs, interpret))
    if backend == "xla" or has.add_and_norm is not None:
        checks.append(guarded("add_and_norm", _check_add, spec, backend, runs, interpret))
    return checks


def guarded(op: str, check: Callable[..., Check], spec: ArgSpec, backend: str, runs: int, interpret: bool) -> Check:
    """The outcome of a check of one kernel, or why the kernel was not checked."""
    try:
        return check(spec, backend, runs, interpret)
    except ValueError as error:
        return Check(op, backend, spec.name, REFUSED, note=str(error))
    except Exception as error:  # compilers and drivers raise errors of any class
        return Check(op, backend, spec.name, CRASHED, note=f"{type(error).__name__}: {error}"[:300])


def _check_rotate(spec: ArgSpec, backend: str, runs: int, interpret: bool) -> Check:
    """Slots are all different; the pages hold numbers everywhere, which must stay where no token is stored."""
    rng = np.random.default_rng(1)
    shapes: Any = spec.rotate_and_store_args()[:2]
    kv, qkv = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), jnp.float32).astype(a.dtype), shapes)
    angles = rng.uniform(0, 2 * np.pi, qkv.cos.shape)
    qkv = dataclasses.replace(
        qkv, cos=jnp.asarray(np.cos(angles), jnp.float32), sin=jnp.asarray(np.sin(angles), jnp.float32)
    )
    kv = dataclasses.replace(kv, **spec.scales)
    slots = rng.permutation(spec.num_pages * spec.page_size)[: spec.num_tokens]
    call = jax.jit(functools.partial(rotate_and_store, backend=backend, interpret=interpret))

    def run() -> list[jax.Array]:
        q, stored = call(qkv, kv, jnp.asarray(slots, jnp.int32))
        return [q, stored.k, stored.v]

    tolerance = TOLERANCE[jnp.dtype(spec.dtype).name]
    of_pages = FLOAT8_TOLERANCE if kv.dtype == FLOAT8 else tolerance
    return judge(
        "rotate_and_store", spec, backend, runs, run, _rotated(qkv, kv, slots), [tolerance, of_pages, of_pages]
    )


def _rotated(qkv: FusedQkv, kv: PagedKv, slots: Array) -> list[Array]:
    product, bias, q_norm, k_norm, cos, sin = (
        np.asarray(a, np.float64) for a in (qkv.product, qkv.bias, qkv.q_norm, qkv.k_norm, qkv.cos, qkv.sin)
    )
    rows = product + bias[qkv.layer]

    def turned(heads: Array, scales: Array) -> Array:
        normed = normalized(heads, scales[qkv.layer], qkv.eps)
        halves = np.split(normed, 2, axis=-1)
        numbers = (halves[0] + 1j * halves[1]) * (cos + 1j * sin)[:, :, None]
        return np.concatenate([numbers.real, numbers.imag], axis=-1)

    queries = _widened(turned(rows[:, :, :-2], q_norm).reshape(len(rows), -1, rows.shape[-1]), kv)
    pages = []
    for old, new, scale in (
        (kv.k, turned(rows[:, :, -2:-1], k_norm)[:, :, 0], kv.k_scale),
        (kv.v, rows[:, :, -1], kv.v_scale),
    ):
        stored = np.asarray(old.astype(jnp.float32), np.float64)
        factor = np.broadcast_to(1.0 if scale is None else np.asarray(scale, np.float64), kv.num_kv_heads)[:, None]
        largest = 448 if kv.dtype == FLOAT8 else np.inf
        stored[slots // kv.page_size, :, slots % kv.page_size] = np.clip(_widened(new, kv) / factor, -largest, largest)
        pages.append(stored)
    return [queries, *pages]


def _widened(heads: Array, kv: PagedKv) -> Array:
    """Heads with zeros up to the width of the cache's."""
    return np.pad(heads, ((0, 0), (0, 0), (0, kv.head_dim - heads.shape[-1])))


def _check_add(spec: ArgSpec, backend: str, runs: int, interpret: bool) -> Check:
    rng = np.random.default_rng(2)
    size = spec.num_kv_heads * spec.num_groups * spec.head_dim
    update = jnp.asarray(rng.normal(size=(NUM_PARTS, spec.num_tokens, size)), jnp.float32)
    x, scales = (jnp.asarray(rng.normal(size=(rows, size)), spec.dtype) for rows in (spec.num_tokens, 3))
    jitted = jax.jit(
        lambda x, update, scales: add_and_norm(x, update, scales, 1, EPS, backend=backend, interpret=interpret)
    )

    def run() -> list[jax.Array]:
        return list(jitted(x, update, scales))

    total = np.asarray(x, np.float64) + np.asarray(update, np.float64).sum(axis=0)
    right = [total, normalized(total, np.asarray(scales, np.float64)[1], EPS)]
    return judge("add_and_norm", spec, backend, runs, run, right, [TOLERANCE[jnp.dtype(spec.dtype).name]] * 2)


def normalized(x: Array, scale: Array, eps: float) -> Array:
    """RMSNorm."""
    normed: Array = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale
    return normed


def judge(
    op: str, spec: ArgSpec, backend: str, runs: int, run: Callable[[], list[jax.Array]], right: list[Array],
    tolerances: list[float],
) -> Check:  # fmt: skip
    """The largest errors, relative to the largest number of an output; equal numbers in every run."""
    first = run()
    errors = [
        float(np.abs(np.asarray(actual.astype(jnp.float32)) - wanted).max() / np.abs(wanted).max())
        for actual, wanted in zip(first, right, strict=True)
    ]
    moved = any(bool((a != b).any()) for _ in range(runs - 1) for a, b in zip(first, run(), strict=True))
    wrong = [
        f"output {i}: error {error:.1e}, allowed {tolerance:.0e}"
        for i, (error, tolerance) in enumerate(zip(errors, tolerances, strict=True))
        if not error <= tolerance  # NaN fails
    ]
    wrong += ["moved between runs"] if moved else []
    return Check(op, backend, spec.name, FAILED if wrong else PASSED, max(errors), None, float(moved), "; ".join(wrong))
