"""Random histories against the real engine: tokens are those of an unbatched run, and nothing ever recompiles."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jaxsgl.config.engine import SchedulingConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.messages.orders import Abort, ContinueGeneration, PauseGeneration, PauseMode, ToEngine
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from tests.checkpoint_kinds.sizes import VOCAB_SIZE
from tests.checkpoints import make_checkpoint
from tests.end_to_end.offline import ends, outputs, serve, small_pool
from tests.grids import count

pytestmark = pytest.mark.device

NUM_REQUESTS = count(60, 200)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"), seed=3)
    return small_pool(folder, decode_buckets=(1, 6), extend_buckets=(16, 48))


def random_params(rng: random.Random, seed: int) -> SamplingParams:
    """Greedy or sampled parameters of many kinds, always seeded; one in four has features."""
    features = random_features(rng) if rng.random() < 0.25 else {}
    max_tokens = rng.randint(1, 20)
    if rng.random() < 0.5:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=rng.random() < 0.5, **features)
    return SamplingParams(
        temperature=rng.choice([0.3, 1.0, 2.0]),
        top_k=rng.choice([-1, 3, 50]),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.05]),
        seed=seed,
        max_tokens=max_tokens,
        **features,
    )


def random_features(rng: random.Random) -> dict[str, Any]:
    features = {
        "frequency_penalty": rng.uniform(-1, 2),
        "repetition_penalty": rng.uniform(0.8, 2),
        "logit_bias": {rng.randrange(VOCAB_SIZE): rng.uniform(-20, 20) for _ in range(9)},
        "min_tokens": 1,
        "logprobs": 4,
        "prompt_logprobs": 2,
    }
    return dict(rng.sample(sorted(features.items()), rng.randint(1, 4)))


def random_requests(seed: int) -> list[Request]:
    rng = random.Random(seed)
    texts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(140)] for _ in range(3)]
    requests = []
    for i in range(NUM_REQUESTS):
        prompt = rng.choice(texts)[: rng.randint(1, 130)] + [
            rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(0, 3))
        ]
        requests.append(Request(f"r{i}", prompt, random_params(rng, seed=i), priority=rng.randint(-3, 3)))
    return requests


CONFIGS = [
    SchedulingConfig(),
    SchedulingConfig(schedule_policy="lpm", enable_mixed_chunk=True, schedule_conservativeness=0.05),
    SchedulingConfig(schedule_policy="dfs-weight", decode_first=True),
    SchedulingConfig(
        schedule_policy="lof",
        enable_priority_scheduling=True,
        priority_scheduling_preemption_threshold=1,
        enable_mixed_chunk=True,
    ),
    SchedulingConfig(schedule_policy="random", schedule_conservativeness=0.05, max_itl_ms=20.0),
]


@pytest.mark.parametrize(
    ("seed", "overlap"), [(i % len(CONFIGS), i % 2 == 0) for i in range(count(len(CONFIGS), 2 * len(CONFIGS)))]
)
def test_random_requests_yield_their_unbatched_tokens_without_a_recompile(
    engine: Engine, seed: int, overlap: bool
) -> None:
    """With any policy, mixed steps, forced retraction, preemption and pauses leave no trace in the tokens."""
    rng = random.Random(seed + 100)
    requests = random_requests(seed)
    aborted = {request.request_id for request in rng.sample(requests, NUM_REQUESTS // 7)}
    script: list[list[ToEngine]] = []
    for request in requests:
        script += [[] for _ in range(rng.randint(0, 2))]
        script.append([request])
    for request_id in aborted:
        script[rng.randrange(len(script))].append(Abort(request_id))  # before, while or after it runs
    for number in range(10):
        mode = rng.choice([PauseMode.IN_PLACE, PauseMode.RETRACT])
        at = rng.randrange(len(script))
        script.insert(at, [PauseGeneration(number, mode)])
        script.insert(at + rng.randint(1, 3), [ContinueGeneration(100 + number)])
    script.append([ContinueGeneration(200)])  # whichever pause came last
    retract_every = 5 if seed % 2 else None
    together = serve(engine, script, overlap=overlap, config=CONFIGS[seed], retract_every=retract_every)
    last = ends(together)
    assert set(last) == {request.request_id for request in requests}
    alone = [request for request in requests if request.request_id not in aborted]
    expected = [outputs(serve(engine, [[request]], radix=False, overlap=False), [request])[0] for request in alone]
    assert outputs(together, alone) == expected
    assert all(last[request.request_id].finish_reason is not FinishReason.ABORT for request in alone)
    assert engine.recompiles == 0
