"""Which modules of a tree import which, and in which circles. Reads the files, imports none of them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

PACKAGES = ("jaxsgl", "pallas_kernels")


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file, which is read once."""
    return ast.parse(path.read_text())


def module_of(path: Path, root: Path) -> str:
    """The name of the module in the file `path` of the tree `root`."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(path: Path, root: Path, modules: Set[str]) -> set[str]:
    """Of `modules` those that a file imports, also under TYPE_CHECKING and in functions.

    A package whose module is imported from it isn't among them.
    """
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & modules) or {node.module}
    return found & modules - {module_of(path, root)}


def import_graph(root: Path) -> dict[str, set[str]]:
    """For each module of the tree's packages, the modules of them that it imports."""
    paths = {module_of(path, root): path for package in PACKAGES for path in (root / package).rglob("*.py")}
    return {name: imported_modules(path, root, paths.keys()) for name, path in paths.items()}


def circles(graph: Mapping[str, Set[str]]) -> list[list[str]]:
    """Groups of modules that all import each other, directly or through others of the group."""
    reached = {name: set(_reached(graph, name)) for name in graph}
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted(sorted(group) for group in groups if group)


def _reached(graph: Mapping[str, Set[str]], start: str) -> Iterator[str]:
    """Modules that `start` imports, directly or through others; `start` only if it is in a circle."""
    known: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in known:
            known.add(name)
            waiting += graph[name]
            yield name
