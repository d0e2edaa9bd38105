"""The command line and the JSON file of a benchmark. Help imports nothing but the standard library."""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def command_parser(doc: str | None, module: str | None = None) -> argparse.ArgumentParser:
    """A parser whose help begins with `doc`, the docstring of the command, line by line as it stands.

    `module` is the name of a module that `run_named` runs: `bench.figures.step` is `bench step` in the help.
    """
    prog = module and f"{module.partition('.')[0]} {module.rpartition('.')[2]}"
    return argparse.ArgumentParser(prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def figure_parser(doc: str | None, module: str) -> argparse.ArgumentParser:
    """The same with the flag `--json FILE`, for `write_figures`."""
    parser = command_parser(doc, module)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    return parser


def command_line() -> str:
    """The command that runs now, for the JSON file."""
    return " ".join(["python", *sys.argv])


def write_json(path: str | Path, value: object, default: Callable[[Any], Any] | None = None) -> None:
    """Writes `value` to `path`; `default` converts what JSON doesn't have, see `json.dumps`."""
    Path(path).write_text(json.dumps(value, indent=1, default=default) + "\n")


def write_figures(path: Path | None, **figures: object) -> None:
    """Writes the command that runs now and its figures to `path`, the file of `--json`, if there is one."""
    if path is not None:
        write_json(path, {"command": command_line(), **figures})


def run_named(package: str, doc: str | None, arguments: Sequence[str]) -> int:
    """Runs `main(arguments)` of the module of `package` that the first argument names; returns the exit status.

    Help is `doc` and a line for each module of the package, the first one of its docstring; it imports none of them. An
    error of the flags, the checkpoint or a file is one line.
    """
    modules = {path.stem: path for path in sorted(_folder_of(package).glob("*.py")) if not path.stem.startswith("_")}
    width = max(map(len, modules))
    lines = [f"  {name:<{width}}  {_first_line(path)}" for name, path in modules.items()]
    parser = argparse.ArgumentParser(
        package.partition(".")[0],
        usage="%(prog)s NAME [flags]; NAME --help shows its flags",
        description="\n".join([(doc or "").rstrip(), *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=modules, metavar="NAME", help="one of these")
    name = parser.parse_args(arguments[:1]).name
    tool = importlib.import_module(f"{package}.{name}")
    from jaxsgl.errors import JaxsglError  # help needs no package

    try:
        return tool.main(arguments[1:]) or 0
    except (JaxsglError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _folder_of(package: str) -> Path:
    (folder,) = importlib.import_module(package).__path__
    return Path(folder)


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
