from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxsgl.batch.engine_api import Gather
from jaxsgl.batch.outputs import NO_OUTPUTS
from jaxsgl.engine.attending import Pages
from jaxsgl.engine.engine import Engine
from jaxsgl.engine.start import sizing
from jaxsgl.engine.start.opening import in_words
from jaxsgl.engine.state import KvBuffers
from jaxsgl.errors import ConfigError, JaxsglError
from jaxsgl.requests.request import SamplingParams
from pallas_kernels import AttentionOptions, FusedQkv, KernelChoice
from pallas_kernels.kept_heads import KeptHeads
from pallas_kernels.native import library
from tests.engine.conftest import ConfigMaker
from tests.engine.driving import Driver, Plain, greedy_programs

PROMPTS = {0: list(range(3, 40)), 1: [7], 2: [9, 8, 7, 6, 5, 4, 3], 3: list(range(90, 60, -1))}


def test_tokens_equal_the_plain_models_whatever_is_batched_chunked_and_launched_ahead(
    engine: Engine, plain: Plain
) -> None:
    expected = {row: plain.generate(prompt, 8) for row, prompt in PROMPTS.items()}
    assert Driver(engine).generate(PROMPTS, 8) == expected
    assert Driver(engine).generate(PROMPTS, 8, chunk=5) == expected
    assert Driver(engine).generate({1: PROMPTS[1]}, 8) == {1: expected[1]}


def test_heads_that_pages_keep_with_zeros_after_them_yield_the_same_tokens(
    tiny_config: ConfigMaker, engine: Engine, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sizing.KEPT_HEADS, "cpu", lambda *_: KeptHeads(2, 2, 28))
    greedy_programs(monkeypatch)
    wider = Engine(tiny_config(), progress=False, moves_pages=True)
    assert Driver(wider).generate(PROMPTS, 8) == {row: plain.generate(prompt, 8) for row, prompt in PROMPTS.items()}
    wider.apply(Gather((1, 2)), 0)
    ((_, pages),) = wider.poll(wait=True)
    assert pages.shape[-1] == 28 and pages[..., :16].any(axis=-1).all() and not pages[..., 16:].any()
    assert wider.page_layout != engine.page_layout and wider.page_layout.name != engine.page_layout.name
    wider.close()


def test_heads_that_pages_keep_side_by_side_yield_the_same_tokens(
    tiny_config: ConfigMaker, engine: Engine, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sizing.KEPT_HEADS, "cpu", lambda *_: KeptHeads(2, 1, 32))
    paired = Engine(tiny_config(), progress=False)
    assert Driver(paired).generate(PROMPTS, 8) == {row: plain.generate(prompt, 8) for row, prompt in PROMPTS.items()}
    assert paired.page_layout.page_shape[2::2] == (1, 32)
    assert paired.page_layout.page_bytes == engine.page_layout.page_bytes
    paired.close()


def test_several_sequences_extend_in_one_step(engine: Engine, plain: Plain) -> None:
    driver = Driver(engine)
    driver.run(driver.extend((2, PROMPTS[2][:5], 0), sample=False))
    tokens = driver.run(driver.extend((0, PROMPTS[0][:9], 0), (2, PROMPTS[2][5:], 5), (1, PROMPTS[1], 0)))
    expected = [plain.generate(ids, 1)[0] for ids in (PROMPTS[0][:9], PROMPTS[2], PROMPTS[1])]
    assert tokens == expected


def test_a_chunk_that_is_not_the_last_leaves_the_rows_last_token_alone(engine: Engine, plain: Plain) -> None:
    driver = Driver(engine)
    first = driver.run(driver.extend((0, [5, 6, 7], 0)))
    driver.run(driver.extend((1, PROMPTS[0][:4], 0), sample=False))
    assert driver.run(driver.decode({0: 3})) == plain.generate([5, 6, 7, *first], 1)


