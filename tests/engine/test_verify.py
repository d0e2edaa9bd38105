"""Which drafts stand on the device, and that steps after them go on from the last token that was kept."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsgl.batch.build import Work
from jaxsgl.batch.inputs import Bucket, packed_len, unpack
from jaxsgl.config.features import SpeculationConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.engine.sampling.sampler import accept, pack_runs
from tests.engine.conftest import ConfigMaker
from tests.engine.driving import Driver, Plain, few_sizes

PROMPTS = {0: list(range(3, 20)), 1: [7], 2: [9, 8, 7, 6, 5, 4, 3], 3: list(range(90, 70, -1))}
ROWS = 5


@pytest.mark.parametrize("seed", range(20))
def test_a_sequence_keeps_what_was_chosen_up_to_the_first_draft_that_was_not(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 5, rng.integers(1, ROWS))
    bucket = Bucket("verify", 16, ROWS, False)
    arrays = unpack(np.zeros(packed_len(bucket), np.int32), bucket)
    total = int(counts.sum())
    arrays.query_offsets[:] = total
    arrays.query_offsets[: len(counts)] = np.cumsum(counts) - counts
    assert arrays.token_rows is not None
    arrays.token_rows[:] = ROWS
    arrays.token_rows[:total] = np.repeat(rng.permutation(ROWS)[: len(counts)], counts)
    arrays.token_ids[:total] = rng.integers(0, 2, total)
    chosen = rng.integers(0, 2, 16).astype(np.int32)

    expected, last = np.full(total, -1), np.full(ROWS, 99)
    for first, count in zip(arrays.query_offsets.tolist(), counts.tolist(), strict=False):
        for place in range(first, first + count):
            if place > first and arrays.token_ids[place] != chosen[place - 1]:
                break
            expected[place] = last[arrays.token_rows[place]] = chosen[place]

    last_tokens, kept = jax.jit(lambda tokens, last: accept(tokens, pack_runs(arrays), last))(
        chosen, jnp.full(ROWS + 1, 99, jnp.int32)
    )
    assert np.asarray(kept)[:total].tolist() == expected.tolist()
    assert np.asarray(last_tokens)[:ROWS].tolist() == last.tolist()


@pytest.fixture(scope="module")
def speculating(tiny_config: ConfigMaker) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        few_sizes(monkeypatch)
        engine = Engine(tiny_config(speculation=SpeculationConfig("NGRAM", 3)), progress=False)
    yield engine
    engine.close()


@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_steps_after_drafts_go_on_from_the_last_token_that_was_kept(
    speculating: Engine, plain: Plain, num_right: int
) -> None:
    driver = Driver(speculating)
    expected = {row: plain.generate(prompt, 10) for row, prompt in PROMPTS.items()}
    driver.generate(PROMPTS, 1)
    works = []
    for row, prompt in PROMPTS.items():
        output = expected[row]
        wrong = [(token + 1) % 101 for token in output[1 + num_right : 4]]
        ids = [output[0], *output[1 : 1 + num_right], *wrong]
        works.append(Work(row, np.array(ids, np.int32), len(prompt), sample=True))
    tokens = np.array(driver.run(driver.builder.verify(works))).reshape(len(PROMPTS), 4)
    for of_row, output in zip(tokens.tolist(), expected.values(), strict=True):
        assert of_row == output[1 : 2 + num_right] + [-1] * (3 - num_right)
    for step in range(2 + num_right, 10):
        positions = {row: len(prompt) + step - 1 for row, prompt in PROMPTS.items()}
        found = driver.run(driver.decode(positions))
        assert found == [output[step] for output in expected.values()]


def test_programs_for_drafts_are_compiled_on_top_of_all_others(speculating: Engine, engine: Engine) -> None:
    more = speculating.compiled.compilations.keys() - engine.compiled.compilations.keys()
    assert engine.compiled.compilations.keys() <= speculating.compiled.compilations.keys()
    assert {key.shape.kind for key in more if isinstance(key.shape, Bucket)} == {"verify"}
    assert {key.kind for key in more} == {
        "forward",
        "sampled",
        "filtered",
        "featured",
        "accepted",
        "copied",
        "masked",
        "scored",
    }
