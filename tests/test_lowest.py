"""The lowest versions that pyproject.toml allows work together: they install, and tests pass with them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from bench.targets.targets import find_python
from packaging.requirements import Requirement

from tests.grids import NIGHTLY
from tests.kept import environment
from tests.pallas_kernels.elsewhere import run

pytestmark = pytest.mark.foreign

ROOT = Path(__file__).parents[1]
OLDEST_MINOR = 11  # the lowest versions have no wheels for newer Pythons
# Of the packages that only tests need, those of the tests that run here.
TEST_PACKAGES = {"hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "httpx", "tiktoken"}
# The front end through HTTP and gRPC; the engine and its kernels are behind the line in ONE_ANSWER.
SERVER_TESTS = ("tests/frontend/test_service.py", "tests/frontend/test_sglang_http.py")
ONE_ANSWER = """
import jaxsgl
llm = jaxsgl.LLM(context_length=64, max_running_requests=1, decode_buckets=(1,), extend_buckets=(64,))
assert llm.generate("3 + 4 =", jaxsgl.SamplingParams(max_tokens=4))[0].token_ids
"""


def lowest() -> list[str]:
    """Each requirement with its lower bound as the version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(text) for text in project["dependencies"]]
    for_tests = map(Requirement, project["optional-dependencies"]["test"])
    needed += [requirement for requirement in for_tests if requirement.name in TEST_PACKAGES]
    bounds = {each.name: [spec.version for spec in each.specifier if spec.operator == ">="] for each in needed}
    assert all(len(bound) == 1 for bound in bounds.values()), f"each requirement needs one lower bound: {bounds}"
    return [f"{name}=={bound[0]}" for name, bound in bounds.items()]


def test_every_requirement_has_a_lower_bound() -> None:
    assert len(lowest()) > 20


@pytest.mark.skipif(not NIGHTLY, reason="installs an environment of its own")
@pytest.mark.timeout(1800)
def test_unit_tests_a_server_and_offline_use_work_with_the_lowest_versions() -> None:
    python = find_python((3, OLDEST_MINOR), newest=OLDEST_MINOR)
    if python is None:
        pytest.skip(f"there is no Python 3.{OLDEST_MINOR}")
    mine = environment(python, *lowest())
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default")  # old versions warn of later changes
    for command in ([*tests, "-m", "unit"], [*tests, *SERVER_TESTS], ["-c", ONE_ANSWER]):
        run([mine, *command], PYTHONPATH=str(ROOT), JAXSGL_TEST_NIGHTLY="")