def test_padding_changes_nothing_but_the_dummy_page_and_the_dummy_row(engine: Engine) -> None:
    driver = Driver(engine)
    driver.generate({0: [5, 6, 7], 1: [8, 9]}, 2)
    before, last_before = jax.tree.map(np.asarray, engine._runner.state[:2])
    driver.run(driver.decode({1: 3}))  # a bucket of 4 sequences: 3 are padding
    driver.run(driver.extend((1, [4], 4)))  # a bucket of 16 tokens and 4 sequences
    after, last_after = jax.tree.map(np.asarray, engine._runner.state[:2])
    own_page = 1 + engine.capacity.max_pages_per_seq
    for pages_before, pages_after in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        changed = np.flatnonzero((pages_before != pages_after).any(axis=(1, 2, 3)))
        assert set(changed.tolist()) <= {0, own_page, own_page + 1}
        assert not np.isnan(pages_after).any()
    assert (last_before != last_after)[[0, 2, 3]].sum() == 0


def test_sampled_tokens_depend_on_seed_and_position_and_not_on_neighbours(engine: Engine) -> None:
    driver = Driver(engine)
    for row, seed in ((0, 1), (1, 2**32 - 1), (3, 1)):
        driver.sampling.set(row, SamplingParams(temperature=1.5), seed)
    driver.sampling.set(2, SamplingParams(temperature=0.0), 0)
    prompt = [11, 12, 13]
    together = driver.generate(dict.fromkeys(range(4), prompt), 12)
    assert together[0] == together[3] == driver.generate({0: prompt}, 12)[0]
    assert together[0] != together[1]


def test_every_position_draws_a_number_of_its_own(engine: Engine) -> None:
    """All tokens are about equally likely here, so one number for all positions would give one token."""
    driver = Driver(engine)
    driver.sampling.set(0, SamplingParams(temperature=1e4), 1)
    assert len(set(driver.generate({0: [11, 12, 13]}, 12)[0])) > 8


def test_greedy_rows_beside_sampled_ones_stay_greedy(engine: Engine, plain: Plain) -> None:
    driver = Driver(engine)
    driver.sampling.set(0, SamplingParams(temperature=1.0), 5)
    driver.sampling.set(1, SamplingParams(temperature=1.0, top_k=1), 5)
    driver.sampling.set(2, SamplingParams(temperature=0.0), 5)
    together = driver.generate({row: [3, 1, 4] for row in range(3)}, 6)
    assert together[1] == together[2] == plain.generate([3, 1, 4], 6)


@pytest.fixture(scope="module")
def four_steps(tiny_config: ConfigMaker) -> Iterator[Engine]:
    engine = Engine(tiny_config(decode_steps=4), progress=False)
    yield engine
    engine.close()


def test_several_steps_in_one_program_yield_the_tokens_of_single_steps(engine: Engine, four_steps: Engine) -> None:
    """Greedy and drawn tokens; a sequence that takes part in fewer steps is padding in the others."""
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.5, top_p=0.9)):
        expected, driver = Driver(engine), Driver(four_steps)
        for row in PROMPTS:
            expected.sampling.set(row, params, row)
            driver.sampling.set(row, params, row)
        tokens = expected.generate(PROMPTS, 11)
        assert driver.generate(PROMPTS, 1) == {row: tokens[row][:1] for row in PROMPTS}
        first = driver.decode({row: len(PROMPTS[row]) for row in PROMPTS}, [4, 4, 2, 4])
        second = driver.decode({row: len(PROMPTS[row]) + 4 for row in (0, 1, 3)}, [4, 1, 4])
        handles = [four_steps.submit(inputs) for inputs in (first, second)]
        assert first.bucket.sampled == (not params.greedy)
        columns = handles[0].tokens().T.tolist()
        assert [columns[0], columns[1], columns[2][:2], columns[3]] == [
            tokens[0][1:5], tokens[1][1:5], tokens[2][1:3], tokens[3][1:5],
        ]  # fmt: skip
        columns = handles[1].tokens().T.tolist()
        assert [columns[0], columns[1][:1], columns[2]] == [tokens[0][5:9], tokens[1][5:6], tokens[3][5:9]]
        third = driver.run(driver.decode({1: len(PROMPTS[1]) + 5, 2: len(PROMPTS[2]) + 2}))
        assert third == [tokens[1][6], tokens[2][3]]


