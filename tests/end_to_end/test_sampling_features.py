"""Sampling features through scheduler and engine, against transformers' logits and NumPy."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.messages.replies import Reply, TokenLogprob
from jaxsgl.requests.request import MAX_LOGIT_BIAS, FinishReason, Request, SamplingParams
from jaxsgl.testing.engine import ScriptedMailbox
from tests import numpy_sampling
from tests.checkpoint_kinds.sizes import EOS_TOKEN_ID, VOCAB_SIZE
from tests.checkpoints import load_reference, make_checkpoint
from tests.end_to_end.offline import serve
from tests.grids import daily

pytestmark = pytest.mark.device

KINDS = ("qwen3", "llama_untied_llama3_rope")
PAGE_SIZE, CHUNK = 4, 48
EOS = frozenset({EOS_TOKEN_ID})
TOLERANCE = 1e-3


@pytest.fixture(scope="module", params=daily(KINDS, every=2))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), seed=3)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    return Engine(
        EngineConfig(
            model=str(checkpoint),
            page_size=PAGE_SIZE,
            chunked_prefill_size=CHUNK,
            context_length=160,
            max_running_requests=8,
            max_total_tokens=2000,
            decode_buckets=(1, 8),
            extend_buckets=(48,),
            compilation_cache_dir="",
        )
    )


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Callable[[Sequence[int]], np.ndarray]:
    """transformers' logits `[T, V]`."""
    model = load_reference(checkpoint)

    @cache
    def run(ids: tuple[int, ...]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].float().numpy()

    return lambda ids: run(tuple(ids))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def run(engine: Engine, *requests: Request, radix: bool = True, overlap: bool = True) -> ScriptedMailbox:
    return serve(engine, [list(requests)], radix=radix, overlap=overlap, eos_token_ids=EOS)


def of_sample(mailbox: ScriptedMailbox, request_id: str, index: int = 0) -> list[Reply]:
    return [reply for reply in mailbox.replies if (reply.request_id, reply.index) == (request_id, index)]


def tokens_of(mailbox: ScriptedMailbox, request_id: str, index: int = 0) -> list[int]:
    return [token for reply in of_sample(mailbox, request_id, index) for token in reply.token_ids]


def random_features(rng: random.Random, greedy: bool) -> dict[str, object]:
    """Parameters with each feature in every other request; some get none."""
    features: dict[str, object] = {
        "frequency_penalty": rng.uniform(-2, 2),
        "presence_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.5, 2),
        "logit_bias": {rng.randrange(VOCAB_SIZE): rng.uniform(-8, 8) for _ in range(rng.choice([1, 5, 200]))},
        "min_tokens": rng.randrange(1, 8),
        "logprobs": rng.randrange(0, 6),
        "stop_token_ids": tuple(rng.sample(range(VOCAB_SIZE), 30)),
    }
    chosen = {name: value for name, value in features.items() if rng.random() < 0.5}
    if not greedy:
        chosen |= {"temperature": rng.choice([0.5, 1.0, 1.7]), "seed": rng.randrange(2**32)}
        chosen |= {"top_k": rng.choice([-1, 20]), "top_p": rng.choice([1.0, 0.9]), "min_p": rng.choice([0.0, 0.02])}
    return {"temperature": 0.0, "max_tokens": 12, **chosen}


@pytest.mark.parametrize(("radix", "overlap"), [(True, True), (False, False)])
def test_forty_requests_with_and_without_features_yield_the_tokens_of_numpy(
    engine: Engine, reference: Callable[[Sequence[int]], np.ndarray], radix: bool, overlap: bool
) -> None:
    rng = random.Random(7)
    requests = []
    for i in range(40):
        features = random_features(rng, greedy=i % 2 == 0) if i % 5 else {"temperature": 0.0, "max_tokens": 9}
        params = SamplingParams(**features)
        requests.append(Request(f"r{i}", prompt_of(rng.choice([1, 7, 30, 90]), seed=i % 6), params))
    mailbox = run(engine, *requests, radix=radix, overlap=overlap)
    for request in requests:
        tokens = tokens_of(mailbox, request.request_id)
        expected = numpy_sampling.replay(reference, request.prompt_ids, tokens, request.sampling, EOS)
        assert tokens == expected, request.sampling
    assert engine.recompiles == 0


