"""Client libraries, as they are published, get what they ask for from a server of the bundled model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.clients import run
from tests.end_to_end.servers import COMMON_FLAGS
from tests.grids import NIGHTLY

pytestmark = pytest.mark.skipif(not NIGHTLY, reason="their packages are installed by night")


@pytest.fixture(scope="module")
def server() -> Iterator[run.Server]:
    with run.server(COMMON_FLAGS) as server:
        yield server


@pytest.mark.timeout(3600)  # installs them, the first time
@pytest.mark.parametrize("name", run.NAMES)
def test_every_case_of_a_client_passes(server: run.Server, name: str) -> None:
    if name in run.OF_NODE and shutil.which("npm") is None:
        pytest.skip("there is no npm")
    found = run.outcomes(name, server)
    assert found and not any(found.values()), run.row(name, found)
