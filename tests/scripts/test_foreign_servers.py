"""Servers of other projects differ from ours: they are measured all the same, or the reason why not is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_peers
import pytest
from bench.peers.contender import UNTOLD, CannotRun, Setup
from bench.peers.endpoint import FLUSHED_BY, MAX_ERROR, NOTHING, Endpoint

from jaxsgl.bench import __main__ as bench_serving
from jaxsgl.bench.load import DatasetConfig
from jaxsgl.bench.requests import Job
from tests.scripts.foreign_server import Foreign, running

RANDOM = ("--num-prompts", 4, "--random-input-len", 9, "--random-output-len", 6, "--random-range-ratio", 1)
TALK = ("--dataset-name", "multi-turn", "--num-prompts", 2, "--turns", 2, "--turn-input-len", 4, "--turn-output-len", 3,
        "--turn-system-len", 5, "--random-range-ratio", 1)  # fmt: skip
JOBS = [Job([5, 6, 7], 2), Job([8, 9], 3)]
SETUP = Setup("nowhere", "cpu", num_threads=1, num_jobs=2, longest=5, total=10, prefix_len=0, scratch="")


def bench(foreign: Foreign, tmp_path: Path, *flags: object) -> dict[str, Any]:
    """The figures of a run; empty if there was none."""
    out = tmp_path / "out.jsonl"
    with running(foreign):
        line = ("--base-url", foreign.url, "--vocab-size", 900, *(flags or RANDOM), "--output-file", out)
        bench_serving.main([str(part) for part in line])
    return dict(json.loads(out.read_text())) if out.exists() else {}


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_streams_may_begin_with_a_role_and_end_without_done(backend: str, tmp_path: Path) -> None:
    found = bench(Foreign(done=False), tmp_path, *RANDOM, "--backend", backend)
    assert (found["completed"], found["total_input_tokens"], found["total_output_tokens"]) == (4, 4 * 9, 4 * 6)
    assert found["tokens_per_chunk"] == 1


def test_completions_get_words_where_the_server_takes_no_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = Foreign(takes_ids=False)
    found = bench(foreign, tmp_path)
    assert (found["completed"], found["total_input_tokens"]) == (4, 4 * 9)
    assert all(len(prompt.split()) == 9 for prompt in foreign.prompts())
    assert "prompts are words" in capsys.readouterr().err


def test_completions_get_ids_where_the_server_takes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign = Foreign()
    bench(foreign, tmp_path)
    assert all(len(prompt) == 9 and isinstance(prompt, list) for prompt in foreign.prompts())
    assert "words" not in capsys.readouterr().err


@pytest.mark.parametrize("takes_ids", [True, False])
def test_a_turn_holds_the_answer_before_it(takes_ids: bool, tmp_path: Path) -> None:
    """It holds the answer's ids if the server tokenizes, as llama.cpp's does; else the answer's text."""
    foreign = Foreign(takes_ids=takes_ids)
    assert bench(foreign, tmp_path, *TALK)["completed"] == 2
    first, second = foreign.prompts()[-2:]
    if takes_ids:
        assert second[: len(first) + 3] == [*first, *map(ord, "aaa")] and len(second) == len(first) + 3 + 4
    else:
        assert second.startswith(f"{first} aaa ") and len(second.split()) == len(first.split()) + 1 + 4


def test_answers_that_end_early_are_counted(tmp_path: Path) -> None:
    found = bench(Foreign(most=4), tmp_path, *RANDOM[:-1], 0.1)
    lengths = [ask.output_len for ask in DatasetConfig(
        num_prompts=4, random_input_len=9, random_output_len=6, random_range_ratio=0.1).asks()]  # fmt: skip
    assert 0 < sum(length > 4 for length in lengths) < 4, "the test needs both"
    assert found["short_answers"] == sum(length > 4 for length in lengths) and found["failed"] == 0


