"""Our backends as contenders, through the public functions of pallas_kernels only."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from bench.kernels.cases import DECODE, FUNCTIONS, STORE
from bench.kernels.inputs import Inputs
from bench.kernels.runners import Prepared
from pallas_kernels import BACKENDS

_NEEDS = {"native": "cpu", "triton": "gpu", "mosaic_gpu": "gpu", "mosaic_tpu": "tpu"}


class Unsupported(Exception):
    """A contender can't take a case; says why."""


def backends_for(platform: str) -> list[str]:
    """The backends that a platform ("cpu", "gpu", "tpu") can run, slow "reference" left out."""
    real = [name for name in BACKENDS if name not in ("auto", "reference")]
    return [name for name in real if _NEEDS.get(name, platform) == platform]


def prepare(backend: str, inputs: Inputs, *, interpret: bool = False) -> Prepared:
    """The op of the case on one backend.

    Raises:
        Unsupported: the backend refuses the shapes.
    """
    case = inputs.case
    op = functools.partial(FUNCTIONS[case.op], backend=backend, interpret=interpret, **case.options)
    if case.op == STORE:
        states: list[Any] = [(layer.k_pages, layer.v_pages) for layer in inputs.layers]
        own: list[tuple[jax.Array, ...]] = [(layer.k, layer.v) for layer in inputs.layers]
        prepared = Prepared(
            lambda cache, k, v, slots: (op(*cache, k, v, slots), None), states, own, (jnp.asarray(inputs.slots),)
        )
    else:
        tables = [inputs.page_table, inputs.lengths]
        if case.op != DECODE:
            tables.append(inputs.query_offsets)
        own = [(layer.q, layer.k_pages, layer.v_pages) for layer in inputs.layers]
        prepared = Prepared(lambda _, *args: (None, op(*args)), [None] * len(own), own, tuple(map(jnp.asarray, tables)))
    try:
        jax.eval_shape(prepared.call, prepared.states[0], *prepared.own[0], *prepared.shared)
    except ValueError as error:
        raise Unsupported(str(error)) from None
    return prepared
