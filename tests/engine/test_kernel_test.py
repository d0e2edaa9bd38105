"""Kernels that are wrong, raise, crash or hang are named and replaced before the engine starts."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.kernels.choice import asked_kernels
from jaxsgl.engine.kernels.tester import KernelTester, child_variables
from jaxsgl.engine.start import devices
from jaxsgl.engine.weight_store import read_arch
from jaxsgl.errors import ConfigError
from jaxsgl.weights import resolve_model_folder
from pallas_kernels import KernelChoice
from pallas_kernels.selftest.report import Begun, Verdict, parse_news
from tests.checkpoints import configuration
from tests.engine.conftest import MODEL, ConfigMaker
from tests.engine.driving import Driver, greedy_engine
from tests.grids import daily

EXTEND, QUANTIZED = "paged_extend_attention", "quantized_product"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose attention C++ computes."""
    folder = tmp_path_factory.mktemp("native_model")
    (folder / "config.json").write_text(json.dumps(MODEL | {"head_dim": 32, "dtype": "bfloat16"}))
    return folder


@pytest.fixture
def config(folder: Path, tiny_config: ConfigMaker, tmp_path: Path) -> EngineConfig:
    return tiny_config(model=str(folder), dtype="bfloat16", compilation_cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def counter(tmp_path: Path) -> Path:
    return tmp_path / "processes"


def make_tester(how: str, counter: Path, op: str = EXTEND) -> KernelTester:
    """As on an accelerator, in a process whose kernel of `op` (by default an extend in C++) fails like this."""
    command = (sys.executable, "-P", "-m", "tests.engine.failing_kernels", how, str(counter), op)
    return KernelTester("cpu", command, limit_s=60)


def outcome_of(tester: KernelTester, config: EngineConfig) -> tuple[KernelChoice, tuple[Verdict, ...]]:
    arch = read_arch(config, resolve_model_folder(config.model, None))
    return tester.tested(config, arch, asked_kernels(config, arch))


@pytest.mark.parametrize(
    ("how", "verdict", "note"),
    [
        ("wrong", "wrong", "ragged: error .* of a row's norm, allowed 2e-02"),
        ("raises", "raised", "ragged: RuntimeError: no such instruction"),
        ("crashes", "crashed", "ragged: its process ended with signal 11"),
    ],
)
def test_a_kernel_that_fails_is_named_and_xla_takes_its_place(
    how: str, verdict: str, note: str, config: EngineConfig, counter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    choice, verdicts = outcome_of(make_tester(how, counter), config)
    assert choice == KernelChoice(paged_extend_attention="xla")
    assert [(each.op, each.backend, each.verdict) for each in verdicts] == [
        (EXTEND, "native", verdict),
        (EXTEND, "xla", "untested"),
    ]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert f"the kernel of {EXTEND} on native failed its test ({verdict}: " in warning
    assert "xla takes its place" in warning
    assert re.search(note, warning)


@pytest.fixture
def in_groups(tiny_config: ConfigMaker, tmp_path: Path) -> EngineConfig:
    """A model with FP8 weights in blocks."""
    blocks = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"head_dim": 32, "quantization_config": blocks}))
    return tiny_config(model=str(tmp_path), dtype="bfloat16", compilation_cache_dir=str(tmp_path / "cache"))


