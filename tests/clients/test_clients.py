"""Client libraries, as they are published, get what they ask for from a server of the bundled model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.run import NAMES, environment, row, run, server
from tests.end_to_end.servers import COMMON_FLAGS
from tests.grids import NIGHTLY


@pytest.fixture(scope="module")
def python() -> str:
    return environment()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server(COMMON_FLAGS) as url:
        yield url


@pytest.mark.timeout(3600)  # installs them, the first time
@pytest.mark.skipif(not NIGHTLY, reason="their packages are installed by night")
@pytest.mark.parametrize("name", NAMES)
def test_every_case_of_a_client_passes(python: str, url: str, name: str) -> None:
    found = run(python, name, url)
    assert found and not any(found.values()), row(name, found)
