"""The process that tests kernels, one of which fails on purpose: `python -m ... HOW COUNTER [OP]`.

OP is an extend in C++ unless it is "quantized_product", on Triton. HOW is "wrong", "raises", "crashes", "hangs" or
"right". Appends a line to the file COUNTER, so that a test can count the processes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.backend import Kernel
from pallas_kernels.dispatch import BACKEND_OF_NAME
from pallas_kernels.selftest import __main__ as child
from pallas_kernels.selftest import cases
from pallas_kernels.selftest.case import Case
from pallas_kernels.selftest.shapes import KernelShapes

HOW, COUNTER, OP = sys.argv[1], Path(sys.argv[2]), (*sys.argv[3:], "paged_extend_attention")[0]
NATIVE, TRITON, REFERENCE = (BACKEND_OF_NAME[name] for name in ("native", "triton", "reference"))


def fail() -> None:
    """Doesn't return, unless the kernel is to be right or wrong."""
    if HOW == "raises":
        raise RuntimeError("no such instruction")
    if HOW == "crashes":
        ctypes.string_at(0)
    while HOW == "hangs":
        time.sleep(1)


def extend(q: Any, offsets: Any, *rest: Any) -> Any:
    """As Hopper's was: queries are zeros where a sequence's first token stands at no multiple of 8."""
    fail()
    owners = jnp.searchsorted(offsets, jnp.arange(len(q)), side="right") - 1
    clipped = (offsets[owners] % 8 != 0) & (HOW == "wrong")
    return NATIVE.extend.run(jnp.where(clipped[:, None, None], 0, q), offsets, *rest)


def product(x: Any, weights: Any, *rest: Any) -> Any:
    """Takes the first scale of an output for those of all groups."""
    fail()
    assert REFERENCE.quantized_product is not None
    scale = weights.scale
    spoiled = dataclasses.replace(weights, scale=jnp.broadcast_to(scale[:, :1], scale.shape))
    return REFERENCE.quantized_product.run(x, spoiled if HOW == "wrong" else weights, *rest)


def plant() -> None:
    """Replaces the kernel, and leaves the first case of the operation."""
    if OP == "quantized_product":
        changes: dict[str, Any] = {OP: Kernel(product), "platform": None}
        BACKEND_OF_NAME["triton"] = dataclasses.replace(TRITON, **changes)  # type: ignore[index]
        tuning.preferred_backends = lambda op: ["triton"]
    else:
        changes = {"extend": Kernel[Any](extend, NATIVE.extend.refuse)}
        BACKEND_OF_NAME["native"] = dataclasses.replace(NATIVE, **changes)  # type: ignore[index]
    make = cases.CASES_OF[OP]

    def first(shapes: KernelShapes) -> Iterator[Case]:
        return itertools.islice(make(shapes), 1)

    cases.CASES_OF = {OP: first}


if __name__ == "__main__":
    with COUNTER.open("a") as file:
        file.write(HOW + "\n")
    plant()
    child.main()
