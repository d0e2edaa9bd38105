"""Steps with masks on the device: who gets which token, and what the programs cost a server without grammars."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, cast

import jax
import numpy as np
import numpy.typing as npt
import pytest

from jaxsgl.batch.build import Work
from jaxsgl.batch.inputs import Bucket
from jaxsgl.batch.sampling import pack_edits, row_setup, token_counts
from jaxsgl.engine.engine import Engine
from jaxsgl.engine.programs import ProgramKey, ProgramSet, StageBytes
from jaxsgl.engine.sampling.masking import masked_step
from jaxsgl.engine.step import SAMPLING_ROWS
from jaxsgl.engine.step_programs import step_bytes
from jaxsgl.requests.grammar import Grammar
from jaxsgl.requests.request import SamplingParams
from tests.engine.conftest import ConfigMaker
from tests.engine.driving import Driver, Plain

VOCAB = 101  # no multiple of 32
HELD = Grammar.regex("held")  # its text plays no part behind the scheduler
PROMPT = [11, 12, 13]


def words_of(allowed: set[int] | None) -> npt.NDArray[np.uint32]:
    words = np.full(4, 0 if allowed is not None else 0xFFFFFFFF, dtype=np.uint32)
    for token in allowed or ():
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def masks(*of_rows: set[int] | None) -> npt.NDArray[np.uint32]:
    return np.stack([words_of(allowed) for allowed in of_rows])


def test_the_programs_for_masks_are_compiled_at_the_start_unless_no_request_may_have_a_grammar(
    engine: Engine, tiny_config: ConfigMaker
) -> None:
    kinds = {"copied", "masked", "scored"}
    assert kinds <= {key.kind for key in engine.compiled.compilations}
    without = Engine(tiny_config(grammar_backend="none"), progress=False)
    assert not kinds & {key.kind for key in without.compiled.compilations}
    without.close()


def test_a_step_with_masks_compiles_nothing(engine: Engine) -> None:
    recompiles = engine.recompiles
    first_tokens(engine, {0: (SamplingParams(temperature=0.0, grammar=HELD, logprobs=3), {33})})
    assert engine.recompiles == recompiles


class Sizes:
    """Stands for programs of these sizes: bytes kept until the step's end, and temporary ones."""

    compilations: ClassVar[dict[ProgramKey, Any]] = {}

    def bytes_of(self, key: ProgramKey) -> StageBytes:
        sizes = {"forward": (100, 700), "copied": (400, 0), "masked": (8, 300), "sampled": (4, 0), "scored": (6, 0)}
        return StageBytes(*sizes[key.kind])


def test_the_largest_step_counts_masks_the_copy_of_logits_and_what_applies_them(engine: Engine) -> None:
    spec, sizes, bucket = engine.programs.spec, cast(ProgramSet, Sizes()), Bucket("decode", 4, 4, True)
    words = 4 * len(words_of(None)) * bucket.num_seqs
    assert step_bytes(sizes, replace(spec, masks=False), [bucket]) == 100 + 700
    assert step_bytes(sizes, spec, [bucket]) == 100 + words + 400 + 8 + 300


def first_tokens(engine: Engine, of_rows: dict[int, tuple[SamplingParams, set[int] | None]]) -> list[int]:
    """The first token of PROMPT in each row, under its parameters and its mask."""
    driver = Driver(engine)
    for row, (params, _) in of_rows.items():
        driver.sampling.set(row, params, params.seed or 0)
    inputs = driver.extend(*((row, PROMPT, 0) for row in of_rows))
    handle = engine.submit(inputs)
    assert inputs.masked
    allowed = [mask for _, mask in of_rows.values()]
    handle.choose(masks(*allowed, *[None] * (inputs.bucket.num_seqs - len(allowed))))
    tokens: list[int] = handle.tokens().tolist()
    return tokens


def test_a_constrained_row_gets_the_best_of_its_tokens_and_free_rows_keep_theirs(engine: Engine, plain: Plain) -> None:
    order = plain.logits(PROMPT)[-1].argsort()[::-1].tolist()
    greedy, held = SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, grammar=HELD)
    some = {order[70], order[40], order[90]}
    found = first_tokens(engine, {0: (greedy, None), 1: (held, some), 2: (held, {100}), 3: (held, None)})
    assert found == [order[0], order[40], 100, order[0]]


