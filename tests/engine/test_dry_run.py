"""What an engine finds out before it is ready: every program runs, and the largest step fits beside the pool."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxsgl.batch.inputs import Bucket
from jaxsgl.engine.engine import Engine
from jaxsgl.engine.layer_state import layer_states
from jaxsgl.engine.start.dry_run import covering
from jaxsgl.engine.start.memory import Memory
from jaxsgl.engine.state import abstract_state, allocate
from jaxsgl.engine.step_programs import SET_PAGES, SET_ROW, StepPrograms, all_keys, keys_of
from jaxsgl.engine.tables import edit_table_bytes, page_table_bytes
from jaxsgl.errors import ConfigError, StartupError
from tests.engine.conftest import ConfigMaker
from tests.engine.driving import greedy_programs
from tests.grids import NIGHTLY
from tests.plain_model import mesh_of


@pytest.mark.parametrize(
    ("message", "way_out"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory", "--chunked-prefill-size or --max-running-requests.* --mem-fraction-stat"),
        ("INTERNAL: launch failed", "--attention-backend"),
    ],
)
def test_a_program_that_fails_at_launch_fails_the_start_with_the_flag_to_change(
    tiny_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch, message: str, way_out: str
) -> None:
    of = StepPrograms.of

    def fail(*_: Any) -> None:
        raise jax.errors.JaxRuntimeError(message)

    def broken(self: StepPrograms, bucket: Bucket) -> tuple[Any, ...]:
        return (fail,) if bucket.kind == "extend" else of(self, bucket)

    monkeypatch.setattr(StepPrograms, "of", broken)
    greedy_programs(monkeypatch)
    with pytest.raises(StartupError, match=rf"\[extend T=16 .*\] can't run: {message}: .*{way_out}"):
        Engine(tiny_config(), progress=False)


def test_every_program_has_run_when_the_engine_is_ready_and_the_state_is_as_good_as_new(
    tiny_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, ran = StepPrograms.of, set()

    def recorded(self: StepPrograms, bucket: Bucket) -> tuple[Any, ...]:
        ran.update(keys_of(bucket))
        return of(self, bucket)

    monkeypatch.setattr(StepPrograms, "of", recorded)
    config = tiny_config(decode_steps=4, decode_buckets=(2, 4) if NIGHTLY else (4,))
    engine = Engine(config, progress=False)
    assert ran == {*all_keys(engine.buckets)} - {SET_ROW, SET_PAGES}
    assert engine.recompiles == 0
    fresh = allocate(
        layer_states(engine.arch, engine.capacity.page_size, engine._runner.state.kv.k[0].dtype),
        engine.capacity,
        mesh_of(),
    )
    for pages, new in zip(jax.tree.leaves(engine._runner.state.kv), jax.tree.leaves(fresh.kv), strict=True):
        np.testing.assert_array_equal(np.asarray(pages)[1:], np.asarray(new)[1:])  # page 0 is the dummy page
    for rows, new in zip(jax.tree.leaves(engine._runner.state[1:]), jax.tree.leaves(fresh[1:]), strict=True):
        np.testing.assert_array_equal(np.asarray(rows)[:-1], np.asarray(new)[:-1])  # the last row is the dummy row
    engine.close()


def test_a_program_that_several_steps_need_runs_in_the_smallest() -> None:
    def forms(tokens: int) -> list[Bucket]:
        return [Bucket("extend", tokens, 4, *variant) for variant in ((False, False), (True, False), (True, True))]

    small, large = forms(16), forms(64)
    assert covering([*large, *small]) == [small[2], small[1], large[2]]


def test_programs_are_compiled_for_the_state_that_is_allocated_later(engine: Engine, tiny_config: ConfigMaker) -> None:
    states = layer_states(engine.arch, engine.capacity.page_size, engine._runner.state.kv.k[0].dtype)
    abstract = abstract_state(states, engine.capacity, mesh_of())
    real = allocate(states, engine.capacity, mesh_of())

    def same(planned: Any, array: jax.Array) -> bool:
        return (planned.shape, planned.dtype, planned.sharding) == (array.shape, array.dtype, array.sharding)

    assert jax.tree.all(jax.tree.map(same, abstract, real))  # other structures are an error


def small_memory(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    """The engine finds an accelerator with `free_bytes` left for everything."""
    monkeypatch.setattr("jaxsgl.engine.engine.least_free_memory", lambda *_: Memory("gpu", free_bytes, free_bytes))


def test_where_memory_is_short_the_pool_is_smaller_by_what_the_largest_step_takes(
    tiny_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes = 1 << 20
    small_memory(monkeypatch, free_bytes)
    greedy_programs(monkeypatch)
    engine = Engine(tiny_config(max_total_tokens=None), progress=False)
    page_bytes = layer_states(engine.arch, 4, engine._runner.state.kv.k[0].dtype).page_bytes
    sizes = engine.capacity
    tables = edit_table_bytes(sizes.num_rows, sizes.vocab_size)
    tables += page_table_bytes(sizes.num_rows, sizes.max_pages_per_seq)
    step = engine.programs.step_bytes
    largest = max(memory_of(engine, bucket) for bucket in engine.buckets.all() if not bucket.sampled)
    assert 4 * page_bytes < largest <= step
    assert engine.capacity.num_pages == (free_bytes - tables - step) // page_bytes
    engine.close()


def memory_of(engine: Engine, bucket: Bucket) -> int:
    """Temporary bytes of the forward program of `bucket`."""
    memory: Any = engine.programs.of(bucket)[0].memory_analysis()
    return int(memory.temp_size_in_bytes)


def test_a_pool_asked_for_that_leaves_a_step_no_room_is_refused_at_start(
    tiny_config: ConfigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config()
    pool = 65 * layer_states(Engine(config, progress=False).arch, 4, np.dtype("float32")).page_bytes
    small_memory(monkeypatch, pool + edit_table_bytes(4, 101) + page_table_bytes(4, 16) + 1000)
    with pytest.raises(ConfigError, match=r"--max-total-tokens 256 needs .* --chunked-prefill-size"):
        Engine(config, progress=False)
