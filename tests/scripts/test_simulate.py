"""The simulator serves every request once, repeats itself, and takes the time that its device model says."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import simulate as script
from bench.simulation.cost import HARDWARE, MODELS, StepCost, data_sheet_costs
from bench.simulation.engine import SizesBuilder
from bench.simulation.figures import Distribution
from bench.simulation.run import simulate

from jaxsgl.batch.buckets import BucketSet, Capacity
from jaxsgl.batch.build import BatchBuilder, Work
from jaxsgl.batch.sampling import SamplingRows
from jaxsgl.bench.requests import OUTPUT, OUTPUT_TOKEN, Ask, prompt_ids
from jaxsgl.bench.traces import DEFAULTS, TraceConfig, made_up
from jaxsgl.cache.pages import PageTable
from jaxsgl.config.engine import EngineConfig, SchedulingConfig
from jaxsgl.scheduler.scheduler import Scheduler

pytestmark = pytest.mark.device

ARCH = MODELS["qwen3-0.6b"]
COSTS = data_sheet_costs(HARDWARE["h200"], ARCH)
SMALL = Capacity(page_size=16, num_pages=400, num_rows=16, context_length=2048, max_extend_tokens=256, vocab_size=1000)
STEADY = {kind: StepCost(0.0, 1.0, 0.0, 0.0, 0.0) for kind in ("decode", "extend")}  # every step takes a second
TINY_TRACES = [
    TraceConfig(trace="random", num_prompts=80, input_len=300, output_len=40, request_rate=500.0),
    TraceConfig(trace="shared-prefix", num_prompts=80, system_len=200, input_len=30, output_len=10, groups=5,
                range_ratio=0.5),
    TraceConfig(trace="chat", num_prompts=80, input_len=50, output_len=30, turns=4, think_s=0.1, request_rate=100.0),
    TraceConfig(trace="bursts", num_prompts=80, output_len=20, long_len=1500, burst_size=4, burst_every_s=0.05,
                request_rate=400.0),
]  # fmt: skip


def served(asks, *, costs=COSTS, capacity=SMALL, config=None, **options):
    return simulate(config or EngineConfig(), ARCH, capacity, costs, asks, **options)


def all_turns(asks) -> list[Ask]:
    turns = []
    for ask in asks:
        while ask is not None:
            turns.append(ask)
            ask = ask.then
    return turns


@pytest.mark.parametrize("config", TINY_TRACES, ids=lambda config: config.trace)
def test_every_request_ends_once_with_all_its_tokens(config: TraceConfig) -> None:
    asked = all_turns(made_up(config, seed=3))
    figures, summary = served(made_up(config, seed=3))
    assert len(asked) == config.num_prompts == summary["completed"] == sum(figures.e2e_s.counts)
    assert figures.input_tokens == sum(sum(ask.lengths) for ask in asked)
    assert figures.output_tokens == sum(ask.output_len for ask in asked) == figures.load.totals.output_tokens
    assert sum(figures.itl_s.counts) == figures.output_tokens - len(asked)
    assert summary["steps"]["decode"]["waste"] >= 1 and summary["steps"]["extend"]["waste"] >= 1
    assert 0 < summary["device_busy"] <= 1 + 1e-9


@pytest.mark.parametrize("config", TINY_TRACES, ids=lambda config: config.trace)
def test_a_seed_repeats_the_run_and_another_does_not(config: TraceConfig) -> None:
    def run(seed: int) -> dict:
        _, summary = served(made_up(config, seed))
        return {name: value for name, value in summary.items() if name != "speed"}

    assert run(1) == run(1) != run(2)


def test_latencies_are_what_two_requests_see_by_hand() -> None:
    """The steps, 1 s each: extend the first, extend the second (which came at 0.5), decode both, decode the first."""
    asks = [Ask(0.0, (1,), (20,), output_len=3), Ask(0.5, (2,), (20,), output_len=2)]
    figures, summary = served(asks, costs=STEADY, config=EngineConfig(disable_overlap_schedule=True))
    assert list(figures.ttft_s.values) == [1.5, 1.0], "the second ends first"
    assert list(figures.e2e_s.values) == [2.5, 4.0]
    assert np.repeat(figures.itl_s.values, figures.itl_s.counts).tolist() == [2.0, 1.0, 1.0]
    assert list(figures.step_itl_s.values) == [2.0, 1.0], "of both in one step, and of the first alone"
    assert (summary["duration_s"], summary["device_busy"], summary["concurrency"]) == (4.0, 1.0, 6.5 / 4)


def test_overlap_hides_the_hosts_time_and_without_it_the_device_waits() -> None:
    asks = [Ask(0.0, (1,), (20,), output_len=50)]
    for disabled, duration_s in ((False, 50 + 0.25), (True, 50 * 1.25)):
        config = EngineConfig(disable_overlap_schedule=disabled)
        _, summary = served(asks, costs=STEADY, config=config, host_step_s=0.25)
        assert summary["duration_s"] == pytest.approx(duration_s), f"overlap off: {disabled}"


def test_percentiles_are_those_of_numpy() -> None:
    rng = np.random.default_rng(0)
    values, counts = rng.exponential(size=50), rng.integers(1, 9, 50)
    distribution = Distribution()
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        distribution.add(value, count)
    one_by_one = np.repeat(values, counts)
    median, p90, p95, p99 = np.percentile(one_by_one, [50, 90, 95, 99])
    expected = {
        "mean": one_by_one.mean(), "median": median, "std": one_by_one.std(), "p90": p90, "p95": p95, "p99": p99,
        "max": one_by_one.max(),
    }  # fmt: skip
    assert distribution.summary() == pytest.approx(expected)


def test_the_prefix_cache_serves_groups_and_turns() -> None:
    """Whole pages of the text before are cached: all but the answer's last token and a page that isn't full."""
    second = Ask(0.1, (0, 1, OUTPUT, 2), (100, 30, 40, 25), output_len=5)
    chat, _ = served([Ask(0.0, (0, 1), (100, 30), output_len=40, then=second)])
    assert chat.cached_tokens == (100 + 30 + 40 - 1) // 16 * 16
    without, _ = served(made_up(TINY_TRACES[1], 0), config=EngineConfig(disable_radix_cache=True))
    groups, _ = served(made_up(TINY_TRACES[1], 0))
    assert without.cached_tokens == 0
    assert groups.duration_s < without.duration_s


def test_equal_pieces_have_equal_tokens_and_different_pieces_do_not() -> None:
    one = prompt_ids(Ask(0.0, (7, 8, OUTPUT), (100, 50, 3), 1), 1000)
    two = prompt_ids(Ask(0.0, (7, 9), (120, 50), 1), 1000)
    assert one[:100] == two[:100] and one[100:116] != two[100:116]
    assert one[150:] == [OUTPUT_TOKEN] * 3 and OUTPUT_TOKEN not in one[:150]
    assert min(one[:150]) > 0 and max(one) < 1000 and len(set(one[:100])) > 80


def test_a_request_that_the_client_holds_back_counts_from_when_it_is_sent() -> None:
    asks = [Ask(0.0, (1,), (20,), output_len=2), Ask(0.25, (2,), (20,), output_len=2)]
    config = EngineConfig(disable_overlap_schedule=True)
    figures, summary = served(asks, costs=STEADY, config=config, max_concurrency=1)
    assert list(figures.ttft_s.values) == [1.0, 1.0] and list(figures.e2e_s.values) == [2.0, 2.0]
    assert (summary["duration_s"], summary["concurrency"], summary["waiting"]["max"]) == (4.0, 1.0, 0)


def test_a_request_that_can_never_run_is_refused_and_the_rest_are_served() -> None:
    _, summary = served([Ask(0.0, (1,), (3000,), 5), Ask(0.0, (2,), (20,), 5)])
    assert (summary["refused"], summary["completed"]) == (1, 1)


def test_a_scheduler_that_launches_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "launch", lambda self: None)
    with pytest.raises(RuntimeError, match=r"stands still at 0\.500 s with 1 open requests"):
        served([Ask(0.5, (1,), (20,), 5)])


def test_sizes_are_those_of_whole_batches() -> None:
    buckets = BucketSet.derive(SMALL)
    sampling = SamplingRows(SMALL.num_rows)
    table = PageTable(SMALL.num_rows, SMALL.max_pages_per_seq)
    arguments = (buckets, table, sampling, SMALL.page_size)
    whole, sizes = BatchBuilder(*arguments), SizesBuilder(*arguments)
    ids = np.ones(40, dtype=np.int32)
    decode = Work(7, np.array([~7], dtype=np.int32), 99, True)
    works = [Work(0, ids, 16, True), Work(3, ids[:5], 0, False), decode]
    rows, positions = np.array([1, 2, 5], dtype=np.int32), np.array([7, 100, 31], dtype=np.int32)
    for batch, small in ((whole.extend(works), sizes.extend(works)),
                         (whole.decode(rows, positions), sizes.decode(rows, positions))):  # fmt: skip
        arrays = batch.arrays
        assert (small.bucket, small.num_seqs, small.num_tokens) == (batch.bucket, batch.num_seqs, batch.num_tokens)
        assert small.kv_tokens + small.decode_kv_tokens == arrays.lengths.sum()
        assert small.pairs + small.decode_kv_tokens == (arrays.positions[: batch.num_tokens] + 1).sum()
    assert sizes.extend(works).decode_kv_tokens == 100


def test_several_decode_steps_in_one_program_pay_for_one_launch() -> None:
    costs = {"decode": StepCost(1.0, 0.5, 0.0, 0.0, 0.0), "extend": StepCost(1.0, 0.0, 0.0, 0.0, 0.0)}
    asks = [Ask(0.0, (1,), (20,), output_len=11)]
    for steps, seconds in ((1, 1 + 10 * 1.5), (4, 1 + 2 * (1 + 4 * 0.5) + 2 * 1.5)):
        figures, summary = served(asks, costs=costs, config=EngineConfig(decode_steps=steps))
        assert list(figures.e2e_s.values) == [seconds]
        assert summary["steps"]["decode"]["waste"] == 1.0


def test_flags_of_scheduling_reach_the_scheduler() -> None:
    """Two prompts in one group, one in another, one row: longest match first takes the second of the group second."""
    asks = [Ask(0.0, (1, 2), (100, 20), 2), Ask(0.5, (3,), (120,), 4), Ask(0.5, (1, 4), (100, 20), 2)]
    ends = {}
    for policy in ("fcfs", "lpm"):
        scheduling = SchedulingConfig(schedule_policy=policy)
        config = EngineConfig(scheduling=scheduling, max_running_requests=1, disable_overlap_schedule=True)
        figures, _ = served(asks, costs=STEADY, config=config, capacity=replace(SMALL, num_rows=1))
        ends[policy] = list(figures.e2e_s.values)
    assert ends == {"fcfs": [2.0, 5.5, 7.5], "lpm": [2.0, 3.5, 7.5]}


def test_the_time_of_a_mixed_step_counts_the_kv_of_those_that_decode_in_it() -> None:
    costs = {"decode": StepCost(1.0, 0.0, 0.0, 0.01, 0.0), "extend": StepCost(2.0, 0.0, 0.0, 0.0, 0.0)}
    asks = [Ask(0.0, (1,), (99,), output_len=2), Ask(1.0, (2,), (20,), output_len=1)]
    config = EngineConfig(scheduling=SchedulingConfig(enable_mixed_chunk=True), disable_overlap_schedule=True)
    figures, summary = served(asks, costs=costs, config=config)
    assert sorted(figures.e2e_s.values) == [4.0, 2.0 + 2.0 + 100 * 0.01]
    assert summary["steps"]["extend"]["count"] == 2


@pytest.mark.parametrize("mixed", [True, False])
def test_a_bound_between_tokens_holds_in_simulated_time(mixed: bool) -> None:
    costs = {"decode": StepCost(1e-3, 0.0, 1e-4, 1e-8, 0.0), "extend": StepCost(1e-3, 0.0, 1e-4, 0.0, 1e-9)}
    trace = TraceConfig(trace="bursts", num_prompts=60, output_len=100, long_len=1500, burst_size=2, burst_every_s=0.5,
                        request_rate=10.0)  # fmt: skip
    p99 = {}
    for bound_ms in (None, 12.0):
        config = EngineConfig(scheduling=SchedulingConfig(max_itl_ms=bound_ms, enable_mixed_chunk=mixed))
        _, summary = served(made_up(trace, 0), costs=costs, config=config)
        assert summary["completed"] == 60
        p99[bound_ms] = summary["step_itl_s"]["p99"]
    assert p99[12.0] <= 12e-3 < 25e-3 < p99[None]


def test_the_script_prints_writes_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}\n' * 2)
    flags = ["--model", "qwen3-0.6b", "--trace", "mooncake", "--trace-file", str(trace), "--json", str(out)]
    assert script.main([*flags, "--max-running-requests", "1", "--schedule-policy", "lof"]) == 0
    assert "ASSUMED" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["figures"]["completed"] == 2 and report["figures"]["running_mean"] <= 1
    assert report["figures"]["cache_hit_rate"] == pytest.approx(576 / 1200)  # in pages of 64, as on a GPU
    assert report["flags"]["engine"]["max_running_requests"] == 1
    assert report["flags"]["engine"]["scheduling"]["schedule_policy"] == "lof"
    assert script.main(["--trace", "bailian"]) == 1
    assert "--trace-file" in capsys.readouterr().err


def test_every_made_up_trace_has_defaults_and_runs_in_order_of_time() -> None:
    for name in DEFAULTS:
        times = [ask.at_s for ask in made_up(TraceConfig(trace=name, num_prompts=50), seed=0)]
        assert times == sorted(times)


def test_the_plans_of_a_run_are_written_in_order_of_simulated_time(tmp_path: Path) -> None:
    file = tmp_path / "plans"
    flags = ["--model", "qwen3-0.6b", "--trace", "chat", "--num-prompts", "4", "--plans", str(file)]
    assert script.main(flags) == 0
    lines = file.read_text().splitlines()
    times = [float(line.split()[0]) for line in lines]
    assert times == sorted(times)
    assert any("plan: extend 0/0+" in line and "admit 0/0" in line for line in lines)
    assert any("plan: decode" in line for line in lines)
