"""Traces of device and host by JAX's profiler, readable in TensorBoard, XProf and Perfetto. Called by `engine`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax


def start(folder: str) -> None:
    """Starts to record; one trace at a time in a process.

    Makes `folder`, and raises OSError or ValueError at once if it can't be written: JAX would find out at the end only.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
    jax.profiler.start_trace(folder)


def stop() -> None:
    """Writes the trace to `plugins/profile/<time>/` in the folder. Raises RuntimeError if that fails."""
    jax.profiler.stop_trace()