@pytest.mark.parametrize("how", daily(["wrong", "raises", "hangs"], every=3))
def test_a_product_of_weights_in_groups_that_fails_is_named_and_xla_takes_its_place(
    how: str, in_groups: EngineConfig, counter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    verdict = {"raises": "raised", "hangs": "hung"}.get(how, how)
    tester = make_tester(how, counter, op=QUANTIZED)
    if how == "hangs":
        tester = KernelTester("cpu", (sys.executable, "-c", HANGS, QUANTIZED, "triton"), limit_s=3)
    choice, verdicts = outcome_of(tester, in_groups)
    assert choice == KernelChoice(quantized_product="xla")
    assert [(each.op, each.backend, each.verdict) for each in verdicts] == [
        (QUANTIZED, "triton", verdict),
        (QUANTIZED, "xla", "untested"),
    ]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert f"the kernel of {QUANTIZED} on triton failed its test ({verdict}: " in warning
    assert "xla takes its place" in warning


# Imports nothing, so that it is silent for no other reason.
HANGS = """
import json, sys, time
op, backend = sys.argv[1:]
if not json.loads(sys.stdin.readline())["known"]:
    print(json.dumps({"kind": "Begun", "op": op, "backend": backend, "case": "ragged"}), flush=True)
    time.sleep(600)
print(json.dumps({"kind": "Verdict", "op": op, "backend": "xla", "verdict": "untested"}), flush=True)
print(json.dumps({"kind": "Ended"}), flush=True)
"""


def test_an_engine_whose_kernel_hangs_is_ready_and_its_tokens_are_right(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = {0: [3, 5, 7], 1: [11, 13, 17, 19, 23]}
    hangs = KernelTester("cpu", (sys.executable, "-c", HANGS, EXTEND, "native"), limit_s=3)
    found = {}
    for backend, tester in (("xla", hangs), ("auto", KernelTester(None))):
        with greedy_engine(config, kernel_tester=tester) as engine:
            found[backend] = Driver(engine).generate(prompts, 4)
            assert engine.programs.spec.kernels.paged_extend_attention == backend
    assert found["xla"] == found["auto"]
    assert (
        f"{EXTEND} on native failed its test (hung: ragged: no answer within 3 s): xla takes its place" in caplog.text
    )


# Imports nothing, as HANGS.
SLOW = """
import json, sys, time
sys.stdin.readline()
for case in ("ragged", "one token", "long"):
    print(json.dumps({"kind": "Begun", "op": "store_kv", "backend": "triton", "case": case}), flush=True)
    time.sleep(2)
print(json.dumps({"kind": "Verdict", "op": "store_kv", "backend": "triton", "verdict": "passed"}), flush=True)
print(json.dumps({"kind": "Ended"}), flush=True)
"""


def test_a_kernel_of_many_cases_may_take_longer_than_one_may(config: EngineConfig) -> None:
    tester = KernelTester("cpu", (sys.executable, "-c", SLOW), limit_s=5)
    assert outcome_of(tester, config) == (KernelChoice(), (Verdict("store_kv", "triton", "passed"),))


KILLED = """
import os, signal, sys
from pallas_kernels.selftest.report import Begun, news_line
sys.stdin.readline()
sys.stdout.write(news_line(Begun("store_kv", "triton", "ragged")))
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_the_system_kills_is_no_kernels_fault_and_is_not_remembered(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    assert outcome_of(KernelTester("cpu", (sys.executable, "-c", KILLED)), config) == (KernelChoice(), ())
    assert "not all kernels could be tested" in caplog.text and "signal 9" in caplog.text
    assert not list(Path(config.compilation_cache_dir or "").rglob("*.json"))


HOPPER = """
import os, sys
from pallas_kernels.selftest.report import Begun, Ended, Request, Verdict, news_line
request = Request.parse(sys.stdin.readline())
op, tried = "paged_decode_attention", [each.backend for each in request.known]
def say(news):
    sys.stdout.write(news_line(news))
    sys.stdout.flush()
if not tried:
    say(Verdict(op, "mosaic_gpu", "wrong", "error 4e-01"))
elif tried == ["mosaic_gpu"]:
    say(Begun(op, "triton", "ragged"))
    os._exit(3)
else:
    say(Verdict(op, "xla", "untested"))
    say(Verdict("add_and_norm", "triton", "passed"))
    say(Ended())
"""


def test_backends_are_tried_in_order_and_the_rest_is_tested_by_the_next_process(config: EngineConfig) -> None:
    config = dataclasses.replace(config, compilation_cache_dir="")
    choice, verdicts = outcome_of(KernelTester("gpu", (sys.executable, "-c", HOPPER)), config)
    assert choice == KernelChoice(paged_decode_attention="xla")
    assert [(each.backend, each.verdict) for each in verdicts] == [
        ("mosaic_gpu", "wrong"), ("triton", "crashed"), ("xla", "untested"), ("triton", "passed"),
    ]  # fmt: skip


def test_verdicts_are_kept_between_starts(
    config: EngineConfig, counter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = outcome_of(make_tester("raises", counter), config)
    started = counter.read_text().splitlines()
    caplog.clear()
    assert outcome_of(make_tester("raises", counter), config) == first
    assert counter.read_text().splitlines() == started
    assert "to test it again" in caplog.text  # the warning comes at each start


def test_a_change_of_shapes_or_of_the_machine_is_tested_anew(
    config: EngineConfig, folder: Path, tiny_config: ConfigMaker, counter: Path
) -> None:
    tester = make_tester("right", counter)
    outcome_of(tester, config)
    other = tiny_config(
        model=str(folder), dtype="bfloat16", page_size=8, compilation_cache_dir=config.compilation_cache_dir
    )
    outcome_of(tester, other)
    outcome_of(KernelTester("cpu", tester.command, machine=lambda: "a newer driver"), config)
    assert len(counter.read_text().splitlines()) == 3


@pytest.mark.parametrize("flags", daily([{"kernels": ("extend=native",)}, {"attention_backend": "native"}], every=2))
def test_a_kernel_that_a_flag_names_and_that_fails_ends_the_start(
    flags: dict[str, object], folder: Path, tiny_config: ConfigMaker, counter: Path
) -> None:
    config = tiny_config(model=str(folder), dtype="bfloat16", **flags)
    message = f"(--kernels extend=|--attention-backend )native: {EXTEND} on native failed its test at the start .*: "
    with pytest.raises(ConfigError, match=message + "give another backend, or auto"):
        outcome_of(make_tester("raises", counter), config)
    assert len(counter.read_text().splitlines()) == 1


def test_a_process_that_cannot_start_leaves_the_choice_and_is_not_remembered(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    tester = KernelTester("cpu", (sys.executable, "-c", "raise SystemExit('no device is free')"))
    assert outcome_of(tester, config) == (KernelChoice(), ())
    assert "not all kernels could be tested" in caplog.text and "no device is free" in caplog.text
    assert not list(Path(config.compilation_cache_dir or "").rglob("*.json"))


def test_ranks_test_attention_as_their_own_devices_share_it_and_experts_as_all_do(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(configuration("qwen3_moe") | sizes))

    def shapes(**flags: Any) -> Mapping[str, Any]:
        config = EngineConfig(model=str(tmp_path), quantization="int8", **flags)
        arch = read_arch(config, tmp_path)
        return KernelTester("gpu").request(config, arch, asked_kernels(config, arch)).shapes

    of_all, of_rank = shapes(tp=4), shapes(tp=2)
    found = shapes(tp=4, dp_size=2, enable_dp_attention=True)
    attention = slice(0, 2)  # of the matrices of a layer
    assert found["num_kv_heads"] == of_rank["num_kv_heads"] == 1
    assert found["matrices"][attention] == of_rank["matrices"][attention] != of_all["matrices"][attention]
    assert found["matrices"][2:] == of_all["matrices"][2:] and found["experts"] == of_all["experts"]


def test_a_flag_starts_without_testing(folder: Path, tiny_config: ConfigMaker) -> None:
    config = tiny_config(model=str(folder), dtype="bfloat16", skip_kernel_test=True)
    assert outcome_of(KernelTester("cpu", ("no-such-program",)), config) == (KernelChoice(), ())


def test_a_cpu_starts_no_process(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxsgl.engine.kernels.tester.watch", lambda *_: pytest.fail("a process was started"))
    assert devices.accelerator() is None
    assert outcome_of(KernelTester.of_this_machine(), config) == (KernelChoice(), ())


def test_a_process_that_hangs_ends_with_the_one_that_started_it(config: EngineConfig, counter: Path) -> None:
    arch = read_arch(config, resolve_model_folder(config.model, None))
    tester = make_tester("hangs", counter)
    pipe = subprocess.PIPE
    with subprocess.Popen(tester.command, stdin=pipe, stdout=pipe, env=child_variables(config)) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(tester.request(config, arch, KernelChoice()).line().encode() + b"\n")
        process.stdin.flush()
        assert parse_news(process.stdout.readline().decode()) == Begun(EXTEND, "native", "arrays")
        process.stdin.close()
        assert process.wait(20) == 1
