from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.hosts.world import World


@pytest.fixture
def new_world() -> Iterator[Callable[..., World]]:
    with contextlib.ExitStack() as closing:

        def make(*args: Any, **kwargs: Any) -> World:
            world = World(*args, **kwargs)
            closing.callback(world.close)
            return world

        yield make
