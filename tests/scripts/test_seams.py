"""The figures of a tree's seams are those that one counts by hand."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from bench.imports import circles
from check import seams

FILES = {
    "jaxsgl/__init__.py": "",
    "jaxsgl/scheduler/plan.py": """
from jaxsgl.scheduler import images

class Planner:
    def __init__(self, images, tier=None):
        self.num_ops = 0
        self._images = images
        assert tier is not None

    def plan(self, req):
        if self._images is not None and not req.adapter:
            return 1 if req.tier is None else 2
        return [x for x in req.tokens if x is None]
""",
    "jaxsgl/scheduler/images.py": """
from __future__ import annotations
import itertools
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from jaxsgl.scheduler.plan import Planner
class Images:
    op_ids: itertools.count = itertools.count()
""",
    "jaxsgl/engine/programs.py": "def lowered(step):\n    return step.trace().lower()\n" + "\n" * 600,
    "pallas_kernels/__init__.py": "import jaxsgl",
    "README.md": "zero",
    "CHANGELOG.md": "six seven",
    "docs/page.md": "one two three",
    "docs/notes/old.md": "four five",
    "scripts/one.py": "",
    "scripts/check/__main__.py": "",
    "scripts/check/other.py": "",
}


def test_the_figures_of_a_small_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    seams.main(["--tree", str(tmp_path), "--json", str(tmp_path / "seams.json")])
    figures = json.loads((tmp_path / "seams.json").read_text())["figures"]
    assert figures == {
        "branches on optional parts": {"jaxsgl/scheduler/plan.py": 2},
        "branches on what a request or step may have": {"jaxsgl/scheduler/plan.py": 1},
        "counters of engine operations": {"jaxsgl/scheduler/images.py": 1, "jaxsgl/scheduler/plan.py": 1},
        "registries of compiled programs": {"jaxsgl/engine/programs.py": 1},
        "circles of imports": {"jaxsgl.scheduler.images - jaxsgl.scheduler.plan": 1},
        "files in jaxsgl": 4,
        "lines in jaxsgl": 623,
        "files of more than 600 lines": 1,
        "files of less than 60 lines": 3,
        "words of docs without notes": {"README.md": 1, "docs/page.md": 3},
        "commands on top of scripts": 2,
    }
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["branches", "on", "optional", "parts", "2"] in shown and ["jaxsgl/scheduler/images.py", "1"] in shown


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("x = 1 if images else 2", 1),
        ("while self._images: pass", 1),
        ("y = not images", 1),
        ("z = (a or images) and b", 1),
        ("[i for i in all if images]", 1),
        ("if (found := state.images) is not None: pass", 1),
        ("if images == 3: pass", 0),
        ("if image is None: pass", 0),
        ("if images.kept is None: pass", 0),
        ("assert images is not None", 0),
        ("f(images)", 0),
    ],
)
def test_a_branch_is_a_test_of_a_part_itself(code: str, number: int) -> None:
    assert len(list(seams.branches(ast.parse(code), {"images"}))) == number


def test_groups_that_import_each_other_are_found_and_what_leads_to_them_is_not() -> None:
    imports = {"a": "b", "b": "cd", "c": "b", "d": "e", "e": "", "f": "g", "g": "h", "h": "f"}
    graph = {name: set(others) for name, others in imports.items()}
    assert circles(graph) == [["b", "c"], ["f", "g", "h"]]
