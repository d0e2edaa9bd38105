"""Prefixes in host memory with a real engine: tokens are the plain model's, and what is loaded is not computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jaxsgl import wiring
from jaxsgl.config.engine import EngineConfig
from jaxsgl.config.features import HostKvConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.errors import ConfigError
from jaxsgl.messages.replies import Reply
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.testing.engine import ScriptedMailbox
from jaxsgl.weights import note_of_files
from jaxsgl.wiring import build, build_scheduler, file_of_prefixes, keep_prefixes, whole
from tests.engine.conftest import ConfigMaker
from tests.engine.driving import Plain, greedy_programs

PROMPTS = [[3 + (7 * i + 11 * n) % 90 for i in range(40)] for n in range(4)]


@pytest.fixture(scope="module")
def flags(tiny_config: ConfigMaker) -> EngineConfig:
    """The pool holds two of four conversations."""
    host = HostKvConfig(host_kv_gib=0.001, host_kv_write_policy="write_through")
    return tiny_config(max_total_tokens=96, decode_buckets=(2,), max_running_requests=2, host_kv=host)


@pytest.fixture(scope="module")
def built(flags: EngineConfig) -> Iterator[tuple[Engine, Scheduler]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        greedy_programs(monkeypatch)
        engine, scheduler = build(flags)
    yield whole(engine), scheduler.ranks[0]
    engine.close()


def answer(engine: Engine, scheduler: Scheduler, name: str, prompt: list[int]) -> tuple[list[int], Reply]:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    mailbox = ScriptedMailbox([[Request(name, prompt, params)]])
    run_loop(scheduler, engine, mailbox, 1, check_every_step=True)
    return mailbox.output_ids(name), mailbox.replies[-1]


def test_tokens_are_right_after_eviction_and_loading(built: tuple[Engine, Scheduler], plain: Plain) -> None:
    engine, scheduler = built
    recompiles = engine.recompiles
    chats, cached = [prompt.copy() for prompt in PROMPTS], []
    answers = []
    for turn in range(2):
        for i, chat in enumerate(chats):
            tokens, reply = answer(engine, scheduler, f"{turn}-{i}", chat)
            answers.append((chat.copy(), tokens))
            cached.append(reply.cached_tokens)
            chat += [*tokens, 5, 6, 7]
    host = scheduler.load(0).host
    assert host.loaded_tokens > 80 and host.given_up == 0
    assert cached[:4] == [0] * 4 and min(cached[4:]) >= 40, "of each conversation only the new turn is computed"
    assert engine.recompiles == recompiles
    for prompt, tokens in answers:
        assert tokens == plain.generate(prompt, 4)


def test_host_memory_that_fits_nothing_or_nowhere_is_refused(
    built: tuple[Engine, Scheduler], flags: EngineConfig
) -> None:
    engine, _ = built
    for gib, said in (
        (1e6, r"--host-kv-gib 1e\+06 takes .* are free: lower --host-kv-gib"),
        (1e-9, r"--host-kv-gib 1e-09 holds no page of .*: raise it"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_scheduler(replace(flags, host_kv=HostKvConfig(host_kv_gib=gib)), engine)


def test_sglangs_switch_takes_twice_the_pool(built: tuple[Engine, Scheduler], flags: EngineConfig) -> None:
    engine, _ = built
    scheduler = build_scheduler(replace(flags, host_kv=HostKvConfig(enable_hierarchical_cache=True)), engine)
    assert scheduler.load(0).host.total_tokens == 2 * 4 * engine.capacity.num_pages


def test_prefixes_are_kept_for_the_files_that_were_read_whatever_lies_in_their_place(
    built: tuple[Engine, Scheduler], flags: EngineConfig, tmp_path: Path
) -> None:
    """A checkpoint that is replaced while it is served finds nothing of the one before at the next start."""
    engine, _ = built
    flags = replace(flags, host_kv=replace(flags.host_kv, kv_file=str(tmp_path / "kept")))
    at_start, folder = file_of_prefixes(flags, engine), Path(engine.info.model_path)
    replaced = folder / "model.safetensors"
    replaced.write_text("other weights")
    try:
        (scheduler,) = build_scheduler(flags, engine).ranks
        answer(engine, scheduler, "kept", PROMPTS[0])
        keep_prefixes(flags, engine, scheduler)
        assert list((tmp_path / "kept").iterdir()) == [at_start]
        assert note_of_files(folder) != engine.files
    finally:
        replaced.unlink()


def test_a_scheduler_in_the_place_of_another_has_its_memory_and_knows_of_other_weights(
    built: tuple[Engine, Scheduler], flags: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a call of `LLM` that failed: it finds nothing of the first weights, in the file of the start neither."""
    engine, _ = built
    flags = replace(flags, host_kv=replace(flags.host_kv, kv_file=str(tmp_path / "kept")))
    (former,) = build_scheduler(flags, engine).ranks
    tokens, _ = answer(engine, former, "before", PROMPTS[0])
    keep_prefixes(flags, engine, former)
    former.retire_cache()
    monkeypatch.setattr(wiring, "free_host_bytes", lambda: 0)
    (scheduler,) = build_scheduler(flags, engine, limited=False, former=former).ranks
    assert not scheduler.cache.is_original and scheduler.tier is not None and former.tier is not None
    assert scheduler.tier.host.arena is former.tier.host.arena
    again, reply = answer(engine, scheduler, "after", PROMPTS[0])
    assert again == tokens and reply.cached_tokens == 0