def test_steps_in_which_a_sequence_takes_no_part_leave_its_pages_and_its_last_token_alone(four_steps: Engine) -> None:
    driver = Driver(four_steps)
    driver.generate({0: [5, 6, 7], 1: [8, 9]}, 2)
    before = jax.tree.map(np.asarray, four_steps._runner.state.kv)
    tokens = four_steps.submit(driver.decode({0: 4, 1: 3}, [1, 4])).tokens()
    after = jax.tree.map(np.asarray, four_steps._runner.state.kv)
    own_page = 1 + four_steps.capacity.max_pages_per_seq
    for pages_before, pages_after in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        changed = np.flatnonzero((pages_before != pages_after).any(axis=(1, 2, 3)))
        assert set(changed.tolist()) <= {0, 2, own_page, own_page + 1}
        assert (pages_before != pages_after)[2].any(axis=(0, 2)).tolist() == [True, False, False, False]
    assert np.asarray(four_steps._runner.state.last_tokens)[:2].tolist() == [tokens[0, 0], tokens[3, 1]]


def test_a_file_of_buckets_is_read_before_the_weights(tiny_config: ConfigMaker) -> None:
    """The folder has no weights, which would be the next error."""
    sizes: dict[str, Any] = {"decode_buckets": (), "extend_buckets": (), "auto_buckets": "none.json"}
    with pytest.raises(ConfigError, match=r"--auto-buckets none\.json can't be read"):
        Engine(tiny_config(load_format="auto", **sizes), progress=False)


def test_nothing_compiles_after_warm_up(engine: Engine) -> None:
    driver = Driver(engine)
    before = engine.recompiles
    for seed in range(3):
        driver.sampling.set(0, SamplingParams(temperature=float(seed)), seed)
        driver.generate({0: [1, 2, 3], 1: list(range(20))}, 4)
    assert engine.recompiles == before


def test_a_hidden_compilation_is_counted(engine: Engine) -> None:
    before = engine.recompiles
    jax.jit(lambda x: x * 3 + before)(np.arange(5)).block_until_ready()
    engine._compiles.count, counted = before, engine.recompiles
    assert counted > before


def test_a_shape_that_warm_up_did_not_compile_is_refused(engine: Engine) -> None:
    inputs = Driver(engine).decode({0: 3})
    wrong = replace(inputs, bucket=replace(inputs.bucket, num_tokens=3, num_seqs=3))
    with pytest.raises(JaxsglError, match=r"no program was compiled for bucket .decode T=3"):
        engine.submit(wrong)


def test_submit_returns_before_the_step_is_done(engine: Engine) -> None:
    driver = Driver(engine)
    inputs = driver.extend(*((row, [5, 6, 7, 8], 56) for row in range(4)))
    handles: list[Any] = [engine.submit(inputs) for _ in range(30)]
    tokens = [handle._chosen.tokens for handle in handles if handle._chosen is not None]
    assert not all(array.is_ready() for array in tokens)
    assert len({tuple(handle.tokens()) for handle in handles}) == 1


