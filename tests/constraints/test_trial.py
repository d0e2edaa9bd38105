"""A grammar is tried in a child process first: what takes too much there never reaches the engine."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest

from jaxsgl.config.engine import BUNDLED_MODEL
from jaxsgl.constraints import trial as trials
from jaxsgl.constraints.compiler import Compiler
from jaxsgl.constraints.trial import Trial
from jaxsgl.errors import EngineUnavailable, InvalidRequest
from jaxsgl.requests import grammar_work
from jaxsgl.requests.grammar import Grammar

VOCABULARY = (Path(BUNDLED_MODEL), 1024, (1021, 1023))
NAMES = [f"p{i}" for i in range(5000)]
LARGE = {
    "type": "object", "properties": {name: {"$ref": "#/$defs/d"} for name in NAMES}, "required": NAMES,
    "$defs": {"d": {"type": "integer"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def trial() -> Trial:
    return Trial(*VOCABULARY, timeout_s=20.0)


def test_what_works_is_measured(trial: Trial) -> None:
    small, large = (trial.run(Grammar("json_schema", json.dumps(schema))) for schema in ({"type": "integer"}, LARGE))
    assert small < 4 << 20 < large < trials.MAX_TRIAL_BYTES // 2


def test_the_compilers_own_refusals_come_back_as_they_are(trial: Trial) -> None:
    bad = Grammar("json_schema", '{"type": "nonsense"}')
    with pytest.raises(InvalidRequest) as here:
        Compiler(*VOCABULARY).compile(bad)
    with pytest.raises(InvalidRequest) as there:
        trial.run(bad)
    assert str(there.value) == str(here.value)


def test_a_grammar_that_takes_too_long_is_refused_in_time(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_limits", trial._limits._replace(cpu_s=0.1))
    trial.start()
    start_s = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"takes more than 0\.1 s of processor time .*--grammar-timeout"):
        trial.run(Grammar("json_schema", json.dumps(LARGE)))
    assert time.monotonic() - start_s < 10.0
    assert trial.run(Grammar("choice", '["a"]')) >= 0


def test_a_grammar_that_would_keep_the_engine_from_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of "aaa..." may belong to any of 600 names: a mask is cheap, and to take a token is not.

    Fast processors stay within the real limits, so the helper's work is done here, with smaller ones.
    """
    monkeypatch.setattr(grammar_work, "CPU_S", 0.1)
    monkeypatch.setattr(grammar_work, "CPU_S_PER_TOKEN", 0.001)
    names = ("folder", "vocab_size", "eos_token_ids")
    try_it = trials.make(msgspec.json.encode(dict(zip(names, VOCABULARY, strict=True)), enc_hook=str))
    rules = "\n".join(f"a{i}: /a/ | /a+/ b{i}?\nb{i}: /a/" for i in range(600))
    ambiguous = Grammar("lark", f"start: {' '.join(f'a{i}?' for i in range(600))}\n{rules}")
    with pytest.raises(InvalidRequest, match=r"the grammar took \d\.\d s for \d+ tokens, for which others wait"):
        try_it(msgspec.json.encode(ambiguous))
    assert int(try_it(msgspec.json.encode(Grammar("choice", '["a"]')))) >= 0


def test_a_grammar_that_others_kept_from_the_processor_may_be_tried_later(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_limits", trial._limits._replace(time_s=0.05))
    with pytest.raises(EngineUnavailable, match=r"within 0\.05 s, in which it got less than 20 s .*: try later"):
        trial.run(Grammar("json_schema", json.dumps(LARGE)))


def test_a_grammar_that_takes_too_much_memory_is_refused(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_limits", trial._limits._replace(memory_bytes=4 << 20))
    with pytest.raises(InvalidRequest, match=r"takes more than 128 MiB of memory"):
        trial.run(Grammar("json_schema", json.dumps(LARGE)))


def test_a_model_without_a_tokenizer_has_no_trial(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no tokenizer\.json"):
        Trial(tmp_path, 1024, (), 20.0).run(Grammar.regex("a"))
