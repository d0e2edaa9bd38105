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


def test_tokens_are_chosen_by_the_thread_that_launches_before_the_steps_that_follow() -> None:
    """Programs of two threads may run at the same time, in other orders on other hosts."""
    launcher, gate, done = Launcher(), threading.Event(), list[tuple[str, str]]()

    def noted(what: str) -> None:
        done.append((what, threading.current_thread().name))

    def launch(token: int) -> Any:
        gate.wait()
        noted(f"step {token}")
        return SimpleNamespace(**vars(step(token)), choose=lambda masks: noted(f"choice {token} of {len(masks)}"))

    first = launcher.launch(functools.partial(launch, 0))
    first.choose(np.zeros((3, 1), np.uint32))  # returns while the step waits
    second = launcher.launch(functools.partial(launch, 1))
    gate.set()
    assert [int(handle.tokens()[0]) for handle in (first, second)] == [0, 1]
    assert done == [(what, "launcher") for what in ("step 0", "choice 0 of 3", "step 1")]
    launcher.close()


def test_a_choice_that_fails_fails_the_step_and_those_that_follow() -> None:
    def fail(masks: Any) -> None:
        raise RuntimeError("out of memory")

    launcher = Launcher()
    first = launcher.launch(lambda: SimpleNamespace(**vars(step(0)), choose=fail))
    first.choose(np.zeros((1, 1), np.uint32))
    for handle in (first, launcher.launch(lambda: step(1))):
        with pytest.raises(RuntimeError, match="out of memory"):
            handle.tokens()
    launcher.close()
