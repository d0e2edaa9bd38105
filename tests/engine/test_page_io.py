"""Pages to the host and back: bits pass unchanged, in step order and in place; only engines that move pages compile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxsgl.batch.engine_api import Gather, GatherRows, HostPages, Insert, RestoreRows
from jaxsgl.engine import page_io
from jaxsgl.engine.engine import Engine
from jaxsgl.engine.layer_state import LayerState, LayerStates, StateArray, attention_state
from jaxsgl.engine.page_io import PageIo, page_counts
from jaxsgl.engine.programs import ProgramSet
from jaxsgl.engine.state import DeviceState, KvBuffers, allocate_kv
from jaxsgl.engine.tables import EditTables
from jaxsgl.weights.sharding import replicated
from tests.engine.conftest import ConfigMaker
from tests.engine.driving import Driver, Plain, greedy_engine
from tests.engine.test_programs import copies
from tests.plain_model import mesh_of

ROOT = Path(__file__).parent.parent.parent
NUM_PAGES = 4099  # no other dimension is as large


def states_of(dtype: str, num_kv_heads: int = 2, kv_copies: int = 1) -> LayerStates:
    return LayerStates((attention_state(num_kv_heads, 4, 16, jnp.dtype(dtype)),) * 2, 4, kv_copies=kv_copies)


STATES = states_of("float32")


@pytest.fixture(scope="module")
def moving(tiny_config: ConfigMaker) -> Iterator[Engine]:
    with greedy_engine(tiny_config(), moves_pages=True) as engine:
        yield engine


def gathered(engine: Engine, pages: tuple[int, ...]) -> HostPages:
    engine.apply(Gather(pages), 7)
    ((number, data),) = engine.poll(wait=True)
    assert number == 7
    return data.copy()


def random_pages(io: PageIo, count: int, seed: int = 0) -> HostPages:
    """Random bits, infinities and NaNs among them."""
    layout = io.layout
    raw = np.random.default_rng(seed).bytes(count * layout.page_bytes)
    return np.frombuffer(raw, layout.host_dtype).reshape(layout.shape(count))


def state_of(kv: KvBuffers) -> DeviceState:
    """A state of which only pages are read."""
    nothing = jnp.zeros(1, jnp.int32)
    return DeviceState(kv, nothing, nothing, EditTables(nothing, nothing))


def page_io_of(programs: ProgramSet, kv: KvBuffers, states: LayerStates, mesh: Mesh) -> PageIo:
    return PageIo(programs, state_of(kv), states, mesh, pages=True, rows=False)


def inserted(io: PageIo, kv: KvBuffers, pages: tuple[int, ...], data: HostPages) -> KvBuffers:
    return io.apply(state_of(kv), Insert(pages, data), 1).kv


def assert_pages(io: PageIo, kv: KvBuffers, pages: tuple[int, ...], data: HostPages) -> None:
    io.apply(state_of(kv), Gather(pages), 2)
    ((number, found),) = io.poll(wait=True)
    assert number == 2
    np.testing.assert_array_equal(found.view(np.uint8), data.view(np.uint8))


def test_a_sequence_goes_on_from_pages_that_left_and_came_back_elsewhere(moving: Engine, plain: Plain) -> None:
    """The gather is launched after the step that fills the pages, and the pages are overwritten after it."""
    driver, prompt = Driver(moving), list(range(3, 15))
    row, other = 0, 1
    own, target = (tuple(driver.table.pages[r, :3].tolist()) for r in (row, other))
    moving.submit(driver.extend((row, prompt, 0)))
    moving.apply(Gather(own), 1)
    moving.submit(driver.extend((row, [99] * 12, 0)))
    ((_, data),) = moving.poll(wait=True)
    moving.apply(Insert(target, data), 2)
    driver.table.put(other, 0, np.array(target, np.int32))
    first = driver.run(driver.extend((other, [20], 12)))
    assert first == plain.generate([*prompt, 20], 1)


@pytest.mark.parametrize("count", [1, 3, 8, 21])
def test_gathers_and_inserts_of_any_number_of_pages_are_exact(moving: Engine, count: int) -> None:
    io = moving._page_io
    pages = tuple(range(5, 5 + count))
    data, recompiles = random_pages(io, count, count), moving.recompiles
    neighbours = gathered(moving, (4, 5 + count))
    moving.apply(Insert(pages, data), 1)
    np.testing.assert_array_equal(gathered(moving, pages[::-1]).view(np.uint32), data[::-1].view(np.uint32))
    np.testing.assert_array_equal(gathered(moving, (4, 5 + count)), neighbours, "pages beside it changed")
    assert moving.recompiles == recompiles


def test_more_pages_than_a_program_holds_take_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_io, "MOST_PAGES", 4)
    mesh, pages = mesh_of(), tuple(range(10, 21))
    kv = allocate_kv(STATES, 30, mesh)
    programs = ProgramSet()
    io = page_io_of(programs, kv, STATES, mesh)
    assert len(programs) == 4
    data = random_pages(io, 11)
    assert_pages(io, inserted(io, kv, pages, data), pages, data)


def test_pages_cross_devices() -> None:
    """The host form holds all heads in order, whether one device or two hold them; no device asks another."""
    program = """
