"""Compares results of several programs with an exact one; if one is off, says which, where, and whether it stays off.

A wrong number that is right when it is computed again leaves no other trace than this report.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from tests.floating_point import controls_of_all

AGAIN = 2


def check_agreement(
    sides: Mapping[str, Callable[[], np.ndarray]], exact: np.ndarray, atol: float, context: str = ""
) -> None:
    """Fails with a report unless every side's result is `exact [rows, columns]` within `atol`.

    Args:
      sides: what computes each result; it is called again only if one of them is off.
      context: more to report, such as versions and numbers of threads.
    """
    first = {name: np.array(compute()) for name, compute in sides.items()}
    if all(_is_near(result, exact, atol) for result in first.values()):
        return
    floating_point = controls_of_all()  # before anything else runs on the threads
    lines = []
    for name, compute in sides.items():
        lines.append(f"{name}: {_describe(first[name], exact, atol)}")
        for i in range(AGAIN):
            again = np.array(compute())
            lines.append(f"  computed again ({i + 1}): {_describe(again, exact, atol)}; {_bits(first[name], again)}")
    lines += [f"{where}: {', '.join(found) or 'not reached'}" for where, found in floating_point.items()]
    lines += [f"processor: {_processor()}", *([context] if context else [])]
    raise AssertionError("results are not those of float64\n" + "\n".join(lines))


def _is_near(result: np.ndarray, exact: np.ndarray, atol: float) -> bool:
    return result.shape == exact.shape and bool((np.abs(result - exact) <= atol).all())


def _describe(result: np.ndarray, exact: np.ndarray, atol: float) -> str:
    if result.shape != exact.shape:
        return f"WRONG, shape {result.shape} instead of {exact.shape}"
    error = np.abs(result - exact)
    off = ~(error <= atol)  # NaN is off too
    if not off.any():
        return f"right, off by {error.max():.2g} at most"
    rows, columns = off.any(axis=1), off.any(axis=0)
    return (
        f"WRONG by up to {error.max():.3g} in rows {_spans(rows)} of {len(rows)} and columns {_spans(columns)} of "
        f"{len(columns)}; elsewhere off by {error[~off].max(initial=0):.2g} at most"
    )


def _bits(first: np.ndarray, again: np.ndarray) -> str:
    if first.tobytes() == again.tobytes():
        return "the same bits as the first time"
    differs = first.view(np.uint8).reshape(*first.shape, -1) != again.view(np.uint8).reshape(*again.shape, -1)
    return f"other bits than the first time in rows {_spans(differs.any(axis=(1, 2)))}"


def _spans(which: np.ndarray) -> str:
    """Where `which` is True, as `3, 150..299`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], which, [False]]).astype(np.int8)))
    spans = [f"{a}" if a == b - 1 else f"{a}..{b - 1}" for a, b in edges.reshape(-1, 2)]
    return ", ".join(spans[:8] + (["and more"] if len(spans) > 8 else []))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
