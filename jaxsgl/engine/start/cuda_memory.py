"""A GPU's memory as its driver tells it, where JAX's allocator keeps no account (XLA_PYTHON_CLIENT_ALLOCATOR=platform).

Calls libcuda by ctypes. Called by `memory` alone.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import NamedTuple

LIBRARY = "libcuda.so.1"


class DriverMemory(NamedTuple):
    """Bytes of one GPU."""

    free: int
    total: int


class _Failed(Exception):
    """A call of the driver returned an error."""


def driver_memory(ordinal: int) -> DriverMemory | None:
    """The memory of the GPU that CUDA numbers so in this process; None: the driver can't be asked."""
    try:
        cuda = ctypes.CDLL(LIBRARY)
        _check(cuda.cuInit(0))
        with _context(cuda, ordinal):
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            _check(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
    except (OSError, AttributeError, _Failed):
        return None
    return DriverMemory(free.value, total.value)


@contextlib.contextmanager
def _context(cuda: ctypes.CDLL, ordinal: int) -> Iterator[None]:
    """The context that JAX has on the GPU, current in this thread as long as the block runs."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check(cuda.cuDeviceGet(ctypes.byref(device), ordinal))
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    try:
        _check(cuda.cuCtxPushCurrent_v2(context))
        try:
            yield
        finally:
            cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(device)


def _check(status: int) -> None:
    if status:
        raise _Failed
