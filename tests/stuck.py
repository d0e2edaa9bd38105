"""Ends a process whose test outlives its timeout. pytest-timeout's signal interrupts Python, not a wait in native code.

The stacks are printed first. In a parallel run the test then fails, and another worker takes the rest.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Generator
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

GRACE_S = 60.0  # after the timeout, or as long as that again if it is shorter


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    _watch(item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Watches a failed test's teardown too: pytest and pytest-timeout stop their clocks at a failure, for debuggers."""
    if isinstance(node, pytest.Item) and not node.config.getoption("usepdb"):
        _watch(node)


def _watch(item: pytest.Item) -> None:
    mark = item.get_closest_marker("timeout")
    of_run = item.config.getoption("timeout") or item.config.getini("timeout")
    limit_s = float((mark.args[0] if mark else of_run) or 0)  # 0: none, as for pytest-timeout
    if limit_s:
        stderr = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(limit_s + min(limit_s, GRACE_S), exit=True, file=stderr)
