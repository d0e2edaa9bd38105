"""Steps launched by a thread: in their order, and none after one that failed."""

from __future__ import annotations

import functools
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxsgl.engine.launcher import Launcher


def step(token: int) -> Any:
    return SimpleNamespace(tokens=lambda: np.array([token]), outputs=lambda: None)


def test_steps_are_launched_in_order_while_the_caller_goes_on() -> None:
    launcher, gate, launched = Launcher(), threading.Event(), list[int]()

    def launch(token: int) -> Any:
        gate.wait()
        launched.append(token)
        return step(token)

    handles = [launcher.launch(functools.partial(launch, token)) for token in range(5)]
    assert not launched  # `launch` has returned while the first step waits
    gate.set()
    launcher.settle()
    assert launched == list(range(5))
    assert [int(handle.tokens()[0]) for handle in handles] == list(range(5))
    launcher.close()


def test_after_a_launch_that_failed_no_step_is_launched() -> None:
    launcher, launched = Launcher(), list[int]()

    def fail() -> Any:
        raise RuntimeError("out of memory")

    def launch() -> Any:
        launched.append(1)
        return step(1)

    failed, behind = launcher.launch(fail), launcher.launch(launch)
    for handle in (failed, behind):
        with pytest.raises(RuntimeError, match="out of memory"):
            handle.tokens()
    with pytest.raises(RuntimeError, match="out of memory"):
        launcher.settle()
    assert not launched
    launcher.close()
