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
ORDER = (
    "test_style",
    "cache",
    "batch",
    "scheduler",
    "",
    "pallas_kernels",
    "models",
    "weights",
    "test_lowering",  # these two began with the first of pallas_kernels: see elsewhere.py there
    "test_compile_targets",
    "engine",
    "frontend",
    "end_to_end",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        names = (item.path.stem, item.path.relative_to(ROOT).parts[0])
        return next((ORDER.index(name) for name in names if name in ORDER), ORDER.index(""))

    items.sort(key=rank)
