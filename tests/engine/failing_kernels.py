"""The process that tests kernels, with an extend in C++ that fails on purpose: `python -m ... HOW COUNTER`.

HOW is "wrong", "raises", "crashes", "hangs" or "right". Appends a line to the file COUNTER, so that a test can count
the processes.
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

from pallas_kernels.dispatch import BACKEND_OF_NAME
from pallas_kernels.selftest import __main__ as child
from pallas_kernels.selftest import cases
from pallas_kernels.selftest.shapes import KernelShapes

HOW, COUNTER = sys.argv[1], Path(sys.argv[2])
NATIVE = BACKEND_OF_NAME["native"]


def extend(q: Any, offsets: Any, *rest: Any) -> Any:
    """As Hopper's was: queries are zeros where a sequence's first token stands at no multiple of 8."""
    if HOW == "raises":
        raise RuntimeError("no such instruction")
    if HOW == "crashes":
        ctypes.string_at(0)
    while HOW == "hangs":
        time.sleep(1)
    owners = jnp.searchsorted(offsets, jnp.arange(len(q)), side="right") - 1
    clipped = (offsets[owners] % 8 != 0) & (HOW == "wrong")
    return NATIVE.extend(jnp.where(clipped[:, None, None], 0, q), offsets, *rest)


def one_extend(shapes: KernelShapes) -> Iterator[cases.Case]:
    return itertools.islice(cases.extend_cases(shapes), 1)


if __name__ == "__main__":
    with COUNTER.open("a") as file:
        file.write(HOW + "\n")
    changes: dict[str, Any] = {"extend": extend}
    BACKEND_OF_NAME["native"] = dataclasses.replace(NATIVE, **changes)  # type: ignore[index]
    cases.CASES_OF = {"paged_extend_attention": one_extend}
    child.main()
