"""The server and the model that several files share; tests/tiers.py keeps such files on one worker."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.end_to_end.precision import EXACT
from tests.end_to_end.servers import COMMON_FLAGS, RunningServer, check_log, running_server
from tests.grids import NIGHTLY

if TYPE_CHECKING:
    from jaxsgl.offline.llm import LLM

BUNDLED_CHUNK = 128  # tokens


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of the bundled model with `COMMON_FLAGS`, which calls tools. Tests leave nothing of theirs in it."""
    folder = tmp_path_factory.mktemp("server")
    with running_server(folder, (*COMMON_FLAGS, "--tool-call-parser", "hermes")) as server:
        yield server
        check_log(server)


@pytest.fixture(scope="session")
def bundled() -> Iterator[LLM]:
    """The bundled model, offline."""
    llm = bundled_model(EXACT)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def greedy_steps_by_day() -> Iterator[None]:
    """Engines of this process compile greedy steps alone, unless it is night: for files whose requests are greedy."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not NIGHTLY:
            from tests.engine.driving import greedy_programs  # imports JAX

            greedy_programs(monkeypatch)
        yield


def bundled_model(dtype: str) -> LLM:
    from jaxsgl.offline.llm import LLM  # imports JAX

    return LLM(
        dtype=dtype,
        max_running_requests=16,
        decode_buckets=(16,),
        extend_buckets=(BUNDLED_CHUNK,),
        chunked_prefill_size=BUNDLED_CHUNK,
        max_queued_requests=1,
    )
