"""What adds up over GPUs: XLA's kernels where a trial shows that they are right and faster, else NCCL."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine.kernels import sums, sums_trial
from jaxsgl.engine.kernels.sums import FLAG, KERNELS, NCCL, NEWER_FLAG, SUMS, SumsTrial
from jaxsgl.engine.kernels.tester import Watched, watch
from jaxsgl.engine.weight_store import read_arch
from jaxsgl.weights import resolve_model_folder
from pallas_kernels.selftest.report import Ended, News, Request, Verdict
from tests.engine.conftest import ConfigMaker

# A process that has tried sums by what XLA_FLAGS name, without JAX; it gets seconds of them as arguments.
TRIED = f"""
import json, os, sys, time
request = json.loads(sys.stdin.readline())
backend = request["choice"]["{SUMS}"]
assert os.environ["XLA_FLAGS"].endswith("{FLAG}=" + {{"{NCCL}": "false", "{KERNELS}": "true"}}[backend])
assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1", os.environ["CUDA_VISIBLE_DEVICES"]
print(json.dumps({{"kind": "Begun", "op": "{SUMS}", "backend": backend, "case": "32 rows"}}), flush=True)
us = json.loads(sys.argv[1])[backend]
time.sleep(600 if us == "hangs" else 0)
words = dict(verdict="passed", us=us) if isinstance(us, list) else dict(verdict=us)
print(json.dumps({{"kind": "Verdict", "op": "{SUMS}", "backend": backend, **words}}), flush=True)
print(json.dumps({{"kind": "Ended"}}), flush=True)
"""


@pytest.fixture
def config(tiny_config: ConfigMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """As of an engine on two GPUs before JAX starts."""
    monkeypatch.setattr(sums, "is_running", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "--of-a-user=1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tiny_config(tp=2, compilation_cache_dir=str(tmp_path / "cache"))


def flags_after(config: EngineConfig, limit_s: float = 60, **us: Any) -> str:
    """XLA_FLAGS after a trial in which sums take so many microseconds, or end like this."""
    found = json.dumps({NCCL: us["nccl"], KERNELS: us["kernels"]})
    trial = SumsTrial("gpu", limit_s, lambda: "two GPUs", (sys.executable, "-c", TRIED, found))
    trial.set_flag(config, read_arch(config, resolve_model_folder(config.model, None)))
    return os.environ["XLA_FLAGS"]


def test_kernels_that_are_right_and_faster_add_up(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    found = flags_after(config, nccl=[21.0, 22.0, 30.0], kernels=[11.0, 14.0, 32.0])
    assert found == f"--of-a-user=1 {FLAG}=true"
    assert f"{KERNELS} adds up over GPUs: for 1, 32, 256 rows of a step took {NCCL} 21.0, 22.0, 30.0 us" in caplog.text


@pytest.mark.parametrize("kernels", [[31.0, 31.0, 31.0], "wrong", "raised", "hangs"])
def test_slower_or_failing_kernels_leave_sums_to_nccl(
    kernels: Any, config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    limit_s = 3 if kernels == "hangs" else 60
    assert flags_after(config, limit_s, nccl=[21.0, 22.0, 30.0], kernels=kernels) == "--of-a-user=1"
    named = f"sums over GPUs by {KERNELS} failed their trial ({'hung' if kernels == 'hangs' else kernels}"
    assert (named in caplog.text) == isinstance(kernels, str)


def test_a_trial_is_kept_between_starts(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = flags_after(config, nccl=[21.0], kernels=[11.0])
    monkeypatch.setenv("XLA_FLAGS", "--of-a-user=1")
    assert flags_after(config, nccl="wrong", kernels="wrong") == first


@pytest.mark.parametrize(
    ("platform", "flags", "in_xla"),
    [
        ("gpu", {"tp": 1}, ""),
        ("gpu", {"enable_deterministic_inference": True}, ""),
        ("gpu", {"skip_kernel_test": True}, ""),
        ("gpu", {}, f"{FLAG}=false"),
        ("gpu", {}, f"{NEWER_FLAG}=ALL_GATHER"),
        ("tpu", {}, ""),
        (None, {}, ""),
    ],
)
def test_nothing_is_tried_where_xla_has_no_kernels_or_a_flag_has_decided(
    platform: str | None, flags: dict[str, Any], in_xla: str, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", in_xla)
    assert not SumsTrial(platform, 1, str).may_help(dataclasses.replace(config, **flags))


# The process, with sums that leave out the last device of each rank.
WITHOUT_THE_LAST = """
import jax, jax.numpy as jnp
from jaxsgl.engine.kernels import sums_trial
whole = jax.lax.psum
jax.lax.psum = lambda x, axis: whole(jnp.where(jax.lax.axis_index(axis) == 1, 0, x), axis)
sums_trial.answer(sums_trial.test)
"""


def tried(*code: str) -> Watched:
    """What the process finds on four devices of a CPU in two ranks."""
    sizes = {"num_devices": 4, "num_ranks": 2, "hidden_size": 24, "rows": [1, 3]}
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = (sys.executable, "-P", *code) if code else SumsTrial("cpu", 1, str).command
    return watch(command, env, Request("cpu", sizes, {SUMS: NCCL}), limit_s=300)


def test_right_sums_pass_and_are_timed() -> None:
    (verdict,), problem = tried()
    assert (verdict.backend, verdict.verdict, problem) == (NCCL, "passed", "")
    assert len(verdict.us) == 2 and min(verdict.us) > 0


def test_sums_without_a_device_are_wrong() -> None:
    assert tried("-c", WITHOUT_THE_LAST).verdicts == (Verdict(SUMS, NCCL, "wrong", "sums of 1 rows are wrong"),)


def test_too_few_devices_are_no_verdict() -> None:
    news: list[News] = []
    sums_trial.test(Request("gpu", {"num_devices": 2}, {SUMS: NCCL}), news.append)
    (end,) = news
    assert isinstance(end, Ended) and "in place of 2 gpus" in end.problem