from tests.engine.test_page_io import *
page_io.MOST_PAGES = 4
pools = [(mesh_of(n), allocate_kv(STATES, 30, mesh_of(n))) for n in (1, 2)]
compiled = [ProgramSet(), ProgramSet()]
one, two = (page_io_of(each, kv, STATES, mesh) for each, (mesh, kv) in zip(compiled, pools))
data, pages = random_pages(one, 7), (3, 1, 20, 29, 5, 6, 7)
split = inserted(two, pools[1][1], pages, data)
assert all(len(array.sharding.device_set) == 2 for array in jax.tree.leaves(split))
assert_pages(two, split, pages, data)
assert_pages(one, inserted(one, pools[0][1], pages, data), pages, data)
second = np.asarray(split.k[1].addressable_shards[1].data[20]).view(np.uint32)
np.testing.assert_array_equal(second, data[2, 1, 0, 1:].view(np.uint32))
assert not any("all-" in done.compiled.as_text() for done in compiled[1].compilations.values())
"""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", program], check=True, env=env, cwd=ROOT)


def test_an_engine_that_moves_no_pages_compiles_nothing_for_them(engine: Engine) -> None:
    assert not {key.kind for key in engine.compiled.compilations} & {page_io.GATHER, page_io.INSERT}
    assert engine.poll() == []
    with pytest.raises(AssertionError, match="no programs for pages"):
        engine.apply(Gather((1,)), 1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16", "uint8"])
def test_neither_program_copies_the_pool_and_every_format_keeps_its_bits(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU keeps bfloat16 as uint16 and float8 as uint8."""
    monkeypatch.setattr(page_io, "MOST_PAGES", 4)
    states, mesh = states_of(dtype), mesh_of()
    kv = allocate_kv(states, NUM_PAGES, mesh)
    programs = ProgramSet()
    io = page_io_of(programs, kv, states, mesh)
    pool_bytes = sum(array.nbytes for array in jax.tree.leaves(kv))
    for key, compilation in programs.compilations.items():
        assert not copies(compilation.compiled, NUM_PAGES), key
        memory = compilation.compiled.memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < pool_bytes / 8
        if key.kind == "insert":
            assert memory.alias_size_in_bytes >= pool_bytes
    pages, data = (3, 9, 4098, 2, 1, 77), random_pages(io, 6)
    assert_pages(io, inserted(io, kv, pages, data), pages, data)


def test_formats_that_numpy_lacks_cross_as_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_io, "MOST_PAGES", 1)
    for dtype, on_host in (("bfloat16", "uint16"), ("float8_e4m3fn", "uint8")):
        states, mesh = states_of(dtype), mesh_of()
        kv = allocate_kv(states, 9, mesh)
        io = page_io_of(ProgramSet(), kv, states, mesh)
        data = random_pages(io, 3) & np.array(0x3F, on_host)  # a CPU may change NaNs of these formats, which it lacks
        assert data.dtype == on_host
        assert_pages(io, inserted(io, kv, (1, 2, 8), data), (1, 2, 8), data)


def test_sizes_of_programs_are_bounded_in_bytes() -> None:
    assert page_counts(1 << 20) == (1, 4, 16, 64)
    assert page_counts(20 << 20) == (1,)
    assert page_counts(1 << 30) == (1,)
    assert page_io.reserved_bytes(20 << 20) == 4 * (20 << 20)


def test_copies_of_kv_heads_leave_once_and_come_back_to_all() -> None:
    states = states_of("float32", num_kv_heads=4, kv_copies=2)
    kv = allocate_kv(states, 30, mesh_of())
    io, pages = page_io_of(ProgramSet(), kv, states, mesh_of()), (3, 7)
    assert io.layout == STATES.page_layout
    data = random_pages(io, 2)
    kv = inserted(io, kv, pages, data)
    np.testing.assert_array_equal(np.asarray(kv.k[0])[:, ::2], np.asarray(kv.k[0])[:, 1::2])
    assert_pages(io, kv, pages, data)


def test_layers_that_keep_one_array_or_none_by_page_cross_too() -> None:
    """As those of a latent cache, of which a device has the whole, and of a recurrent state."""
    one = LayerState((StateArray("k", (1, 4, 24), jnp.dtype("float32"), (None, None, None)),))
    states = LayerStates((one, LayerState(()), one), 4)
    kv = allocate_kv(states, 30, mesh_of())
    assert len(kv.k) == 2 and not kv.v
    io = page_io_of(ProgramSet(), kv, states, mesh_of())
    pages, data = (3, 7, 9), random_pages(io, 3)
    assert data.shape == (3, 2, 1, 1, 4, 24)
    assert_pages(io, inserted(io, kv, pages, data), pages, data)


def test_rows_of_images_leave_as_bytes_and_come_back_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a launch takes, both ways; the last launch is padded, and no other row changes."""
    monkeypatch.setattr(page_io, "ROWS", 4)
    values = np.random.default_rng(0).random((20, 6), np.float32)
    images = jax.device_put(values, replicated(mesh_of()))
    state = state_of(allocate_kv(STATES, 9, mesh_of()))._replace(images=images)
    io = PageIo(ProgramSet(), state, STATES, mesh_of(), pages=False, rows=True)
    rows, others = np.array([3, 19, 5, 1, 7, 2], np.int32), np.array([4, 3, 8, 19, 1, 11], np.int32)
    io.apply(state, GatherRows(rows), 5)
    ((number, data),) = io.poll(wait=True)
    assert (number, data.shape) == (5, (6, 24)) and data.dtype == np.uint8
    state = io.apply(state, RestoreRows(others, data.copy()), 6)
    expected = values.copy()
    expected[others] = values[rows]
    np.testing.assert_array_equal(np.asarray(state.images), expected)
    assert io.poll() == []
    with pytest.raises(AssertionError, match="no programs for pages"):
        io.apply(state, Gather((1,)), 7)
