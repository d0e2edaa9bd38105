"""Count what a new feature has to pass: branches on optional parts, counters and registries of the same kind, circles.

    python scripts/check seams                    # of this tree
    python scripts/check seams --tree ../before   # of another one

Reads the files of a tree and imports none of them.

- A branch on an optional part is, in jaxsgl/scheduler, a comparison `X is None` or `X is not None` outside `assert`, or
  a test of X alone (`if X`, `not X`, `X and ...`), where the last name of X is one of PARTS, with or without an
  underscore before it. HELD has the same for what single requests and steps may have. Both lists name the parts that
  there are: a part that gets another name, or a new one, must be added here.
- A counter of engine operations is an attribute for their numbers: a name of COUNTERS that starts at 0 or as
  `itertools.count()`, in jaxsgl.
- A registry of compiled programs is a file of jaxsgl/engine that lowers programs (`X.lower()`).
- Circles of imports are groups of modules of jaxsgl and pallas_kernels that import each other.
- Words are those of docs/ without docs/notes, and of the pages on top but the changelog, as `wc -w` counts them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.imports import circles, import_graph
from bench.output import figure_parser, write_figures
from bench.processes import ROOT

PARTS = {
    "adapters", "ahead", "copies", "grammars", "host_tier", "image_rows", "images", "kept_images", "latency", "loads",
    "tier",
}  # fmt: skip
HELD = {"adapter", "kept", "loading", "media", "pooled", "sliced", "states"}
COUNTERS = re.compile(r"_?(num_ops|op_ids?|num_operations|next_op)")
SMALL, LARGE = 60, 600  # lines of a file


def main(arguments: list[str]) -> None:
    """Prints the figures of a tree."""
    parser = figure_parser(__doc__, __name__)
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="FOLDER", help="the checkout (default: this one)")
    options = parser.parse_args(arguments)
    found = count(options.tree.resolve())
    for name, figure in found.items():
        of_files = figure if isinstance(figure, dict) else {}
        print(f"{name:<44} {sum(of_files.values()) if isinstance(figure, dict) else figure}")
        for file, number in sorted(of_files.items(), key=lambda item: (-item[1], item[0])):
            print(f"    {file:<40} {number}")
    write_figures(options.json, figures=found)


def count(tree: Path) -> dict[str, int | str | dict[str, int]]:
    """All figures by name; those by file have the number of each file that has any."""
    package = tree / "jaxsgl"
    lines = {path: len(path.read_text().splitlines()) for path in package.rglob("*.py")}
    commands = [*(tree / "scripts").glob("*.py"), *(tree / "scripts").glob("*/__main__.py")]
    pages = {*tree.glob("*.md"), *(tree / "docs").rglob("*.md")} - {
        *(tree / "docs/notes").glob("*"),
        tree / "CHANGELOG.md",
    }
    return {
        "branches on optional parts": _by_file(tree, "scheduler", lambda node: branches(node, PARTS)),
        "branches on what a request or step may have": _by_file(tree, "scheduler", lambda node: branches(node, HELD)),
        "counters of engine operations": _by_file(tree, "", counters),
        "registries of compiled programs": {
            file: 1 for file, number in _by_file(tree, "engine", lowerings).items() if number
        },
        "circles of imports": {" - ".join(group): 1 for group in circles(import_graph(tree))},
        "files in jaxsgl": len(lines),
        "lines in jaxsgl": sum(lines.values()),
        f"files of more than {LARGE} lines": sum(number > LARGE for number in lines.values()),
        f"files of less than {SMALL} lines": sum(number < SMALL for number in lines.values()),
        "words of docs without notes": {
            str(page.relative_to(tree)): len(page.read_text().split()) for page in sorted(pages)
        },
        "commands on top of scripts": len(commands),
    }


def _by_file(tree: Path, folder: str, find: Callable[[ast.AST], Iterator[ast.AST]]) -> dict[str, int]:
    """How much `find` yields in each file of a folder of jaxsgl that has any."""
    paths = sorted((tree / "jaxsgl" / folder).rglob("*.py"))
    found = {str(path.relative_to(tree)): len(list(find(ast.parse(path.read_text())))) for path in paths}
    return {file: number for file, number in found.items() if number}


def branches(tree: ast.AST, parts: set[str]) -> Iterator[ast.AST]:
    """The tests of the named parts, see above."""
    asserted = {id(child) for node in ast.walk(tree) if isinstance(node, ast.Assert) for child in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) not in asserted:
            yield from (tested for tested in _tested(node) if _last_name(tested).removeprefix("_") in parts)


def _tested(node: ast.AST) -> Iterator[ast.expr]:
    """What `node` compares with None, or tests by itself."""
    match node:
        case ast.Compare(left, [ast.Is() | ast.IsNot()], [ast.Constant(None)]):
            yield left
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) | ast.UnaryOp(ast.Not(), test):
            yield test
        case ast.comprehension(ifs=tests) | ast.BoolOp(values=tests):
            yield from tests


def _last_name(expression: ast.expr) -> str:
    match expression:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
        case ast.NamedExpr(value=value):
            return _last_name(value)
    return ""


def counters(tree: ast.AST) -> Iterator[ast.AST]:
    """Assignments of a first number to a counter of operations."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign([target], value) | ast.AnnAssign(target, _, ast.expr() as value):
                starts = isinstance(value, ast.Constant) and value.value == 0
                counts = isinstance(value, ast.Call) and ast.unparse(value.func) in ("itertools.count", "count")
                if (starts or counts) and COUNTERS.fullmatch(_last_name(target)):
                    yield node


def lowerings(tree: ast.AST) -> Iterator[ast.AST]:
    """Calls of `X.lower()`; the engine has no text to put in lower case."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(attr="lower")):
                yield node
