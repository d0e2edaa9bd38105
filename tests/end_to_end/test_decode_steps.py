"""Several decode steps in one program on the real engine: all tokens are those of single steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.requests.request import FinishReason, Request, SamplingParams
from tests.checkpoint_kinds.sizes import VOCAB_SIZE
from tests.checkpoints import make_checkpoint
from tests.end_to_end.offline import ends, outputs, serve
from tests.grids import NIGHTLY

pytestmark = pytest.mark.device

STEPS = 4
FLAGS: dict[str, Any] = {
    "page_size": 4,
    "chunked_prefill_size": 64,
    "context_length": 160,
    "max_running_requests": 6,
    "max_total_tokens": 800,
    "decode_buckets": (6,),
    "extend_buckets": (64,),
    "decode_steps": STEPS,
    "compilation_cache_dir": "",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"), seed=3)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    return Engine(EngineConfig(model=str(checkpoint), **FLAGS))


def random_requests() -> list[Request]:
    """Greedy and seeded requests, some featured; ends at max_tokens that no number of steps divides, and at EOS."""
    rng = random.Random(1)
    texts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(120)] for _ in range(3)]
    requests = []
    for i in range(40):
        kind = rng.choice(["greedy", "drawn", "drawn", "featured"] if i > 20 else ["greedy", "drawn"])
        params = SamplingParams(
            temperature=0.0 if kind == "greedy" else 1.0,
            top_p=0.9,
            seed=i,
            max_tokens=rng.randint(1, 30),
            frequency_penalty=0.5 if kind == "featured" else 0.0,
        )
        requests.append(Request(f"r{i}", rng.choice(texts)[: rng.randint(1, 120)], params))
    return requests


@pytest.mark.skipif(not NIGHTLY, reason="an engine of its own; by day test_hybrids.py and test_same_bits.py")
@pytest.mark.parametrize("retract_every", [None, 5])
@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_are_those_of_single_steps(engine: Engine, overlap: bool, retract_every: int | None) -> None:
    requests = random_requests()
    eos = range(20)  # enough that most answers end at one of them
    alone = [serve(engine, [[r]], radix=False, eos_token_ids=eos, decode_steps=1) for r in requests]
    expected = [outputs(mailbox, [r])[0] for mailbox, r in zip(alone, requests, strict=True)]
    mailbox = serve(engine, [requests], overlap=overlap, eos_token_ids=eos, retract_every=retract_every)
    assert outputs(mailbox, requests) == expected
    reasons = {reply.finish_reason for reply in ends(mailbox).values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert {len(reply.token_ids) for reply in mailbox.replies} == {1, 2, 3, 4}
    assert engine.recompiles == 0
