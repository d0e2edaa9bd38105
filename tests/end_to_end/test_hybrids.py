"""Models with gated delta-nets answer as transformers does: ragged prompts, in odd chunks, after retractions."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxsgl.batch.inputs import Bucket
from jaxsgl.config.engine import EngineConfig, SchedulingConfig
from jaxsgl.config.features import DisaggregationConfig, HostKvConfig, LoraConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.engine.programs import ProgramKey
from jaxsgl.errors import ConfigError
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.testing.engine import ScriptedMailbox
from tests.checkpoint_kinds import HYBRID_KINDS, two_layers
from tests.checkpoints import make_checkpoint
from tests.end_to_end.offline import ends, first_logits, new_scheduler, outputs, serve
from tests.end_to_end.test_families import ATOL, NEW_TOKENS, logits_of, prompts
from tests.grids import NIGHTLY, daily

pytestmark = [pytest.mark.device, pytest.mark.timeout(900), pytest.mark.usefixtures("greedy_steps_by_day")]

GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
KINDS = daily(HYBRID_KINDS, every=7)


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    sizes = {} if NIGHTLY else two_layers(request.param)
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), seed=3, **sizes)
    engine = Engine(
        EngineConfig(
            model=str(folder),
            chunked_prefill_size=96,  # so that chunks end inside pages, too
            context_length=512,
            max_running_requests=32,
            max_total_tokens=8192,
            decode_buckets=(32,),
            extend_buckets=(96,),
            decode_steps=4,
            grammar_backend="none",
            compilation_cache_dir="",
        ),
        progress=False,
    )
    yield engine
    engine.close()


def test_greedy_tokens_and_logits_equal_those_of_transformers(engine: Engine) -> None:
    requests = [Request(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts())]
    answers = outputs(serve(engine, [requests]), requests)
    whole = [[*request.prompt_ids, *answer] for request, answer in zip(requests, answers, strict=True)]
    logits = logits_of(Path(engine.info.model_path), whole)
    for request, answer, of_one in zip(requests, answers, logits, strict=True):
        first = len(request.prompt_ids) - 1
        assert of_one[first : first + NEW_TOKENS].argmax(axis=-1).tolist() == answer, first + 1
    assert len(set(map(tuple, answers))) > 20  # else any model would agree
    for i in range(0, len(requests), 5):
        last = len(requests[i].prompt_ids) - 1
        np.testing.assert_allclose(first_logits(engine, requests[i].prompt_ids), logits[i][last], atol=ATOL)
    mixed: dict[str, Any] = {"config": SchedulingConfig(enable_mixed_chunk=True)}
    for changes in ({"retract_every": 5}, {"overlap": False}, {"decode_steps": 1}, mixed):
        assert outputs(serve(engine, [requests], **changes), requests) == answers, changes
    assert engine.recompiles == 0


def test_a_prefix_that_ends_at_a_state_yields_the_tokens_of_the_whole_prompt(engine: Engine) -> None:
    """A shared beginning from the third request on, and each turn of a chat, next to requests without a cache."""
    page, vocab = engine.capacity.page_size, engine.capacity.vocab_size
    rng = np.random.default_rng(3)
    shared = rng.integers(3, vocab, 2 * page + 5).tolist()
    tails = rng.integers(3, vocab, (4, 70)).tolist()
    prompts = [*([*shared, *tail] for tail in tails), shared]
    params = SamplingParams(temperature=0.0, max_tokens=page, ignore_eos=True)
    first = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    script: list[list[Any]] = [each for request in first for each in ([request], *[[]] * 80)]
    scheduler = new_scheduler(engine, radix=True)
    mailbox = ScriptedMailbox(script)
    run_loop(scheduler, engine, mailbox, depth=1)
    answers = outputs(mailbox, first)
    cached = [ends(mailbox)[request.request_id].cached_tokens for request in first]
    assert cached == [0, 0, *[2 * page] * 3]
    turns = [[*prompt, *answer, 7, 8, 9] for prompt, answer in zip(prompts, answers, strict=True)]
    second = [Request(f"{i} again", prompt, params) for i, prompt in enumerate(turns)]
    mailbox = ScriptedMailbox([second])
    run_loop(scheduler, engine, mailbox, depth=1)
    found, whole = outputs(mailbox, second), outputs(serve(engine, [second], radix=False), second)  # another's pages
    assert answers == outputs(serve(engine, [first], radix=False), first)
    # Decodes sum in another order than blocks do: between experts whose shares are nearly equal, that may decide.
    assert found == whole or (engine.arch.mixture is not None and sum(map(operator.eq, found, whole)) > 2)
    for request, turn in zip(second, turns, strict=True):
        stored = len(turn) - 4  # the last token of an answer has no state
        assert ends(mailbox)[request.request_id].cached_tokens == stored - stored % page
    assert engine.recompiles == 0


def test_no_program_copies_the_states(engine: Engine) -> None:
    """They are written in place, whether one token, several steps or chunks move them."""
    keys = [key for key in engine.compiled.compilations if isinstance(key.shape, Bucket)]
    seen = {(key.shape.kind, key.shape.num_steps) for key in keys if isinstance(key.shape, Bucket)}
    assert seen >= {("decode", 1), ("decode", 4), ("extend", 1)} and not copying_states(engine, keys)


def copying_states(engine: Engine, keys: Iterable[ProgramKey]) -> list[ProgramKey]:
    """Those of the programs, all of which take states, that copy all of them."""
    running = engine._runner.state.running
    assert running is not None
    dims = {",".join(map(str, array.shape)) for array in (*running.matrices, *running.inputs)}
    is_copy = re.compile(rf"= f32\[(?:{'|'.join(dims)})\]\S* (?:copy|copy-start)\(")
    texts = {key: engine.compiled[key].as_text() or "" for key in keys}
    assert all(f"f32[{each}]" in text for text in texts.values() for each in dims), "a program takes no states"
    return [key for key, text in texts.items() if is_copy.search(text)]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"host_kv": HostKvConfig(host_kv_gib=1.0)}, "--host-kv-gib"),
        ({"disaggregation": DisaggregationConfig(disaggregation_mode="prefill")}, "--disaggregation-mode"),
        ({"lora": LoraConfig(enable_lora=True)}, "--enable-lora"),
        ({"page_size": 96}, "--page-size is 96"),
    ],
)
def test_flags_that_need_more_than_pages_are_refused_at_the_start(
    flags: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = make_checkpoint("qwen3_5", tmp_path)
    with pytest.raises(ConfigError, match=f"{named}.*leave it out"):
        Engine(EngineConfig(model=str(folder), **flags), progress=False)
