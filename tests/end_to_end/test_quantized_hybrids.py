"""Hybrids in blocks of FP8, as they are published, answer as transformers does with the dequantized weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.models import abstract_model
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.testing.engine import ScriptedMailbox
from tests.checkpoint_kinds import DELTA_KINDS
from tests.end_to_end.offline import ends, first_logits, new_scheduler, outputs, serve
from tests.end_to_end.test_families import ATOL, NEW_TOKENS, logits_of
from tests.grids import daily
from tests.weights.stored_weights import hybrid_in_fp8

pytestmark = [pytest.mark.device, pytest.mark.timeout(900), pytest.mark.usefixtures("greedy_steps_by_day")]

CHUNK = 96  # ends inside pages, too
LENGTHS = (1, 63, 97, 130, 200)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module", params=daily(DELTA_KINDS[::-1], every=3))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = hybrid_in_fp8(request.param, tmp_path_factory.mktemp(request.param))
    engine = Engine(
        EngineConfig(
            model=str(folder),
            dtype="float32",
            chunked_prefill_size=CHUNK,
            context_length=256,
            max_running_requests=8,
            max_total_tokens=4096,
            decode_buckets=(8,),
            extend_buckets=(CHUNK,),
            grammar_backend="none",
            compilation_cache_dir="",
        ),
        progress=False,
    )
    yield engine
    engine.close()


def test_chunks_and_prefixes_yield_the_tokens_of_the_dequantized_weights(engine: Engine) -> None:
    _, params = abstract_model(engine.arch, jnp.dtype("float32"))
    kept = {path[2:] for path, param in nnx.to_flat_state(params) if param.get_metadata().get("format") is not None}
    assert kept >= {("delta_net", "qkvz"), ("delta_net", "output"), ("attention", "qkv"), ("attention", "o")}
    page, vocab = engine.capacity.page_size, engine.capacity.vocab_size
    rng = np.random.default_rng(5)
    shared = rng.integers(3, vocab, 2 * page + 5).tolist()
    prompts = [rng.integers(3, vocab, length).tolist() for length in LENGTHS]
    prompts += [[*shared, *rng.integers(3, vocab, 70).tolist()] for _ in range(3)]
    requests = [Request(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)]
    answers = outputs(serve(engine, [requests], radix=False), requests)
    whole = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    logits = logits_of(Path(engine.info.model_path) / "meant", whole)
    for prompt, answer, of_one in zip(prompts, answers, logits, strict=True):
        last = len(prompt) - 1
        assert of_one[last : last + NEW_TOKENS].argmax(axis=-1).tolist() == answer, len(prompt)
    assert len(set(map(tuple, answers))) == len(answers)  # else any model would agree
    for prompt, of_one in zip(prompts[2:5], logits[2:5], strict=True):
        np.testing.assert_allclose(first_logits(engine, prompt), of_one[len(prompt) - 1], atol=ATOL)
    turns = requests[-3:]
    script: list[list[Any]] = [each for turn in turns for each in ([turn], *[[]] * 20)]
    mailbox = ScriptedMailbox(script)
    run_loop(new_scheduler(engine, radix=True), engine, mailbox, depth=1)
    assert [ends(mailbox)[turn.request_id].cached_tokens for turn in turns] == [0, 0, 2 * page]
    assert outputs(mailbox, turns) == answers[-3:]
    assert engine.recompiles == 0
