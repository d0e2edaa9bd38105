"""Both processes' talk in one seeded simulation with faults: links, generators and mailboxes, the scheduler's loop.

Clients come, read at their own pace, leave at any moment, abort each other, run into timeouts and full queues, and use
ids twice; operators pause, flush and lose patience; lines are slow, each in its own way; front ends and the engine die.
Whatever happens: every call ends, and once; its tokens are those of `FakeEngine`'s hash, or their beginning; in the end
nothing is left in any table, and all pages are free.

JAXSGL_TEST_NIGHTLY=1 runs thousands of seeds.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from simulated import SimulatedLoop
from simulated_world import World

from jaxsgl.text.tokenizer import Tokenizer, load_tokenizer
from tests.grids import count

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(tmp_path_factory.mktemp("no_tokenizer")))


def simulate(seed: int, tokenizer: Tokenizer) -> World:
    async def scenario() -> World:
        world = World(seed, tokenizer, threads)
        await world.run()
        return world

    with ThreadPoolExecutor(1) as threads, asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(scenario())


@pytest.mark.timeout(1800)  # by night
def test_every_call_ends_once_with_its_own_tokens_and_nothing_is_left(tokenizer: Tokenizer) -> None:
    ends: Counter[str] = Counter()
    deaths = 0
    num_seeds = count(15, 1_000)
    for seed in range(num_seeds):
        try:
            world = simulate(seed, tokenizer)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        ends.update(call.end for call in world.calls)
        deaths += sum("dies" in what for _, what in world.trace)
    expected = {"whole", "left", "died", "InvalidRequest", "EngineUnavailable", "TimedOut", "Overloaded"}
    assert set(ends) == expected, "the histories hold every kind of end"
    assert ends["whole"] > sum(ends.values()) / 5 and deaths


def test_a_seed_repeats_its_history(tokenizer: Tokenizer) -> None:
    one, other = (simulate(7, tokenizer).trace for _ in range(2))
    assert one == other
