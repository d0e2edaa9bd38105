"""The page table on the device says what the host's says, wherever a step reads it."""

from __future__ import annotations

import functools

import jax
import numpy as np

from jaxsgl.cache.pages import pages_for, slots_of
from jaxsgl.engine.engine import Engine
from jaxsgl.engine.tables import note_tokens, pages_of_seqs, set_pages
from tests.engine.driving import Driver, Plain


def test_steps_that_tell_the_pages_of_their_tokens_keep_the_table_true() -> None:
    """Rows change hands, and sequences grow by a random number of tokens; entries behind them are the dummy page."""
    rng, page_size, num_rows, width = np.random.default_rng(0), 4, 5, 8
    host = np.zeros((num_rows + 1, width), np.int32)
    lengths, device = np.zeros(num_rows, np.int32), jax.numpy.zeros((num_rows + 1, width), np.int32)
    note = jax.jit(functools.partial(note_tokens, page_size=page_size))
    of_seqs = jax.jit(functools.partial(pages_of_seqs, page_size=page_size))
    for step in range(60):
        row = int(rng.integers(num_rows))
        count = int(rng.integers(1, 8))
        if step % 3 == 0 or lengths[row] + count > width * page_size:  # another request takes the row
            host[row], lengths[row] = rng.integers(1, 1000, width), rng.integers(3) * page_size
            changes = np.zeros((3, width), np.int32)
            shared = pages_for(int(lengths[row]), page_size)
            changes[0], changes[1:, :shared] = num_rows, (np.arange(shared), host[row, :shared])
            changes[0, :shared] = row
            device = jax.jit(set_pages)(device, changes)
        start, end = lengths[row], lengths[row] + count
        token_rows, positions, slots = np.full(8, num_rows, np.int32), np.zeros(8, np.int32), np.zeros(8, np.int32)
        token_rows[:count], positions[:count] = row, np.arange(start, end)
        slots[:count] = slots_of(host[row], start, end, page_size)
        device = note(device, token_rows, positions, slots)
        lengths[row] = end
        seqs = np.array([row, (row + 1) % num_rows, num_rows], np.int32)
        found = np.asarray(of_seqs(device, seqs, np.append(lengths, 0)[seqs]))
        for s, seq in enumerate(seqs[:2]):
            used = pages_for(int(lengths[seq]), page_size)
            assert found[s].tolist() == [*host[seq, :used], *[0] * (width - used)]
        assert not found[2].any() and not np.asarray(device)[num_rows].any(), "padding leaves the dummy row alone"


def test_a_row_reads_the_pages_of_another_request_once_they_are_sent(engine: Engine, plain: Plain) -> None:
    """Row 2 has had longer sequences of its own; then its sequence begins with two pages of row 1."""
    driver, prompt = Driver(engine), [*range(20, 33)]
    driver.generate({1: prompt, 2: [*range(50, 74)]}, 3)
    driver.table.put(2, 0, driver.table.pages[1, :2])
    tail = [90, 91, 92]
    token = driver.run(driver.extend((2, tail, 8)))
    driver.table.sent([2])
    token += driver.run(driver.decode({2: 11}))
    assert token == plain.generate([*prompt[:8], *tail], 2)
    again = driver.run(driver.decode({1: 15}))
    assert [*again] == plain.generate(prompt, 4)[3:]