def test_a_refused_field_is_named_and_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not bench(Foreign(refused=("ignore_eos",)), tmp_path)
    assert "422: Unexpected fields: ['ignore_eos']" in capsys.readouterr().err
    assert bench(Foreign(refused=("ignore_eos",)), tmp_path, *RANDOM, "--disable-ignore-eos")["completed"] == 4


@pytest.mark.parametrize(
    ("foreign", "flags", "told"),
    [
        (Foreign(models=None), (), "name it with --model"),
        (Foreign(models=[]), (), "name it with --model"),
        (Foreign(takes_ids=False), ("--model", "x"), "nothing is completed: /v1/completions answered 404: there is no"),
        (Foreign(usage=False), (), "no usage"),
    ],
    ids=["models fail", "no models", "another model", "no usage"],
)
def test_the_reason_why_a_run_is_impossible_is_printed(
    foreign: Foreign, flags: tuple[str, ...], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not bench(foreign, tmp_path, *RANDOM, *flags)
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("replies", "flushed"),
    [
        ({"/flush_cache": b"Cache flushed."}, True),
        ({"/reset_prefix_cache": b'{"success": true}'}, True),
        ({"/reset_prefix_cache": b""}, True),
        ({"/reset_prefix_cache": b'{"success": false}'}, False),
        ({}, False),
    ],
    ids=["SGLang", "vLLM", "older vLLM", "vLLM fails", "no way"],
)
def test_the_prefix_cache_is_flushed_as_the_server_wants_it(
    replies: dict[str, bytes], flushed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bool(bench(Foreign(replies=replies), tmp_path, *RANDOM, "--flush-cache")) == flushed
    assert ("the cache was not flushed" in capsys.readouterr().err) == (not flushed)
    with running(Foreign(replies=replies)) as foreign:
        told = started(foreign).versions()[FLUSHED_BY]
    assert told == (next(iter(replies)) if flushed else NOTHING)


def started(foreign: Foreign) -> Endpoint:
    endpoint = Endpoint(foreign.url)
    endpoint.start(SETUP)
    return endpoint


def test_an_endpoint_is_sent_ids_and_returns_as_many_tokens_as_it_counts() -> None:
    with running(Foreign()) as foreign:
        assert started(foreign).run(JOBS) == [[UNTOLD] * 2, [UNTOLD] * 3]
    assert sorted(body["prompt"] for path, body in foreign.sent if path == "/v1/completions") == [[5, 6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("foreign", "told"),
    [
        (Foreign(models=None), "lists no model: status 500"),
        (Foreign(models=[]), "lists no model: status 200"),
        (Foreign(takes_ids=False), "as token ids and ignore_eos: status 400: prompt must be a string"),
        (Foreign(refused=("ignore_eos",)), "status 422: Unexpected fields: ['ignore_eos']"),
        (Foreign(usage=False), "no usage"),
    ],
    ids=["models fail", "no models", "no ids", "refused", "no usage"],
)
def test_an_endpoint_that_cannot_take_part_says_why_in_a_line(foreign: Foreign, told: str) -> None:
    with running(foreign), pytest.raises(CannotRun) as raised:
        started(foreign).run([Job(list(range(1, 900)), 2)])
    assert told in str(raised.value) and len(str(raised.value)) < MAX_ERROR + 100


def test_the_table_names_endpoints_that_may_have_found_their_prompts_cached() -> None:
    speed = {"median": 1.0, "min": 1.0, "max": 1.0}
    contenders = {
        name: {
            "output_tokens_per_s": speed,
            "output_tokens_per_cpu_s": speed,
            "ratio_of_best_jaxsgl": None,
            "cpu_ratio_of_best_jaxsgl": None,
            "same_tokens": None,
            "versions": versions,
        }
        for name, versions in {"a": {FLUSHED_BY: NOTHING}, "b": {FLUSHED_BY: "/flush_cache"}, "c": {}}.items()
    }
    told = bench_peers.table({"best_jaxsgl": None, "contenders": contenders, "could_not_run": {}})
    assert [line for line in told.splitlines() if FLUSHED_BY in line] == [f"a: {FLUSHED_BY} {NOTHING}"]
