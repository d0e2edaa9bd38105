"""The command line and the JSON file of a benchmark. Imports nothing but the standard library."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def command_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with `doc`, the docstring of the script, line by line as it stands."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def command_line() -> str:
    """The command that runs now, for the JSON file."""
    return " ".join(["python", *sys.argv])


def write_json(path: str | Path, value: object, default: Callable[[Any], Any] | None = None) -> None:
    """Writes `value` to `path`; `default` converts what JSON doesn't have, see `json.dumps`."""
    Path(path).write_text(json.dumps(value, indent=1, default=default) + "\n")
