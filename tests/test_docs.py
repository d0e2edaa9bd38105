"""Links and paths in README, CONTRIBUTING, CHANGELOG and docs/ resolve: files, headings, and paths in backticks."""

from __future__ import annotations

import ast
import contextlib
import fnmatch
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
CURRENT = [
    page for page in PAGES if "notes" not in page.parts and page.name != "CHANGELOG.md"
]  # dated pages may name files of their time, these only files of today
MOST_WORDS = 42_500  # of the current pages together, tables and commands included, as `wc -w` counts them
TOPS = ("jaxsgl", "pallas_kernels", "scripts", "tests", "docs", "benchmarks", ".ci")

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_TOP = "|".join(map(re.escape, TOPS))
_NAMED = re.compile(rf"`((?:{_TOP})/[^`\s]*|[\w*{{}},./<>-]+\.(?:py|cc|h|proto))(?:::\w+)?`")
_RUN = re.compile(r"\bpython (scripts/\w+\.py|scripts/(?:bench|check) \w+)")


def text_of(page: Path) -> str:
    """The page without its fenced code."""
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> Iterator[str]:
    """Targets of the page's links that stay in the repository."""
    yield from (target for target in _LINK.findall(text_of(page)) if "://" not in target)


def anchors(page: Path) -> set[str]:
    """Names by which the page's headings are linked to, as GitHub makes them."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(text_of(page))}


def broken_links(page: Path) -> list[str]:
    """Links whose file does not exist, or whose page has no such heading."""
    broken = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


def python_blocks(page: Path) -> Iterator[ast.Module]:
    """Fenced Python of the page, what of it is whole."""
    for block in _PYTHON.findall(page.read_text()):
        with contextlib.suppress(SyntaxError):
            yield ast.parse(block)


def _file_of(command: str) -> str:
    """The file of a script, or of a tool of the folders' commands, as `scripts/bench step`."""
    folder, _, name = command.partition(" ")
    return re.sub("bench$", "bench/figures", folder) + f"/{name}.py" if name else folder


def missing_paths(page: Path, paths: frozenset[str]) -> list[str]:
    """Files in backticks and scripts in commands that `paths` does not have; `*`, `<name>`, `{a,b}` stand for any text.

    A path may leave out the folders it begins with: `scheduler/req.py` is `jaxsgl/scheduler/req.py`.
    """
    missing = []
    for named in (*_NAMED.findall(text_of(page)), *map(_file_of, _RUN.findall(page.read_text()))):
        pattern = re.sub(r"<[^>]*>|\{[^}]*\}", "*", named.rstrip("/"))
        if not (fnmatch.filter(paths, pattern) or fnmatch.filter(paths, f"*/{pattern}")):
            missing.append(named)
    return missing


@pytest.fixture(scope="module")
def paths() -> frozenset[str]:
    """All files and folders of the repository that pages may name."""
    found = [path for top in TOPS for path in [ROOT / top, *(ROOT / top).rglob("*")]]
    return frozenset(path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert not broken_links(page)


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path, paths: frozenset[str]) -> None:
    assert not missing_paths(page, paths)


def test_pages_stay_short_enough_to_be_read() -> None:
    words = {str(page.relative_to(ROOT)): len(page.read_text().split()) for page in CURRENT}
    longest = sorted(words, key=words.__getitem__, reverse=True)[:5]
    assert sum(words.values()) < MOST_WORDS, f"cut, or move what was measured to docs/notes; the longest: {longest}"


def test_broken_links_and_missing_paths_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One page, two `words`\n[a](#one-page-two-words) [b](page.md) [c](#none) [d](gone.md) [e](https://x/y)\n"
        "```\n[f](gone.md)\npython scripts/gone.py --flag\n```\n"
        "python scripts/bench gone, python scripts/check kernels\n"
        "`jaxsgl/serve.py` `jaxsgl/gone.py` `tests/test_*.py` `bench/<name>.py` `gone.py` `x == y`"
    )
    assert broken_links(page) == ["#none", "gone.md"]
    found = frozenset({"jaxsgl/serve.py", "tests/test_docs.py", "scripts/bench/plot.py", "scripts/check/kernels.py"})
    assert missing_paths(page, found) == [
        "jaxsgl/gone.py",
        "gone.py",
        "scripts/gone.py",
        "scripts/bench/figures/gone.py",
    ]


def test_the_site_leads_to_every_page_but_dated_notes() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = set(re.findall(r"[\w./-]+\.md", nav))
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert listed == {page for page in pages if not page.startswith("notes/2")}


def test_snippets_import_the_configurations_that_they_make() -> None:
    for page in CURRENT:
        for block in python_blocks(page):
            nodes = list(ast.walk(block))
            used = {node.id for node in nodes if isinstance(node, ast.Name) and node.id.endswith("Config")}
            imported = {name.name for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names}
            assert used <= imported, f"{page.name}: {used - imported}"


def test_the_batch_of_the_page_goes_to_the_endpoint_that_its_snippet_names() -> None:
    page = ROOT / "docs" / "batch.md"
    lines = [json.loads(line) for line in page.read_text().splitlines() if line.startswith('{"custom_id"')]
    (endpoint,) = re.findall(r'endpoint="([^"]+)"', page.read_text())
    assert len(lines) > 1 and {line["url"] for line in lines} == {endpoint}