def test_log_probabilities_of_outputs_are_those_of_the_unedited_logits(
    engine: Engine, reference: Callable[[Sequence[int]], np.ndarray]
) -> None:
    """They are those before penalties, bias and temperature."""
    prompt = prompt_of(61)
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0, "logprobs": 20},
        "alone": {"temperature": 0.0, "logprobs": 0},
        "without": {"temperature": 0.0},
        "edited": {"temperature": 1.5, "seed": 3, "presence_penalty": 2.0, "logit_bias": {9: 4.0}, "logprobs": 5},
        "named": {"temperature": 0.0, "logprobs": 0, "logprob_token_ids": (9, 3, 77)},
        "both": {"temperature": 0.0, "logit_bias": {9: 4.0}, "logprobs": 1, "logprob_token_ids": (9,)},
    }
    requests = [
        Request(name, prompt, SamplingParams(max_tokens=10, ignore_eos=True, **params))
        for name, params in kinds.items()
    ]
    mailbox = run(engine, *requests)
    for request in requests:
        replies = of_sample(mailbox, request.request_id)
        assert len(replies) == 10
        asked = request.sampling.logprobs
        if asked is None:
            assert all(reply.logprob is None for reply in replies)
            continue
        tokens = tokens_of(mailbox, request.request_id)
        expected = numpy_sampling.logprobs(reference([*prompt, *tokens])[len(prompt) - 1 : -1])
        for reply, token, row in zip(replies, tokens, expected, strict=True):
            assert reply.logprob is not None
            check_logprob(reply.logprob, token, row, asked)
            named = row[list(request.sampling.logprob_token_ids)]
            np.testing.assert_allclose(reply.logprob.named, named, rtol=0, atol=TOLERANCE)
    assert engine.recompiles == 0


def check_logprob(given: TokenLogprob, token: int, row: np.ndarray, num_top: int) -> None:
    assert abs(given.logprob - row[token]) < TOLERANCE
    assert len(given.top) == num_top
    best = np.sort(row)[::-1][:num_top]
    assert np.abs(np.array([logprob for _, logprob in given.top]) - best).max(initial=0) < TOLERANCE
    assert all(abs(row[token_id] - logprob) < TOLERANCE for token_id, logprob in given.top)


@pytest.mark.parametrize("radix", [True, False])
def test_log_probabilities_of_a_prompt_hold_over_chunks_and_beside_cached_prefixes(
    engine: Engine, reference: Callable[[Sequence[int]], np.ndarray], radix: bool
) -> None:
    prompts = [prompt_of(length, seed=1) for length in (1, 2, 48, 49, 130)]
    script = [[Request("first", prompts[-1], SamplingParams(temperature=0.0, max_tokens=1))]]
    requests = [
        Request(f"r{i}", prompt, SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=i, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]
    script += [[], [], [], [*requests, Request("plain", prompts[3], SamplingParams(temperature=0.0, max_tokens=3))]]
    mailbox = serve(engine, script, radix=radix, eos_token_ids=EOS)
    for i, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
        first, *later = of_sample(mailbox, request.request_id)
        assert first.cached_tokens == 0
        assert all(reply.prompt_logprobs is None for reply in later)
        assert first.prompt_logprobs is not None
        assert len(first.prompt_logprobs) == len(prompt) - 1
        for given, token, row in zip(
            first.prompt_logprobs, prompt[1:], numpy_sampling.logprobs(reference(prompt)[:-1]), strict=True
        ):
            check_logprob(given, token, row, num_top=i)
        tokens = tokens_of(mailbox, request.request_id)
        assert tokens == numpy_sampling.replay(reference, prompt, tokens, request.sampling)
    assert of_sample(mailbox, "plain")[0].cached_tokens == (48 if radix else 0)
    assert of_sample(mailbox, "plain")[0].prompt_logprobs is None
    assert engine.recompiles == 0


def test_no_stop_token_comes_before_min_tokens_and_the_most_likely_one_right_after(
    engine: Engine, reference: Callable[[Sequence[int]], np.ndarray]
) -> None:
    prompt = prompt_of(20)
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20, "logit_bias": {EOS_TOKEN_ID: 100.0, 77: 90.0}}
    for min_tokens in (0, 1, 9):
        stops = SamplingParams(**params, min_tokens=min_tokens)
        both = SamplingParams(**params, min_tokens=min_tokens, stop_token_ids=(77,))
        mailbox = run(engine, Request("a", prompt, stops), Request("b", prompt, both))
        assert tokens_of(mailbox, "a") == [77] * min_tokens + [EOS_TOKEN_ID]
        b = tokens_of(mailbox, "b")
        assert (len(b), b[-1]) == (min_tokens + 1, EOS_TOKEN_ID)
        assert not set(b[:-1]) & {77, EOS_TOKEN_ID}
        assert of_sample(mailbox, "b")[-1].finish_reason is FinishReason.STOP


