"""Which tier a test belongs to, and the order in which tiers and folders run. Used by conftest alone.

A folder gives its tests their tier. A file that differs says so itself, in one line at its top level:
`pytestmark = pytest.mark.unit`. Tiers are known without importing a test, so that `-m unit` never imports JAX.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

TESTS = Path(__file__).parent
TIERS = ("unit", "histories", "device", "server", "foreign")
WITHOUT_JAX = ("unit", "histories")
TIER_OF_FOLDER = {
    "": "unit",
    "batch": "unit",
    "cache": "unit",
    "constraints": "unit",
    "preprocess": "unit",
    "scheduler": "unit",
    "text": "unit",
    "transfer": "unit",
    "hosts": "unit",
    "engine": "device",
    "models": "device",
    "pallas_kernels": "device",
    "weights": "device",
    "attacks": "server",
    "clients": "server",
    "end_to_end": "server",
    "frontend": "server",
    "scripts": "server",
}
# Tests that are fast and find most run first. Long files come before short ones, so that parallel workers end together.
ORDER = (
    "unit",
    "histories",
    "foreign",
    "pallas_kernels",
    "end_to_end",
    "models",
    "weights",
    "engine",
    "scripts",
    "frontend",
)
# Files that share a server or a model (tests/end_to_end/conftest.py): one worker runs them, one after the other.
TOGETHER = {"tests/end_to_end/test_llm.py": "tests/end_to_end/test_bundled_model.py"} | {
    f"tests/end_to_end/test_{name}.py": "tests/end_to_end/test_apis.py"
    for name in ("clients_tools", "fuzz", "load", "serve")
}

_OWN_TIER = re.compile(rf"^pytestmark = .*\bpytest\.mark\.({'|'.join(TIERS)})\b", re.MULTILINE)


@functools.cache
def tier_of(path: Path) -> str:
    """The tier of all tests of a file.

    Raises:
      KeyError: the file stands in a folder without a tier.
    """
    own = _OWN_TIER.search(path.read_text())
    return own[1] if own else TIER_OF_FOLDER[_folder(path)]


def may_hold(path: Path, tier: str) -> bool:
    """Whether a file of tests is of that tier, or a folder has such a file; True for everything else."""
    if path.is_dir() and path.is_relative_to(TESTS):
        return any(tier_of(file) == tier for file in path.rglob("test_*.py"))
    return not path.match("test_*.py") or tier_of(path) == tier


def rank(path: Path) -> int:
    """The place of a file's tests in a run; lower ones run first."""
    names = (tier_of(path), _folder(path))
    return next((ORDER.index(name) for name in names if name in ORDER), len(ORDER))


def chosen_tier(expression: str) -> str | None:
    """The tier that `-m expression` asks for, if it is nothing but one tier's name."""
    return expression if expression in TIERS else None


def work_unit(nodeid: str) -> str:
    """The name of the tests that a parallel run keeps on one worker: those of a file, or of several together."""
    path = nodeid.split("::")[0]
    return TOGETHER.get(path, path)


def _folder(path: Path) -> str:
    parts = path.relative_to(TESTS).parts
    return parts[0] if len(parts) > 1 else ""
