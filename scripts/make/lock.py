"""Write the versions that the tests run with, as constraints for pip: requirements-test.lock.

    python scripts/make lock                # resolves pyproject.toml for Python 3.11, 3.12 and 3.13, as far as found
    pip install -e '.[test]' -c requirements-test.lock

Asks pip of each Python what it would install; installs nothing. A version that differs between Pythons gets a line for
each. `--check` compares the file with pyproject.toml instead, without a network: each direct requirement of the tests
must be in it, in a version that pyproject.toml allows.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from bench.output import command_parser
from bench.processes import ROOT
from bench.targets.targets import find_python
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

LOCK = ROOT / "requirements-test.lock"
MINORS = (11, 12, 13)
HEAD = "# Constraints for pip, written by scripts/make lock: the versions that the tests run with.\n"

Versions: TypeAlias = dict[str, str]  # of each package


def main(arguments: list[str]) -> int:
    """Writes the file, or checks it; returns the exit status."""
    parser = command_parser(__doc__, __name__)
    parser.add_argument("--check", action="store_true", help="compare the file with pyproject.toml, without a network")
    if parser.parse_args(arguments).check:
        problems = list(problems_of(LOCK.read_text(), direct_requirements()))
        print("\n".join(problems) or f"{LOCK.name} has all direct requirements")
        return int(bool(problems))
    found = {}
    for minor in MINORS:
        python = find_python((3, minor), newest=minor)
        if python is None:
            print(f"there is no Python 3.{minor} here: its versions are not looked up", file=sys.stderr)
        else:
            found[minor] = resolve(python)
            print(f"Python 3.{minor}: {len(found[minor])} packages", file=sys.stderr)
    LOCK.write_text(HEAD + "".join(f"{line}\n" for line in lines_of(found)))
    return 0


def resolve(python: str) -> Versions:
    """What pip of that Python would install for the tests, except this project."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        report = Path(folder) / "report.json"
        command = [f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "--dry-run", "--report", str(report)]
        subprocess.run([*command, f"{ROOT}[test]"], check=True)
        installs: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    packages = [install["metadata"] for install in installs]
    return {
        canonicalize_name(package["name"]): Version(package["version"]).public  # the same for all kinds of hardware
        for package in packages
        if package["name"] != "jaxsgl"
    }


def lines_of(found: Mapping[int, Versions]) -> Iterator[str]:
    """The constraints, in order of names, from the versions of each minor version of Python."""
    for name in sorted(set().union(*found.values())):
        minors = defaultdict(list)
        for minor, versions in found.items():
            minors[versions.get(name)].append(minor)
        if len(minors) == 1:
            yield f"{name}=={next(iter(minors))}"
            continue
        for version, which in sorted(minors.items(), key=lambda item: item[1]):
            if version is not None:
                yield f"{name}=={version} ; " + " or ".join(f'python_version == "3.{minor}"' for minor in which)


def direct_requirements() -> list[Requirement]:
    """Those that pyproject.toml names for use and tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["test"])]


def problems_of(lock: str, direct: list[Requirement]) -> Iterator[str]:
    """What is wrong with the text of a lock file, for each direct requirement."""
    constraints = defaultdict(list)
    for line in lock.splitlines():
        if line and not line.startswith("#"):
            constraint = Requirement(line)
            constraints[canonicalize_name(constraint.name)].append(constraint)
    for wanted in direct:
        locked = constraints[canonicalize_name(wanted.name)]
        if not locked:
            yield f"{wanted.name} is missing: run scripts/make lock"
        for constraint in locked:
            (version,) = (spec.version for spec in constraint.specifier)
            if version not in wanted.specifier:
                yield f"{constraint} is not what pyproject.toml allows ({wanted}): run scripts/make lock"
