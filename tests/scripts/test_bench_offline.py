"""The offline benchmark's figures: where time went, from stamps made by hand and from a run."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from bench.offline.figures import ModelWork, TimeSplit, busy_intervals, host, split, waste
from bench.offline.recording import Recording, RecordingEngine, Step, Turn
from bench.offline.run import record_run, seen_late
from bench.roofline import Roofline

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.engine_api import StepHandle
from jaxsgl.batch.inputs import Bucket, StepInputs
from jaxsgl.batch.outputs import HostOutputs
from jaxsgl.bench.requests import Lengths, greedy_requests, random_jobs
from jaxsgl.messages.replies import Replies
from jaxsgl.scheduler.scheduler import Scheduler
from jaxsgl.scheduler.served_engine import StepsOnly
from jaxsgl.testing.engine import FakeEngine
from tests.scripts.running import run_script

CAPACITY = Capacity(4, 200, 4, 64, 16, 100)
TINY = ("--max-running-requests", 4, "--decode-buckets", 4, "--extend-buckets", 32, "--chunked-prefill-size", 32)


def step(kind: str, num_tokens: int, padded: int, lengths: tuple[int, ...] = (1,), new: tuple[int, ...] = (1,)) -> Step:
    bucket = Bucket("decode" if kind == "decode" else "extend", padded, padded, False)
    return Step(cast(Any, kind), bucket, len(lengths), num_tokens, np.array(lengths), np.array(new), 0.0)


def test_overlapped_steps_keep_the_device_busy_without_a_gap() -> None:
    busy = busy_intervals([(1.0, 3.0), (2.0, 4.5), (4.0, 5.0)])
    assert busy == [(1.0, 3.0), (3.0, 4.5), (4.5, 5.0)]
    assert split((0.0, 6.0), busy, []) == TimeSplit(busy_s=4.0, idle_s=2.0, host_exposed_s=2.0)


def test_launching_and_computing_between_steps_is_idle_time_that_the_host_exposed() -> None:
    busy = busy_intervals([(1.0, 3.0), (4.0, 6.0)])
    assert split((0.0, 7.0), busy, [(1.5, 3.0), (4.0, 6.0)]) == TimeSplit(4.0, 3.0, 3.0)


def test_idle_time_in_which_the_host_still_waited_is_not_the_hosts() -> None:
    busy = busy_intervals([(1.0, 3.0), (4.0, 6.0)])
    found = split((0.0, 7.0), busy, [(1.5, 3.25), (4.0, 6.5)])
    assert found == TimeSplit(4.0, 3.0, 2.25)


def test_a_step_that_was_ready_when_its_submit_returned_takes_no_time() -> None:
    busy = busy_intervals([(2.0, 1.5), (1.8, 3.0)])
    assert busy == [(1.5, 1.5), (1.8, 3.0)]
    assert split((1.0, 3.0), busy, []).busy_s == pytest.approx(1.2)


def test_waste_is_padding_over_real_rows_and_tokens() -> None:
    steps = [step("decode", 6, 8), step("decode", 4, 4), step("extend", 100, 128), step("mixed", 20, 64)]
    assert waste(steps) == {"decode_rows": pytest.approx(0.2), "extend_tokens": pytest.approx(0.6)}
    assert waste(steps[:2])["extend_tokens"] is None


def test_a_step_reads_its_weights_and_real_kv_once() -> None:
    work = ModelWork(layer_params=1000, head_params=100, weight_bytes=2, kv_token_bytes=8, pair_flops=3)
    decode = work.of_step(step("decode", 2, 8, (10, 30), (1, 1)))
    assert (decode.num_bytes, decode.flops) == (2200 + 8 * 40, 2 * (2 * 1000 + 2 * 100) + 3 * 40)
    extend = work.of_step(step("extend", 3, 8, (5,), (3,)))  # tokens 2, 3 and 4 see 3, 4 and 5
    assert extend.flops == 2 * (3 * 1000 + 100) + 3 * 12
    assert Roofline(1e3, 1e6).floor_s(decode) == pytest.approx(2.52)


def test_several_steps_in_one_program_do_the_work_of_single_ones() -> None:
    work = ModelWork(layer_params=1000, head_params=100, weight_bytes=2, kv_token_bytes=8, pair_flops=3)
    three = step("decode", 4, 8, (12, 30), (3, 1))
    three.bucket = replace(three.bucket, num_steps=3)
    first, *others = (step("decode", len(lengths), 8, lengths, (1, 1)) for lengths in ((10, 30), (11,), (12,)))
    for other in others:
        other.new = other.new[:1]
    single = [work.of_step(one) for one in (first, *others)]
    assert work.of_step(three).num_bytes == sum(one.num_bytes for one in single)
    assert work.of_step(three).flops == sum(one.flops for one in single)
    assert waste([three])["decode_rows"] == 3 * 8 / 4 - 1


def test_host_time_is_a_turn_without_its_wait_and_without_recording() -> None:
    read = step("decode", 3, 4, (5, 5, 5), (1, 1, 1))
    read.read_from_s, read.seen_s, read.read_s = 3.0, 8.0, 8.5
    turn = Turn(0.0, 0.0, 10.0, 2.0, 0.5, 1.0, 2.0, 0.25, 9.0, 9.5, read, [read])
    found = host([turn])
    phases = {name: told["median"] for name, told in found["phases_ms"].items()}
    assert phases == {"receive": 500, "launch": 500, "submit": 1000, "collect": 1250, "encode": 500, "rest": 500}
    assert found["wall_ms"]["median"] == 4250 and found["cpu_ms"]["median"] == 2000
    read.seen_s = 2.5  # it was ready before the host waited: reading it is the host's work
    assert host([turn])["phases_ms"]["collect"]["median"] == 6750
    assert host([turn], at_running=3)["turns"] == 1 and host([turn], at_running=4)["turns"] == 0


class OneAtATime:
    """A `FakeEngine` whose steps two threads may wait for: it runs them on the thread that asks."""

    recompiles = 0

    def __init__(self) -> None:
        self._engine = FakeEngine(CAPACITY, step_s=0.002)
        self._lock = threading.Lock()

    def submit(self, inputs: StepInputs) -> "OneAtATime.Handle":
        return self.Handle(self._engine.submit(inputs), self._lock)

    class Handle:
        def __init__(self, handle: StepHandle, lock: threading.Lock) -> None:
            self._handle, self._lock = handle, lock

        def tokens(self) -> np.ndarray:
            with self._lock:
                return self._handle.tokens()

        def outputs(self) -> HostOutputs:
            with self._lock:
                return self._handle.outputs()

        def drafts(self) -> np.ndarray:
            with self._lock:
                return self._handle.drafts()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_recorded_run_serves_every_request_and_stamps_every_step(overlap: bool) -> None:
    buckets = BucketSet.derive(CAPACITY)
    scheduler = Scheduler(CAPACITY, buckets, {0})
    jobs = random_jobs(6, Lengths(3, 20), Lengths(2, 9), CAPACITY.vocab_size)
    recording, news = record_run(scheduler, StepsOnly(cast(Any, OneAtATime())), greedy_requests(jobs), int(overlap))
    replies = [reply for message in news if isinstance(message, Replies) for reply in message.replies]
    assert sum(len(reply.token_ids) for reply in replies) == sum(job.output_len for job in jobs)
    last = news[-1]
    assert isinstance(last, Replies)
    load = last.load
    assert len(recording.steps) == load.totals.steps
    padding = waste(recording.steps)
    assert padding["decode_rows"] == pytest.approx(load.totals.decode_rows_padded / load.totals.decode_rows - 1)
    assert padding["extend_tokens"] == pytest.approx(load.totals.extend_tokens_padded / load.totals.extend_tokens - 1)
    assert sum(len(turn.read) for turn in recording.turns) == len(recording.steps)
    assert all(step.submitted_s < step.ready_s <= step.read_s for step in recording.steps)


class Computing:
    """A step that is ready after a moment, whichever thread waits."""

    def __init__(self) -> None:
        self.ready_s = time.perf_counter() + 0.02

    def tokens(self) -> np.ndarray:
        time.sleep(max(0.0, self.ready_s - time.perf_counter()))
        return np.zeros(1, np.int32)


class ComputingEngine:
    recompiles = 0

    def submit(self, inputs: object) -> Computing:
        return Computing()


def test_a_step_that_gets_ready_while_the_host_computes_is_seen_before_it_is_read() -> None:
    scheduler = Scheduler(CAPACITY, BucketSet.derive(CAPACITY), {0})
    scheduler.receive(greedy_requests(random_jobs(1, Lengths(3, 3), Lengths(2, 2), CAPACITY.vocab_size)))
    inputs = scheduler.launch()
    assert inputs is not None
    recording = Recording()
    engine = RecordingEngine(StepsOnly(cast(Any, ComputingEngine())), recording)
    recording.turn_begins()
    handle = engine.submit(inputs)
    recording.turn_begins()
    until = time.perf_counter() + 0.2
    while time.perf_counter() < until:
        pass
    handle.tokens()
    recording.close()
    (step,) = recording.steps
    assert step.seen_s < step.read_from_s and step.waited_s == 0.0
    assert step.ready_s - step.submitted_s < 0.15


def test_stamps_are_late_by_less_than_a_step_takes() -> None:
    late = seen_late()
    assert 0 < late["seen_late_us"] <= late["seen_late_p99_us"]


def test_a_run_reports_every_figure(tmp_path: Path) -> None:
    report_file = tmp_path / "run.json"
    flags = ("--num", 6, "--input", "8:40", "--output", "4:12", "--at-running", 4, *TINY)
    text = run_script("bench_offline.py", *flags, "--json", report_file).stdout
    report = json.loads(report_file.read_text())
    assert all(word in text for word in ("tokens/s", "device busy", "host per decode step", "padding", "roofline"))
    parts, duration_s, sizes = report["time_split"], report["duration_s"], report["requests"]
    assert parts["busy_s"] + parts["idle_s"] == pytest.approx(duration_s)
    assert parts["busy"] + parts["idle"] == pytest.approx(1)
    assert 0 < parts["host_exposed_s"] <= parts["idle_s"] and parts["busy_s"] > 0
    assert sizes["count"] == 6 and sizes["recompiles"] == 0
    assert report["output_tokens_per_s"] == pytest.approx(sizes["output_tokens"] / duration_s)
    in_and_out = sizes["prompt_tokens"] + sizes["output_tokens"]
    assert report["total_tokens_per_s"] == pytest.approx(in_and_out / duration_s)
    steps = report["steps"]
    assert sum(told["device_s"] for told in steps.values()) == pytest.approx(parts["busy_s"])
    assert report["waste"]["decode_rows"] == pytest.approx(steps["decode"]["padded"] / steps["decode"]["real"] - 1)
    assert steps["extend"]["real"] == sizes["prompt_tokens"] - sizes["cached_prompt_tokens"]
    assert steps["decode"]["real"] >= sizes["output_tokens"] - sizes["count"]
    assert sum(told["count"] for told in report["step_ms"].values()) == sum(told["count"] for told in steps.values())
    assert 0 < report["roofline"]["fraction"] <= report["roofline"]["fraction_of_busy"]
    assert report["host"]["turns"] > 0 and set(report["host_by_rows"]) == {"4"}
    assert report["host"]["wall_ms"]["median"] > 0 and report["recording"]["loop_us"] > 0


def test_wrong_lengths_are_refused_with_the_way_out(capfd: pytest.CaptureFixture[str]) -> None:
    from bench_offline import main

    assert main(["--num", "1", "--input", "9:3"]) == 1
    assert "--input is '9:3'" in capfd.readouterr().err
