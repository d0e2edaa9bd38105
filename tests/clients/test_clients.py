"""Client libraries, as they are published, get what they ask for from a server of the bundled model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients import run
from tests.grids import NIGHTLY

pytestmark = pytest.mark.skipif(not NIGHTLY, reason="their packages are installed by night")


@pytest.fixture(scope="module")
def python() -> str:
    return run.environment()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with run.server() as url:
        yield url


@pytest.mark.timeout(3600)  # installs them, the first time
@pytest.mark.parametrize("name", run.NAMES)
def test_every_case_of_a_client_passes(python: str, url: str, name: str) -> None:
    found = run.run(python, name, url)
    assert found and not any(found.values()), run.row(name, found)
