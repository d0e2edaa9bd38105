"""A draft model that is the model itself drafts just what comes next: a token in the wrong place would show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxsgl.batch.build import Work
from jaxsgl.batch.inputs import StepInputs
from jaxsgl.config.features import HostKvConfig, SpeculationConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.errors import ConfigError
from tests.engine.conftest import MODEL, ConfigMaker
from tests.engine.driving import Driver, Plain, few_programs
from tests.grids import NIGHTLY

PROMPTS = {0: list(range(3, 20)), 1: [7], 2: [9, 8, 7, 6, 5, 4, 3], 3: list(range(90, 70, -1))}
NUM_DRAFTS = 6  # more than a page has tokens


def drafting(folder: Path | str) -> SpeculationConfig:
    return SpeculationConfig("STANDALONE", NUM_DRAFTS, speculative_draft_model_path=str(folder))


@pytest.fixture(scope="module")
def driver(tiny_config: ConfigMaker) -> Iterator[Driver]:
    """Random weights of the same seed on both sides."""
    flags = drafting(tiny_config().model)
    with pytest.MonkeyPatch.context() as monkeypatch:
        few_programs(monkeypatch)
        engine = Engine(tiny_config(speculation=flags, grammar_backend="none"), progress=False)
    yield Driver(engine)
    engine.close()


def drafted(driver: Driver, inputs: StepInputs) -> list[list[int]]:
    return driver.engine.submit(replace(inputs, drafts=True)).drafts().tolist()


@pytest.mark.parametrize("chunk", [16, 7])
def test_it_drafts_what_the_model_says_after_a_prompt_in_chunks(driver: Driver, plain: Plain, chunk: int) -> None:
    prompt = PROMPTS[3]
    for start in range(0, len(prompt), chunk):
        drafts = drafted(driver, driver.extend((3, prompt[start : start + chunk], start)))
    assert drafts == [plain.generate(prompt, 1 + NUM_DRAFTS)[1:]]


@pytest.mark.parametrize("num_right", [0, 2, 5])
def test_it_drafts_what_the_model_says_after_decode_and_verify_steps(
    driver: Driver, plain: Plain, num_right: int
) -> None:
    answers = {row: plain.generate(prompt, 20) for row, prompt in PROMPTS.items()}
    driver.generate(PROMPTS, 1)
    drafts = drafted(driver, driver.decode({row: len(prompt) for row, prompt in PROMPTS.items()}))
    assert drafts == [answer[2 : 2 + NUM_DRAFTS] for answer in answers.values()]
    works = []
    for row, prompt in PROMPTS.items():
        wrong = [(token + 1) % 101 for token in answers[row][2 + num_right : 7]]
        ids = [*answers[row][1 : 2 + num_right], *wrong]
        works.append(Work(row, np.array(ids, np.int32), len(prompt) + 1, sample=True))
    drafts = drafted(driver, driver.builder.verify(works))
    kept = 3 + num_right
    assert drafts == [answer[kept : kept + NUM_DRAFTS] for answer in answers.values()]
    drafts = drafted(driver, driver.decode({row: len(prompt) + kept - 1 for row, prompt in PROMPTS.items()}))
    assert drafts == [answer[kept + 1 : kept + 1 + NUM_DRAFTS] for answer in answers.values()]


@pytest.mark.skipif(not NIGHTLY, reason="by night: another engine")
def test_in_a_cache_in_float8_it_drafts_what_the_model_says_there(tiny_config: ConfigMaker) -> None:
    flags = drafting(tiny_config().model)
    engine = Engine(tiny_config(speculation=flags, grammar_backend="none", kv_cache_dtype="fp8_e4m3"), progress=False)
    own = Driver(engine)
    answers = own.generate(PROMPTS, 12)
    own.generate(PROMPTS, 1)
    for place in range(3):
        drafts = drafted(own, own.decode({row: len(prompt) + place for row, prompt in PROMPTS.items()}))
        assert drafts == [answer[2 + place : 2 + place + NUM_DRAFTS] for answer in answers.values()]
    engine.close()


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"vocab_size": 200}, {}, "has 200 tokens, but Qwen3ForCausalLM 101: take a model of the same tokenizer"),
        ({"max_position_embeddings": 32}, {}, "was made for 32 tokens: give --context-length 32 or less"),
        ({"num_key_value_heads": 1}, {"host_kv": HostKvConfig(host_kv_gib=0.001)}, "keeps pages of one form"),
    ],
)
def test_models_that_cannot_draft_for_it_are_refused(
    changes: dict[str, Any], flags: dict[str, Any], message: str, tmp_path: Path, tiny_config: ConfigMaker
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | changes))
    with pytest.raises(ConfigError, match=message):
        Engine(tiny_config(speculation=drafting(tmp_path), **flags), progress=False)