@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"logit_bias": {5: 50.0}}])
def test_sampled_rows_draw_inside_their_masks_and_neighbours_draw_what_they_draw_alone(
    engine: Engine, more: dict[str, Any]
) -> None:
    """A bias pulls to token 5, which the mask forbids; top-p reaches over few tokens."""
    allowed = {7, 8, 64, 99, 100}
    held = [SamplingParams(temperature=2.0, seed=seed, grammar=HELD, **more) for seed in range(3)]
    free = SamplingParams(temperature=2.0, seed=9, **more)
    driver = Driver(engine)
    driver.sampling.set(3, free, 9)
    alone = driver.run(driver.extend((3, PROMPT, 0)))
    found = first_tokens(engine, {0: (held[0], allowed), 1: (held[1], allowed), 2: (held[2], {64}), 3: (free, None)})
    assert set(found[:2]) <= allowed and found[2:] == [64, *alone]


def test_the_next_step_embeds_the_token_that_the_mask_left(engine: Engine, plain: Plain) -> None:
    driver = Driver(engine)
    driver.sampling.set(0, SamplingParams(temperature=0.0, grammar=HELD), 0)
    handle = engine.submit(driver.extend((0, PROMPT, 0)))
    handle.choose(masks({33}, None, None, None))
    following = engine.submit(driver.decode({0: len(PROMPT)}))
    following.choose(masks(None, None, None, None))
    assert [*handle.tokens().tolist(), *following.tokens().tolist()] == [33, *plain.generate([*PROMPT, 33], 1)]


def test_log_probabilities_are_the_models_own_before_the_mask(engine: Engine, plain: Plain) -> None:
    logits = plain.logits(PROMPT)[-1]
    logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    driver = Driver(engine)
    params = SamplingParams(temperature=0.0, grammar=HELD, logprobs=3, logprob_token_ids=(7, 50))
    driver.sampling.set(0, params, 0)
    ids, edits = np.array(PROMPT, np.int32), pack_edits(params, (), len(PROMPT))
    setup = row_setup(0, edits, token_counts(ids, [], VOCAB))
    handle = engine.submit(driver.builder.extend([Work(0, ids, 0, True, setup=setup)]))
    handle.choose(masks({3, 50}, None, None, None))
    token = max((3, 50), key=lambda token: logits[token])
    assert handle.tokens().tolist() == [token]
    scores = handle.outputs()
    assert scores.logprobs is not None and scores.top_ids is not None and scores.top_logprobs is not None
    np.testing.assert_allclose(scores.logprobs[0], logprobs[token], atol=1e-4)
    assert scores.top_ids[0][:3].tolist() == logprobs.argsort()[::-1][:3].tolist()
    assert np.isfinite(scores.top_logprobs).all()
    assert scores.named_logprobs is not None
    np.testing.assert_allclose(scores.named_logprobs[0][:2], logprobs[[7, 50]], atol=1e-4)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 101, 1000])
def test_every_bit_of_a_mask_means_its_token(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(size=(6, vocab_size)).astype(np.float32)
    allowed = rng.random((6, vocab_size)) < 0.3
    allowed[:, 0] |= ~allowed.any(axis=1)
    padded = np.zeros((6, -(-vocab_size // 32) * 32), dtype=bool)
    padded[:, :vocab_size] = allowed
    words = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    masked, packed = jax.jit(masked_step)(logits, np.zeros((SAMPLING_ROWS, 6), np.int32), words)
    np.testing.assert_array_equal(masked, np.where(allowed, logits, -np.inf))
    np.testing.assert_array_equal(packed[2], np.where(allowed, logits, -np.inf).argmax(axis=1))


def test_a_greedy_step_without_grammars_runs_the_programs_that_it_always_ran(engine: Engine) -> None:
    driver = Driver(engine)
    inputs = driver.extend((0, PROMPT, 0))
    assert not inputs.masked and not inputs.bucket.sampled