@pytest.mark.parametrize(
    ("params", "transfers"),
    [
        ({"temperature": 0.0}, [1]),
        ({"temperature": 1.0}, [1, 0]),
        ({"temperature": 0.0, "logprobs": 3}, [1, 1]),  # which rows edit their logits
    ],
)
def test_a_step_transfers_one_array_to_the_device_and_with_features_two(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], transfers: list[int]
) -> None:
    seen = []
    real = engine.programs.of

    def recorded(bucket):
        def record(program):
            def call(*args):
                seen.append(sum(not isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(args)))
                return program(*args)

            return call

        return tuple(record(program) for program in real(bucket))

    monkeypatch.setattr(engine.programs, "of", recorded)
    driver = Driver(engine)
    driver.sampling.set(0, SamplingParams(**params), 0)
    driver.run(driver.extend((0, [1, 2], 0)))
    assert seen == transfers


def test_log_probabilities_are_copied_to_the_host_only_where_asked_for(engine: Engine) -> None:
    driver = Driver(engine)
    driver.sampling.set(0, SamplingParams(temperature=0.0, logprobs=0), 0)
    scored = engine.submit(driver.extend((0, [1, 2], 0), (1, [3], 0)))
    outputs = scored.outputs()
    assert outputs.prompt_logprobs is None
    assert outputs.logprobs is not None and outputs.logprobs.shape == (2,)
    driver.sampling.set(0, SamplingParams(temperature=0.0, presence_penalty=1.0), 0)
    edited = engine.submit(driver.extend((0, [1, 2], 0), (1, [3], 0)))
    driver.sampling.set(0, SamplingParams(temperature=1.0), 0)
    drawn = engine.submit(driver.extend((0, [1, 2], 0), (1, [3], 0)))
    assert edited.outputs() == drawn.outputs() == NO_OUTPUTS


def test_info_describes_the_started_engine(engine: Engine) -> None:
    info = engine.info
    assert (info.architecture, info.dtype, info.platform) == ("Qwen3ForCausalLM", "float32", "cpu")
    assert info.limits.context_length == 64 and info.limits.pool_tokens == 256 and info.limits.vocab_size == 101
    assert info.eos_token_ids == (1,)
    assert info.kv_bytes == sum(array.nbytes for array in jax.tree.leaves(engine._runner.state.kv))
    assert 0 < info.warmup_s < 300
    line = in_words(info, "m", "1 x cpu")
    backend = "native (C++)" if library.load() is None else "xla"
    assert line.startswith(
        f"serving m (Qwen3ForCausalLM) on 1 x cpu: float32, 0.00 GiB of weights, kernels {backend}, "
    )
    assert "KV pool of 256 tokens in 0.00 GiB (float32), context of 64 tokens, up to " in line


def test_a_context_beyond_the_models_is_refused(tiny_config: ConfigMaker) -> None:
    with pytest.raises(ConfigError, match="--context-length is 65, but the model was made for 64 tokens"):
        Engine(tiny_config(context_length=65), progress=False)


@pytest.mark.parametrize("backend", ["mosaic_tpu", "native"])  # the latter for the format of the weights
def test_kernels_that_cannot_run_here_are_refused_before_warm_up(tiny_config: ConfigMaker, backend: str) -> None:
    with pytest.raises(ConfigError, match=f"--attention-backend {backend}: .* is impossible here: "):
        Engine(tiny_config(attention_backend=backend), progress=False)


def test_a_backend_without_a_store_uses_another_backends_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda: None)  # as on a machine that can run it

    def step(pages: jax.Array, product: jax.Array, angles: jax.Array, ints: jax.Array, table: jax.Array) -> jax.Array:
        arrays: Any = SimpleNamespace(slots=ints, lengths=ints)
        kv = KvBuffers((pages,), (pages,))
        return Pages(kv, table, arrays, "decode", [AttentionOptions()], KernelChoice.of_attention("native")).attend(
            0, FusedQkv(product, angles, angles)
        )

    shapes = (
        ((5, 2, 16, 32), "uint16"),
        ((3, 2, 4, 32), "float32"),
        ((3, 1, 16), "float32"),
        ((3,), "int32"),
        ((3, 2), "int32"),
    )
    text = str(jax.make_jaxpr(step)(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)))
    assert "scatter" in text and library.PAGED_ATTENTION in text
