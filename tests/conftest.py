"""Order: what is fast and finds most runs first; whole servers run last."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

_CACHE = tempfile.TemporaryDirectory(prefix="jaxsgl-tests-")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on a hub
signal.signal(signal.SIGINT, signal.default_int_handler)  # programs under test inherit it, were it ignored
os.environ["XDG_CACHE_HOME"] = _CACHE.name  # compiled programs are shared by the tests of one run, and by nobody else

ROOT = Path(__file__).parent
LAST_OF_KERNELS = ("test_lowering", "test_compile_targets")  # begun with the first: see pallas_kernels/elsewhere.py
ORDER = (
    "test_style",
    "cache",
    "batch",
    "scheduler",
    "",
    "pallas_kernels",
    "models",
    "weights",
    *LAST_OF_KERNELS,
    "engine",
    "frontend",
    "end_to_end",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        first = item.path.relative_to(ROOT).parts[0].removesuffix(".py")
        if item.path.stem in LAST_OF_KERNELS:
            first = item.path.stem
        return ORDER.index(first) if first in ORDER else ORDER.index("")

    items.sort(key=rank)
