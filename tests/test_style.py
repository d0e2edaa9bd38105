from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_ci_runs_the_commands_of_the_readme_and_a_slice_of_the_night_last() -> None:
    section = (ROOT / "README.md").read_text().partition("\n## Test\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    readme = [command for line in "".join(blocks).splitlines() for command in line.split(" && ")]
    lines = re.sub(r"^timeout -k \d+ \d+ ", "", (ROOT / ".ci/run").read_text(), flags=re.MULTILINE).splitlines()
    ci = [command for line in lines for command in line.split(" && ")]
    assert len(readme) >= 6 and set(readme) <= set(ci)
    assert "pytest" in readme[2] and readme[2] == ci[-2]
    assert ci[-1].startswith(f"{readme[2]} --nightly-slice")


@pytest.mark.parametrize("package", ["jaxsgl", "pallas_kernels"])
def test_a_wheel_holds_all_that_is_not_python(package: str) -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][package]
    packed = {path for pattern in patterns for path in (ROOT / package).glob(pattern)}
    files = {path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in files if path.suffix not in (".py", ".pyi")} == packed
