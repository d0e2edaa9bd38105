"""The environment of all tests, their tiers (see tiers.py), and how parallel runs share them among workers."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import compiling, nights, tiers
from tests.floating_point import controls
from tests.kept import Programs
from tests.sharing import pytest_xdist_make_scheduler
from tests.stuck import pytest_exception_interact, pytest_runtest_protocol

__all__ = [
    "pytest_exception_interact",
    "pytest_runtest_protocol",
    "pytest_xdist_make_scheduler",
]  # hooks, which pytest finds here

sys.dont_write_bytecode = False  # hundreds of processes would compile the same sources again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on a hub
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's idle threads spin on the cores of the other workers
settings.register_profile("jaxsgl", deadline=None)  # how long an example takes depends on what else runs
settings.load_profile("jaxsgl")
signal.signal(signal.SIGINT, signal.default_int_handler)  # if it was ignored, programs under test would inherit that
_PROGRAMS = Programs()  # before anything imports JAX


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly-slice", metavar="K/N", help="run the K-th of N slices of the nightly tests")


def pytest_configure(config: pytest.Config) -> None:
    """Chooses day or night, before a test or tests/grids.py is imported; processes that tests start get it, too."""
    chosen = config.getoption("nightly_slice")
    if chosen is not None:
        try:
            nights.parse(chosen)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        os.environ["JAXSGL_TEST_NIGHTLY"] = "1"
        os.environ.setdefault("JAXSGL_TEST_SOAK_S", str(nights.SOAK_S))
    if not os.environ.get("JAXSGL_TEST_NIGHTLY") and not os.environ.get(compiling.AS_USERS):
        compiling.compile_fast()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignores files, and folders with their conftest, of other tiers than the one that `-m` names."""
    tier = tiers.chosen_tier(config.option.markexpr)
    return (tier is not None and not tiers.may_hold(collection_path, tier)) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Of the million objects that come with all tests next to none goes: no collection looks at them, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000)  # JAX makes as many objects in a moment
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    tier = tiers.tier_of(item.path)
    item.add_marker(tier)
    named = {mark.name for mark in item.iter_markers()} & set(tiers.TIERS)
    if named != {tier}:
        raise pytest.UsageError(f"{item.nodeid} is of the tiers {sorted(named)}; a file's tests are of one")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: tiers.rank(item.path))
    chosen = config.getoption("nightly_slice")
    if chosen is not None:
        k, n = nights.parse(chosen)
        kept = nights.slices([item.nodeid for item in items], n, nights.read_costs())[k - 1]
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]


@pytest.fixture(scope="session", autouse=True)
def _unit_tests_import_no_jax(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    collected_all = request.config.getoption("nightly_slice") is not None  # and imported the files of all tiers
    if not collected_all and all(tiers.tier_of(item.path) in tiers.WITHOUT_JAX for item in request.session.items):
        assert "jax" not in sys.modules, "a test imports JAX; it belongs to the tier `device`"


@pytest.fixture(scope="module")
def fully_optimized() -> Iterator[None]:
    """Processes that a file's tests start compile as users do, by day too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in compiling.as_users().items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs_are_kept() -> Iterator[None]:
    yield
    _PROGRAMS.exchange()


@pytest.fixture(scope="module", autouse=True)
def _the_floating_point_environment_stays() -> Iterator[None]:
    before = controls()
    yield
    assert controls() == before, f"these tests left rounding or denormals as {controls()}, not {before}"


def pytest_unconfigure() -> None:
    _PROGRAMS.close()
