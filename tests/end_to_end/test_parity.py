"""Greedy tokens equal those of transformers, whatever the page size, the chunk size, the cache and the loop.

Forty-eight prompts of 1 to `LONGEST` tokens, most of which share prefixes, are submitted at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from jaxsgl.config.engine import EngineConfig, SchedulingConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.requests.request import Request, SamplingParams
from tests.checkpoint_kinds.sizes import VOCAB_SIZE
from tests.checkpoints import load_reference, make_checkpoint, reference_logits
from tests.compiling import as_users_compile
from tests.end_to_end.offline import first_logits, outputs, serve
from tests.grids import NIGHTLY, count, covering

pytestmark = [pytest.mark.device, as_users_compile, pytest.mark.usefixtures("greedy_steps_by_day")]

KINDS = ("llama_tied", "llama_untied_llama3_rope", "qwen2", "qwen3")
NEW_TOKENS = 8
UNLIMITED = -1
LONGEST = count(350, 700)
CONTEXT = LONGEST + 20
DAILY = [("qwen3", 16, 64)]
POINTS = covering(KINDS, [1, 16, 64], [64, UNLIMITED]) if NIGHTLY else DAILY
LOOPS = [(radix, overlap) for radix in (True, False) for overlap in (True, False) if NIGHTLY or radix == overlap]


def prompts() -> list[list[int]]:
    """Three texts of `LONGEST` tokens, cut at many places, some with another ending; and prompts that share nothing."""
    rng = random.Random(5)
    texts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(LONGEST)] for _ in range(3)]
    lengths = [1, 2, 15, 16, 17, 63, 64, 65, 100, 128, 300, (300 + LONGEST) // 2, LONGEST - 1, LONGEST]
    shared = [text[:length] for text in texts for length in lengths]
    own_ends = [
        texts[0][:n] + [rng.randrange(3, VOCAB_SIZE) for _ in range(7)] for n in (30, 64, LONGEST // 2, LONGEST - 10)
    ]
    return [*shared, *own_ends, [5], texts[1][:64]]


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda kind: make_checkpoint(kind, tmp_path_factory.mktemp(kind), seed=3))


@pytest.fixture(scope="module")
def expected_of() -> Callable[[Path], list[list[int]]]:
    return cache(expected_tokens)


def expected_tokens(checkpoint: Path) -> list[list[int]]:
    """What transformers generates greedily for each prompt alone, in float32."""
    model = load_reference(checkpoint)
    answers = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize(("kind", "page_size", "chunk"), POINTS)
def test_greedy_tokens_equal_those_of_transformers(
    checkpoint_of: Callable[[str], Path],
    expected_of: Callable[[Path], list[list[int]]],
    kind: str,
    page_size: int,
    chunk: int,
) -> None:
    checkpoint = checkpoint_of(kind)
    expected = expected_of(checkpoint)
    engine = Engine(
        EngineConfig(
            model=str(checkpoint),
            page_size=page_size,
            chunked_prefill_size=chunk,
            scheduling=SchedulingConfig(max_prefill_tokens=CONTEXT),
            context_length=CONTEXT,
            max_running_requests=48,
            max_total_tokens=24_000,
            decode_buckets=(48,),
            extend_buckets=(64,) if chunk == 64 else (CONTEXT,),
            compilation_cache_dir="",
        )
    )
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts())]
    assert len(requests) >= 48
    for radix, overlap in LOOPS:
        mailbox = serve(engine, [requests], radix=radix, overlap=overlap)
        assert outputs(mailbox, requests) == expected, (radix, overlap)
    for prompt in (requests[i].prompt_ids for i in (0, 4, 7, 10, 13)):
        difference = np.abs(first_logits(engine, prompt) - reference_logits(checkpoint, prompt)[-1].numpy())
        assert difference.max() < 1e-3
    assert engine.recompiles == 0
