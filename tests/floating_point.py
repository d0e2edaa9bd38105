"""What threads' floating-point arithmetic depends on besides its inputs: rounding, denormals, precision.

Libraries may change it for a thread and not change it back; then every later result of that thread is a little off.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_RAISED_FLAGS = 0x3F  # which any operation may set


class Controls(NamedTuple):
    """Of the vector unit: MXCSR without the flags that operations raise. Of the x87 unit: its control word."""

    mxcsr: int
    x87: int

    def __str__(self) -> str:
        return f"MXCSR {self.mxcsr:#06x}, x87 {self.x87:#06x}"


def controls() -> Controls | None:
    """The calling thread's; None where they are others than an x86 processor's."""
    if platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        return None
    words = (ctypes.c_uint32 * 8)()  # glibc's fenv_t: the x87 unit's environment, then MXCSR
    _libm().fegetenv(words)
    return Controls(words[7] & ~_RAISED_FLAGS, words[0] & 0xFFFF)


def controls_of_all() -> dict[str, list[str]]:
    """Those of this thread, of torch's OpenMP threads and of XLA's, as far as each can be reached."""
    return {
        "this thread": [str(controls())],
        "OpenMP's threads": _on_openmp(),
        "XLA's threads": _on_xla(),
    }


def _libm() -> ctypes.CDLL:
    return ctypes.CDLL(ctypes.util.find_library("m"))


def _on_openmp() -> list[str]:
    import torch

    seen: dict[int, str] = {}

    def note(_: object) -> None:
        seen[threading.get_native_id()] = str(controls())

    path = Path(torch.__file__).parent / "lib" / "libgomp.so.1"
    if path.exists():  # the function that compilers call for a parallel region
        ctypes.CDLL(str(path)).GOMP_parallel(_callback(note), None, torch.get_num_threads(), 0)
    return list(seen.values())


def _callback(work: Callable[[object], None]) -> Callable[[object], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work)


def _on_xla() -> list[str]:
    import jax
    import jax.numpy as jnp

    seen: dict[int, str] = {}

    def note(x: jax.Array) -> jax.Array:
        seen[threading.get_native_id()] = str(controls())
        return x

    for _ in range(8):  # each may run on another thread
        jax.jit(lambda x: jax.pure_callback(note, x, x))(jnp.zeros(1)).block_until_ready()
    return list(seen.values())