def test_as_many_biases_and_stop_tokens_as_allowed_work_together(engine: Engine) -> None:
    """Tokens 0 .. 191 are biased up and 64 of them must wait, so one of the others is chosen."""
    bias = dict.fromkeys(range(min(192, MAX_LOGIT_BIAS)), 50.0)
    params = SamplingParams(
        temperature=0.0, max_tokens=6, min_tokens=6, logit_bias=bias, stop_token_ids=tuple(range(64))
    )
    tokens = tokens_of(run(engine, Request("a", prompt_of(9), params)), "a")
    assert all(64 <= token < 192 for token in tokens)


@pytest.mark.parametrize("radix", [True, False])
def test_samples_of_one_prompt_share_its_pages_and_draw_with_seeds_of_their_own(
    engine: Engine, reference: Callable[[Sequence[int]], np.ndarray], radix: bool
) -> None:
    prompt = prompt_of(101)
    params = SamplingParams(temperature=1.5, seed=2**32 - 2, n=5, max_tokens=8, ignore_eos=True, frequency_penalty=0.5)
    mailbox = run(engine, Request("r", prompt, params), radix=radix)
    samples = [tokens_of(mailbox, "r", index) for index in range(5)]
    for index, sample in enumerate(samples):
        assert sample == numpy_sampling.replay(reference, prompt, sample, params, index=index)
    assert len({tuple(sample) for sample in samples}) == 5
    cached = [of_sample(mailbox, "r", index)[0].cached_tokens for index in range(5)]
    assert cached == ([0, 100, 100, 100, 100] if radix else [0] * 5)


def test_a_row_forgets_the_request_that_had_it_before(
    engine: Engine, reference: Callable[[Sequence[int]], np.ndarray]
) -> None:
    """A second wave takes the rows of the first one; its neutral requests run in featured batches."""
    strong = SamplingParams(temperature=0.0, max_tokens=10, frequency_penalty=2.0, logit_bias={5: 30.0})
    mild = SamplingParams(temperature=0.0, max_tokens=10, presence_penalty=0.1, ignore_eos=True)
    plain = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    waves = [[strong] * 8, [mild, plain] * 4]
    for wave in waves:
        requests = [Request(f"r{i}", prompt_of(10 + i), params) for i, params in enumerate(wave)]
        mailbox = run(engine, *requests)
        for request in requests:
            tokens = tokens_of(mailbox, request.request_id)
            assert tokens == numpy_sampling.replay(reference, request.prompt_ids, tokens, request.sampling, EOS)


def test_batches_without_features_leave_the_state_of_features_alone(engine: Engine) -> None:
    run(engine, Request("a", prompt_of(9), SamplingParams(temperature=0.0, max_tokens=4, presence_penalty=1.0)))
    before = [(table.unsafe_buffer_pointer(), np.array(table)) for table in edit_tables(engine)]
    requests = [
        Request("greedy", prompt_of(9), SamplingParams(temperature=0.0, max_tokens=4)),
        Request("drawn", prompt_of(9), SamplingParams(seed=1, max_tokens=4, top_p=0.9)),
    ]
    run(engine, *requests)
    for (place, content), table in zip(before, edit_tables(engine), strict=True):
        assert table.unsafe_buffer_pointer() == place
        np.testing.assert_array_equal(table, content)


def edit_tables(engine: Engine) -> list[jax.Array]:
    return jax.tree.leaves(engine._runner.state.edit_tables)
