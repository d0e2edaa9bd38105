"""Traces of device and host, as JAX's profiler records them. Called by `engine` for operators' orders."""

from __future__ import annotations

import contextlib
import ctypes
import tempfile
from pathlib import Path

import jax

from pallas_kernels.jax_internals import drop_trace


def start(folder: str) -> None:
    """Starts to record a trace of device and host, readable in TensorBoard, XProf and Perfetto.

    A process records one trace at a time. Makes `folder`; raises OSError or ValueError at once if it can't be
    written, where JAX would find out only when it writes the trace. Python's functions are left out: tracing them
    takes more time and memory than all the rest.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    jax.profiler.start_trace(folder, profiler_options=options)


def stop() -> None:
    """Writes the trace to `plugins/profile/<time>/` in the folder. Raises RuntimeError if that fails.

    The trace is dropped then. JAX would keep it in memory and record no other one.
    """
    try:
        jax.profiler.stop_trace()
    except Exception:
        drop_trace()
        raise
    finally:
        _return_free_memory()


def _return_free_memory() -> None:
    """Has glibc return to the system what writing a trace has freed, hundreds of megabytes; it would keep them."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
